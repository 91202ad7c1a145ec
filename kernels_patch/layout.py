"""Where the bytes of an INT8 KV page lie (the scheme's words; no device, no route, no vLLM).

One page holds ``block_size`` tokens of one (block, KV head): payloads first, scales last, so that
vLLM's planner, which is told ``2 * D + 8`` bytes a token and head, pays for every byte::

    offset 0                      K payload, int8  [block_size / 16][D / 4][16 tokens][4 dimensions]
    block_size * D                V payload, int8  [block_size / 4][D][4 tokens]
    2 * block_size * D            K scales, float32 [block_size]
    2 * block_size * D + 4 * bs   V scales, float32 [block_size]

Four dimensions of one token (K) and four tokens of one dimension (V) lie side by side because the
integer dot products of every CPU (``vpmaddubsw``, ``vpdpbusd``, ``sdot``) sum four neighbouring
bytes into one 32-bit lane: scores come out one token a lane and outputs one dimension a lane, so
no kernel ever sums across lanes, and both payloads are read from front to back. ``k_index`` and
``v_index`` say the same as tables, for implementations that index bytes; nobody else needs to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

QMAX = 127
SCALE_BYTES = 4
K_TOKENS = 16  # tokens of one K tile: one 64-byte line holds 4 dimensions of each
LANE_BYTES = 4  # bytes that one 32-bit lane of an integer dot product sums


@dataclass(frozen=True)
class PageLayout:
    """Byte offsets inside one page of ``block_size`` tokens and head size ``head_dim``.

    Raises ValueError unless ``block_size`` is a multiple of 16 and ``head_dim`` one of 4.
    """

    block_size: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.block_size % K_TOKENS:
            raise ValueError(
                f"block_size is {self.block_size}: give a positive multiple of {K_TOKENS}"
            )
        if self.head_dim <= 0 or self.head_dim % LANE_BYTES:
            raise ValueError(
                f"head_dim is {self.head_dim}: give a positive multiple of {LANE_BYTES}"
            )

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

    @cached_property
    def k_index(self) -> np.ndarray:
        """int64 [block_size, D]: byte of the page that holds dimension d of token t's K."""
        token, dim = np.ix_(np.arange(self.block_size), np.arange(self.head_dim))
        tile, lane = divmod(token, K_TOKENS)
        quad, byte = divmod(dim, LANE_BYTES)
        tile_bytes = K_TOKENS * self.head_dim
        return tile * tile_bytes + quad * (K_TOKENS * LANE_BYTES) + lane * LANE_BYTES + byte

    @cached_property
    def v_index(self) -> np.ndarray:
        """int64 [block_size, D]: byte of the page that holds dimension d of token t's V."""
        token, dim = np.ix_(np.arange(self.block_size), np.arange(self.head_dim))
        quad, byte = divmod(token, LANE_BYTES)
        return self.v_offset + (quad * self.head_dim + dim) * LANE_BYTES + byte

    @cached_property
    def k_scale_index(self) -> np.ndarray:
        """int64 [block_size, 4]: the four bytes of token t's K scale (native float32)."""
        return self.k_scale_offset + np.arange(SCALE_BYTES * self.block_size).reshape(-1, 4)

    @cached_property
    def v_scale_index(self) -> np.ndarray:
        """int64 [block_size, 4]: the four bytes of token t's V scale (native float32)."""
        return self.k_scale_index + SCALE_BYTES * self.block_size
