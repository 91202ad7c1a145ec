"""The cache write that rotates too: RoPE on queries and keys, quantise, pages, in one launch.

For models that call a rotary embedding by itself between the projection and the attention; one
that fuses it with something else has nothing to gain here. The pages come out as from vLLM's
``rotary_embedding`` and ``producer.int8_write`` one after the other: what is quantised are the
rotated values as the tensor's own type holds them, and they are rotated as vLLM's kernel does it,
in float32 whatever the type of cosines and sines, and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_patch.gpu.device import table_of
from kernels_patch.gpu.producer import served_layout, store_k, store_v
from kernels_patch.gpu.tuning import ProducerTuning


def int8_rope_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    ticks: torch.Tensor | None = None,
    tuning: ProducerTuning | None = None,
) -> None:
    """Rotate query [T, Hq, D] and key [T, Hkv, D] in place; write key and value as int8_write does.

    positions int64 [T] choose rows of cos_sin_cache [positions, R], cosines then sines, of the
    query's type or float32. The first R dimensions of a head are rotated, dimension i with i + R/2
    (``is_neox``) or each even one with the next; the others stay. slot_mapping may be shorter than
    T: padding is rotated and not written. ``ticks`` int64 [1] is raised by one if the first token
    is written. Of ``tuning``, which follows T, ``split`` says nothing: K and V are always apart.
    Raises ValueError for strides or shapes that the kernel does not serve.
    """
    n_tokens, heads, head_dim = query.shape
    layout = served_layout(kv_cache, query, key, value)
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"{rotary_dim} dimensions to rotate: want an even number to {head_dim}")
    if cos_sin_cache.stride() != (rotary_dim, 1):
        raise ValueError("cos_sin_cache must be contiguous")
    if positions.shape != (n_tokens,) or positions.stride() != (1,):
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}: want one for each of {n_tokens} tokens"
        )
    if n_tokens == 0:
        return
    tuning = tuning or table_of(key.device).producer_tuning(n_tokens)
    kv_heads = kv_cache.shape[1]
    _rope_write[(triton.cdiv(n_tokens, tuning.tokens), 2 * kv_heads + heads)](
        query, key, value, positions, cos_sin_cache, kv_cache, slot_mapping, ticks,
        n_tokens, slot_mapping.shape[0], rotary_dim // 2,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), kv_cache.stride(0), kv_cache.stride(1),
        KV_HEADS=kv_heads, BLOCK_SIZE=layout.block_size, D=head_dim, UNIT_BYTES=layout.unit_bytes,
        TOKENS=tuning.tokens, NEOX=is_neox, num_warps=tuning.warps,
    )  # fmt: skip


# Half of the rotary dimensions is no constant, so that one compilation serves every model of a
# head size: which embedding a model has is not known when kernels are compiled ahead.
@triton.jit(
    do_not_specialize=["n_tokens", "n_written"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "ticks"],
)
def _rope_write(
    query, key, value, positions, cos_sin_cache, kv_cache, slot_mapping, ticks,
    n_tokens, n_written, half,
    query_token, query_head, key_token, key_head, value_token, value_head,
    block_stride, head_stride,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, UNIT_BYTES: tl.constexpr,
    TOKENS: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens of one head of K, V or Q (axis 1, in this order)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    present = token < n_tokens
    row = token.to(tl.int64)
    if part >= 2 * KV_HEADS:
        angles = _angles(positions, cos_sin_cache, token, present, half)
        heads = query + row * query_token + (part - 2 * KV_HEADS) * query_head
        _rotate(heads, angles, present, half, D, NEOX)
    else:
        slot = tl.load(slot_mapping + token, mask=token < n_written, other=-1).to(tl.int32)
        if part < KV_HEADS:
            if ticks is not None:
                once = (part == 0) & (tl.program_id(0) == 0) & (n_written > 0)
                once &= tl.load(slot_mapping, mask=once, other=-1) >= 0
                tl.store(ticks, tl.load(ticks) + 1, mask=once)
            angles = _angles(positions, cos_sin_cache, token, present, half)
            heads = key + row * key_token + part * key_head
            k = _rotate(heads, angles, present, half, D, NEOX)
            pages = kv_cache + part * head_stride
            store_k(k, slot, pages, block_stride, BLOCK_SIZE, D, UNIT_BYTES)
        else:
            head = part - KV_HEADS
            heads = value + row * value_token + head * value_head
            v = tl.load(heads[:, None] + tl.arange(0, D)[None, :], mask=present[:, None], other=0.0)
            pages = kv_cache + head * head_stride
            store_v(v, slot, pages, block_stride, BLOCK_SIZE, D, UNIT_BYTES)


@triton.jit
def _angles(positions, cos_sin_cache, token, present, half):
    """Pointer to the first cosine of each token; its sines lie ``half`` further on."""
    return cos_sin_cache + tl.load(positions + token, mask=present, other=0) * (2 * half)


@triton.jit
def _rotate(heads, angles, present, half, D: tl.constexpr, NEOX: tl.constexpr):
    """Rotate vectors [tokens, D] at ``heads`` in place; returns them as they are stored."""
    dim = tl.arange(0, D)
    if NEOX:
        first = dim < half
        pair = tl.where(first, dim, dim - half)
        other = tl.where(first, dim + half, dim - half)
    else:
        first = dim % 2 == 0
        pair = dim // 2
        other = tl.where(first, dim + 1, dim - 1)
    turned = (dim < 2 * half)[None, :] & present[:, None]
    x = tl.load(heads[:, None] + dim[None, :], mask=present[:, None], other=0.0)
    y = tl.load(heads[:, None] + other[None, :], mask=turned, other=0.0)
    cos = tl.load(angles[:, None] + pair[None, :], mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(angles[:, None] + half + pair[None, :], mask=turned, other=0.0).to(tl.float32)
    sin = tl.where(first[None, :], -sin, sin)
    rotated = tl.fma(x.to(tl.float32), cos, y.to(tl.float32) * sin).to(x.dtype)
    x = tl.where(turned, rotated, x)
    tl.debug_barrier()  # another lane's ``y`` may be where this one's ``x`` goes
    tl.store(heads[:, None] + dim[None, :], x, mask=turned)
    return x
