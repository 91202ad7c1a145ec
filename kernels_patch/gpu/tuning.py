"""Launch shapes as data: what ``python -m kernels_patch.gpu.bench`` measured fastest on an H200.

They are right on every Hopper GPU, whatever the device; only the speed was measured on one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeTuning:
    """``teams`` of warps share a CTA's tiles; a warp takes ``rows_a_warp`` (8 or 16) queries.

    A CTA takes at least ``least_tiles`` tiles of 32 tokens: few spread a short context over more
    SMs, but leave more partitions to merge.
    """

    teams: int
    rows_a_warp: int = 8
    least_tiles: int = 4


@dataclass(frozen=True)
class ProducerTuning:
    """Tokens and warps of one Triton program of the cache write; ``split``: K and V apart."""

    tokens: int
    warps: int
    split: bool = False


def decode_tuning(rows: int, head_dim: int) -> DecodeTuning:
    """For ``rows`` = queries of one KV head (query positions times heads of the group)."""
    if rows <= 8:
        return DecodeTuning(teams=4 if head_dim == 256 else 6)
    if rows <= 16:
        return DecodeTuning(teams=4, rows_a_warp=16)
    return DecodeTuning(teams=3 if rows <= 32 else 2, rows_a_warp=16)


FEW_TOKENS = 64  # of one write: up to so many, a program takes a single token
WRITE_SIZES = (1, FEW_TOKENS + 1)  # one write of each tuning


def producer_tuning(n_tokens: int) -> ProducerTuning:
    """For a write of ``n_tokens`` tokens."""
    if n_tokens <= FEW_TOKENS:
        return ProducerTuning(tokens=1, warps=1, split=True)
    return ProducerTuning(tokens=8, warps=4)
