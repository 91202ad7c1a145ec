"""Launch shapes as data: what was measured fastest, per device and per problem.

Every entry is a measurement of ``python -m kernels_patch.gpu.bench``; a device that is not listed
gets the default of its architecture, which is right everywhere and fastest nowhere in particular.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeTuning:
    """``teams`` of warps share a CTA's tiles; a CTA takes at least ``least_tiles`` of 32 tokens.

    Few tiles a CTA spread a short context over more SMs, but leave more partitions to merge.
    """

    teams: int
    least_tiles: int


@dataclass(frozen=True)
class ProducerTuning:
    """Tokens and warps of one Triton program of the cache write; ``split``: K and V apart."""

    tokens: int
    warps: int
    split: bool = False


def decode_tuning(rows: int, head_dim: int) -> DecodeTuning:
    """For ``rows`` = queries of one KV head (query positions times heads of the group)."""
    if rows <= 8:
        return DecodeTuning(teams=4 if head_dim == 256 else 6, least_tiles=4)
    if rows <= 16:
        return DecodeTuning(teams=4, least_tiles=4)
    return DecodeTuning(teams=3 if rows <= 32 else 2, least_tiles=4)


def producer_tuning(n_tokens: int) -> ProducerTuning:
    """For a write of ``n_tokens`` tokens."""
    if n_tokens <= 64:
        return ProducerTuning(tokens=1, warps=4, split=True)
    if n_tokens <= 3072:
        return ProducerTuning(tokens=4, warps=2, split=True)
    return ProducerTuning(tokens=8, warps=4, split=True)
