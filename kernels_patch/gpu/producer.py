"""Cache write on the GPU: absmax for each token and head, quantise, payload and scales into pages.

One Triton kernel for K and V; the bytes are those of kernels_patch/reference.py's ``quantise`` in
the places of ``layout.UnitLayout``. Queries are not written: decode quantises the few it has in its
registers, which costs nothing against a round trip through memory. ``rope`` has the same write
behind the rotation of queries and keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_patch.gpu.device import table_of
from kernels_patch.gpu.layout import UnitLayout
from kernels_patch.gpu.tuning import ProducerTuning

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, half to even


def int8_write(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    tuning: ProducerTuning | None = None,
) -> None:
    """Quantise key and value [T, Hkv, D] into kv_cache int8 [blocks, Hkv, block_size, 2 D + 8].

    slot_mapping int64 [T]: block * block_size + offset, negative for a token to skip; it may be
    shorter than key, whose further tokens are then padding. Raises ValueError for strides or
    shapes that the kernel does not serve.
    """
    n_tokens = slot_mapping.shape[0]
    layout = served_layout(kv_cache, key, value)
    if n_tokens == 0:
        return
    tuning = tuning or table_of(key.device).producer_tuning(n_tokens)
    kv_heads = kv_cache.shape[1]
    _write[(triton.cdiv(n_tokens, tuning.tokens), kv_heads, 2 if tuning.split else 1)](
        key, value, kv_cache, slot_mapping, n_tokens,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        kv_cache.stride(0), kv_cache.stride(1),
        BLOCK_SIZE=layout.block_size, D=layout.head_dim, UNIT_BYTES=layout.unit_bytes,
        TOKENS=tuning.tokens, SPLIT=tuning.split, num_warps=tuning.warps,
    )  # fmt: skip


def served_layout(kv_cache: torch.Tensor, *tensors: torch.Tensor) -> UnitLayout:
    """The layout of kv_cache [blocks, Hkv, block_size, 2 D + 8] for ``tensors`` [T, H, D].

    Raises ValueError for strides or shapes that the cache write does not serve.
    """
    _, _, block_size, bytes_per_token = kv_cache.shape
    head_dim = tensors[0].shape[-1]
    layout = UnitLayout(block_size, head_dim)
    if bytes_per_token != layout.bytes_per_token:
        raise ValueError(
            f"a cache token has {bytes_per_token} bytes: want {layout.bytes_per_token}"
        )
    if head_dim & (head_dim - 1):
        raise ValueError(f"head_dim is {head_dim}: the cache write serves powers of two")
    if any(x.stride(2) != 1 for x in tensors):
        raise ValueError("the dimensions of query, key and value must be contiguous")
    if kv_cache.stride()[2:] != (bytes_per_token, 1):
        raise ValueError("kv_cache must have contiguous pages")
    return layout


@triton.jit(do_not_specialize=["n_tokens"])  # else each 1st, 16th and other length compiles anew
def _write(
    key, value, kv_cache, slot_mapping, n_tokens,
    key_token, key_head, value_token, value_head, block_stride, head_stride,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, UNIT_BYTES: tl.constexpr, TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens of one head, both K and V, or with SPLIT one of them (axis 2)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    present = token < n_tokens
    slot = tl.load(slot_mapping + token, mask=present, other=-1).to(tl.int32)
    # Not masked by slot: the loads need not wait for one another.
    dim = tl.arange(0, D)[None, :]
    token = token[:, None].to(tl.int64)
    k_at = key + token * key_token + head * key_head + dim
    v_at = value + token * value_token + head * value_head + dim
    if SPLIT:
        if tl.program_id(2) == 0:
            k = tl.load(k_at, mask=present[:, None], other=0.0)
            store_k(k, slot, kv_cache + head * head_stride, block_stride, BLOCK_SIZE, D, UNIT_BYTES)
        else:
            v = tl.load(v_at, mask=present[:, None], other=0.0)
            store_v(v, slot, kv_cache + head * head_stride, block_stride, BLOCK_SIZE, D, UNIT_BYTES)
    else:
        k = tl.load(k_at, mask=present[:, None], other=0.0)
        v = tl.load(v_at, mask=present[:, None], other=0.0)
        store_k(k, slot, kv_cache + head * head_stride, block_stride, BLOCK_SIZE, D, UNIT_BYTES)
        store_v(v, slot, kv_cache + head * head_stride, block_stride, BLOCK_SIZE, D, UNIT_BYTES)


@triton.jit
def _unit_of(slot, block_stride, BLOCK_SIZE: tl.constexpr, UNIT_BYTES: tl.constexpr):
    """Byte offset of the unit that holds ``slot``; 0 for a negative one."""
    slot = tl.maximum(slot, 0)
    return (slot // BLOCK_SIZE).to(tl.int64) * block_stride + slot % BLOCK_SIZE // 16 * UNIT_BYTES


@triton.jit
def store_k(
    x, slot, pages, block_stride,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, UNIT_BYTES: tl.constexpr,
):  # fmt: skip
    q, scale = _quantise(x)
    unit = pages + _unit_of(slot, block_stride, BLOCK_SIZE, UNIT_BYTES)
    dim = tl.arange(0, D)
    place = dim // 64 * 1024 + dim % 64
    tl.store(unit[:, None] + slot[:, None] % 16 * 64 + place[None, :], q, mask=slot[:, None] >= 0)
    scales = (unit + 32 * D + slot % 16 * 4).to(tl.pointer_type(tl.float32))
    tl.store(scales, scale, mask=slot >= 0)


@triton.jit
def store_v(
    x, slot, pages, block_stride,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, UNIT_BYTES: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = x.shape[0]
    q, scale = _quantise(x)
    unit = pages + _unit_of(slot, block_stride, BLOCK_SIZE, UNIT_BYTES)
    dim = tl.arange(0, D)
    scales = (unit + 32 * D + 64 + slot % 16 * 4).to(tl.pointer_type(tl.float32))
    tl.store(scales, scale, mask=slot >= 0)
    start = tl.min(slot, axis=0)
    whole_unit = False
    if TOKENS == 16:
        whole_unit = (start >= 0) & (start % 16 == 0)
        whole_unit &= tl.sum((slot != start + tl.arange(0, 16)).to(tl.int32), axis=0) == 0
    if whole_unit:  # 16 neighbouring tokens fill the unit: rows of 16 bytes
        one_unit = pages + _unit_of(start, block_stride, BLOCK_SIZE, UNIT_BYTES) + 16 * D
        tl.store(one_unit + dim[:, None] * 16 + tl.arange(0, TOKENS)[None, :], tl.trans(q))
    else:
        to = unit[:, None] + 16 * D + dim[None, :] * 16 + slot[:, None] % 16
        tl.store(to, q, mask=slot[:, None] >= 0)


@triton.jit
def _quantise(x):
    """int8 payload and float32 scale of x [tokens, D] over its last axis.

    The quotient x / scale is the correctly rounded one, so that halves fall as the reference's do,
    from the rounded reciprocal and two fused steps (Markstein): the division instruction's slow
    sequence took half of the kernel's time. Vectors so small that the reciprocal would overflow are
    lifted by a power of two first, which changes no quotient.

    Absolute values are compared as integers, in which any NaN is larger than infinity: it makes the
    scale NaN, as the reference's is, where the hardware's maximum of floats passes it over. The
    payload then means nothing.
    """
    x = x.to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1).to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(amax, 127.0)
    lift = tl.where(scale < 1e-20, 1.2089258196146292e24, 1.0)  # 2^80
    divisor = tl.where(scale == 0, 1.0, scale * lift)[:, None]
    inverse = tl.math.div_rn(1.0, divisor)
    x *= lift[:, None]
    quotient = x * inverse
    quotient = tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)
    # |quotient| rounds to 127 at most; the sum's low byte is the rounded quotient as int8.
    return (quotient + _ROUND).to(tl.int32, bitcast=True).to(tl.int8), scale
