"""``kernels_patch.solve`` on a GPU: one token's attention over an unpaged INT8 cache, in Triton.

Keys and values become float32 as they are read and the query is not quantised, so only float32
rounding stands between this and attention over the dequantised cache. Partitions of the tokens are
attended side by side and merged by their maxima and sums. ``kernels_patch.unpaged`` has checked the
call.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

PARTITION_TOKENS = 256
TILE_TOKENS = 32
MERGED_DIMS = 32  # of one program of the merge


def solve(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    """Attend query float32 [H, D] over int8 k and v [H, S, D], float32 scales [H, S], into ``out``
    float32 [H, D]; all contiguous."""
    heads, tokens, head_dim = k.shape
    partitions = triton.cdiv(tokens, PARTITION_TOKENS)
    sums = torch.empty(heads, partitions, head_dim, dtype=torch.float32, device=k.device)
    peaks = torch.empty(heads, partitions, dtype=torch.float32, device=k.device)
    totals = torch.empty_like(peaks)
    width = triton.next_power_of_2(head_dim)
    _attend[(heads, partitions)](
        query, k, v, k_scale, v_scale, sums, peaks, totals,
        tokens, head_dim, sm_scale * math.log2(math.e),
        WIDTH=width, PARTITION=PARTITION_TOKENS, TILE=TILE_TOKENS, num_warps=4,
    )  # fmt: skip
    dims = min(width, MERGED_DIMS)
    _merge[(heads, triton.cdiv(head_dim, dims))](
        sums, peaks, totals, out, partitions, head_dim,
        PARTITIONS=triton.next_power_of_2(partitions), DIMS=dims, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _attend(
    query, k, v, k_scale, v_scale, sums, peaks, totals, tokens, head_dim, score_scale,
    WIDTH: tl.constexpr, PARTITION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: one partition of one head. Leaves the weighted sum of V, the largest base-2
    score and the sum of weights."""
    head = tl.program_id(0)
    partition = tl.program_id(1)
    dim = tl.arange(0, WIDTH)
    has_dim = dim < head_dim
    q = tl.load(query + head * head_dim + dim, mask=has_dim, other=0.0) * score_scale
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([WIDTH], dtype=tl.float32)
    end = tl.minimum((partition + 1) * PARTITION, tokens)
    for first in range(partition * PARTITION, end, TILE):
        token = first + tl.arange(0, TILE)
        has_token = token < end
        row = head.to(tl.int64) * tokens + token
        at = row[:, None] * head_dim + dim[None, :]
        seen = has_token[:, None] & has_dim[None, :]
        keys = tl.load(k + at, mask=seen, other=0).to(tl.float32)
        score = tl.sum(keys * q[None, :], axis=1)
        score *= tl.load(k_scale + row, mask=has_token, other=0.0)
        score = tl.where(has_token, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=0))
        weight = tl.exp2(score - new_peak)
        keep = tl.exp2(peak - new_peak)
        total = total * keep + tl.sum(weight, axis=0)
        weight *= tl.load(v_scale + row, mask=has_token, other=0.0)
        values = tl.load(v + at, mask=seen, other=0).to(tl.float32)
        acc = acc * keep + tl.sum(values * weight[:, None], axis=0)
        peak = new_peak
    slot = head * tl.num_programs(1) + partition
    tl.store(sums + slot * head_dim + dim, acc, mask=has_dim)
    tl.store(peaks + slot, peak)
    tl.store(totals + slot, total)


@triton.jit(do_not_specialize=["partitions"])
def _merge(
    sums, peaks, totals, out, partitions, head_dim,
    PARTITIONS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """One program: some dimensions of one head's output from all of its partitions."""
    head = tl.program_id(0)
    dim = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    has_dim = dim < head_dim
    partition = tl.arange(0, PARTITIONS)
    there = partition < partitions
    slot = head * partitions + partition
    peak = tl.load(peaks + slot, mask=there, other=float("-inf"))
    share = tl.exp2(peak - tl.max(peak, axis=0))
    total = tl.sum(share * tl.load(totals + slot, mask=there, other=0.0), axis=0)
    at = slot[:, None] * head_dim + dim[None, :]
    part = tl.load(sums + at, mask=there[:, None] & has_dim[None, :], other=0.0)
    merged = tl.sum(part * share[:, None], axis=0)
    tl.store(out + head * head_dim + dim, merged / total, mask=has_dim)
