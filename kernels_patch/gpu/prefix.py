"""Prefix route on the GPU, first form: INT8 pages unpacked for a 16-bit attention kernel.

History and chunk are written into 16-bit scratch, one request after another, and the platform's
FlashAttention reads that; the scratch is the caller's, so that it is counted and reused. A kernel
with INT8 products for this route is not here: see docs/gpu_kernels.md for the one that was tried.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels_patch.gpu.layout import UNIT_TOKENS, UnitLayout


def dequantise(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    key: torch.Tensor,
    value: torch.Tensor,
    ticks: torch.Tensor | None = None,
) -> None:
    """Unpack the first seq_lens[b] tokens of request b to starts[b] of key, value [tokens, Hkv, D].

    block_table int32 [B, n], seq_lens and starts int32 [B], ``longest`` the largest seq_len (or
    more: the launch covers it); key and value are 16-bit and contiguous. ``ticks`` int64 [1] is
    raised by one.
    """
    _, kv_heads, block_size, _ = kv_cache.shape
    head_dim = key.shape[-1]
    grid = (triton.cdiv(longest, UNIT_TOKENS), kv_heads, seq_lens.shape[0])
    _dequantise[grid](
        kv_cache, block_table, seq_lens, starts, key, value, ticks,
        block_table.stride(0), kv_cache.stride(0), kv_cache.stride(1), key.stride(0),
        BLOCK_SIZE=block_size, D=head_dim,
        UNIT_BYTES=UnitLayout(block_size, head_dim).unit_bytes, num_warps=4,
    )  # fmt: skip


# What a step cuts out of a batch, and every other layer's counter, lies at any multiple of its own
# size: compiled for each alignment, the kernel would be compiled again within somebody's request.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "starts", "ticks"],
)
def _dequantise(
    kv_cache, block_table, seq_lens, starts, key, value, ticks,
    table_stride, block_stride, head_stride, token_stride,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, UNIT_BYTES: tl.constexpr,
):  # fmt: skip
    """One program: one unit of 16 tokens of one KV head of one request."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    first = tl.program_id(0) * 16
    if ticks is not None:
        once = (first == 0) & (head == 0) & (request == 0)
        tl.store(ticks, tl.load(ticks) + 1, mask=once)
    seq_len = tl.load(seq_lens + request)
    if first >= seq_len:
        return
    page = tl.load(block_table + request * table_stride + first // BLOCK_SIZE).to(tl.int64)
    unit = kv_cache + page * block_stride + head * head_stride
    unit += first % BLOCK_SIZE // 16 * UNIT_BYTES
    row = tl.arange(0, 16)
    dim = tl.arange(0, D)
    k = tl.load(unit + row[:, None] * 64 + (dim // 64 * 1024 + dim % 64)[None, :])
    v = tl.load(unit + 16 * D + dim[:, None] * 16 + row[None, :])
    scales = (unit + 32 * D).to(tl.pointer_type(tl.float32)) + row
    k = k.to(tl.float32) * tl.load(scales)[:, None]
    v = v.to(tl.float32) * tl.load(scales + 16)[None, :]
    token = (tl.load(starts + request) + first + row).to(tl.int64)
    to = token[:, None] * token_stride + head * D + dim[None, :]
    present = (first + row < seq_len)[:, None]
    tl.store(key + to, k.to(key.dtype.element_ty), mask=present)
    tl.store(value + to, tl.trans(v.to(value.dtype.element_ty)), mask=present)
