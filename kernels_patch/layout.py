"""Where the bytes of an INT8 KV page lie, and how one head vector is quantised (the scheme's words).

One page holds ``block_size`` tokens of one (block, KV head): payloads first, scales last, so that
vLLM's planner, which is told ``2 * D + 8`` bytes a token and head, pays for every byte::

    offset 0                      K payload, int8  [block_size, D]
    block_size * D                V payload, int8  [block_size, D]
    2 * block_size * D            K scales, float32 [block_size]
    2 * block_size * D + 4 * bs   V scales, float32 [block_size]

The module knows no device, no route and no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

QMAX = 127
SCALE_BYTES = 4


@dataclass(frozen=True)
class PageLayout:
    """Byte offsets inside one page of ``block_size`` tokens and head size ``head_dim``."""

    block_size: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token and KV head: K and V payload plus one float32 scale each."""
        return 2 * self.head_dim + 2 * SCALE_BYTES

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.bytes_per_token

    @property
    def v_offset(self) -> int:
        return self.block_size * self.head_dim

    @property
    def k_scale_offset(self) -> int:
        return 2 * self.block_size * self.head_dim

    @property
    def v_scale_offset(self) -> int:
        return self.k_scale_offset + SCALE_BYTES * self.block_size
