"""Where the bytes of an INT8 KV page lie on a GPU (no device, no kernel, no vLLM).

A page holds ``block_size`` tokens of one (block, KV head), as on the CPU and with the same number
of bytes, ``2 * D + 8`` a token and head; their order differs. A page is a row of *units* of 16
tokens, and a unit holds everything about its tokens, so that one bulk copy brings all of it::

    offset in the unit   K payload, int8   [D / 64][16 tokens][64 dimensions]
    16 * D               V payload, int8   [D][16 tokens]
    32 * D               K scales, float32 [16]
    32 * D + 64          V scales, float32 [16]

K lies in rows of 64 bytes because eight lanes that read 16 bytes each then meet all 32
shared-memory banks once; V lies along tokens because Hopper's 8-bit matrix instructions sum over
neighbouring bytes of both operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

UNIT_TOKENS = 16
K_ROW_DIMS = 64
SCALE_BYTES = 4


@dataclass(frozen=True)
class UnitLayout:
    """Byte offsets inside one page of ``block_size`` tokens and head size ``head_dim``.

    Raises ValueError unless ``block_size`` is a multiple of 16 and ``head_dim`` one of 64.
    """

    block_size: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.block_size % UNIT_TOKENS:
            raise ValueError(
                f"block_size is {self.block_size}: give a positive multiple of {UNIT_TOKENS}"
            )
        if self.head_dim <= 0 or self.head_dim % K_ROW_DIMS:
            raise ValueError(
                f"head_dim is {self.head_dim}: give a positive multiple of {K_ROW_DIMS}"
            )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token and KV head: K and V payload plus one float32 scale each."""
        return 2 * self.head_dim + 2 * SCALE_BYTES

    @property
    def unit_bytes(self) -> int:
        return UNIT_TOKENS * self.bytes_per_token

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.bytes_per_token

    @cached_property
    def k_index(self) -> np.ndarray:
        """int64 [block_size, D]: byte of the page that holds dimension d of token t's K."""
        token, dim = np.ix_(np.arange(self.block_size), np.arange(self.head_dim))
        unit, row = divmod(token, UNIT_TOKENS)
        chunk, byte = divmod(dim, K_ROW_DIMS)
        return unit * self.unit_bytes + (chunk * UNIT_TOKENS + row) * K_ROW_DIMS + byte

    @cached_property
    def v_index(self) -> np.ndarray:
        """int64 [block_size, D]: byte of the page that holds dimension d of token t's V."""
        token, dim = np.ix_(np.arange(self.block_size), np.arange(self.head_dim))
        unit, row = divmod(token, UNIT_TOKENS)
        return unit * self.unit_bytes + (self.head_dim + dim) * UNIT_TOKENS + row

    @cached_property
    def k_scale_index(self) -> np.ndarray:
        """int64 [block_size]: first byte of token t's K scale (native float32)."""
        unit, row = divmod(np.arange(self.block_size), UNIT_TOKENS)
        return unit * self.unit_bytes + 2 * UNIT_TOKENS * self.head_dim + row * SCALE_BYTES

    @cached_property
    def v_scale_index(self) -> np.ndarray:
        """int64 [block_size]: first byte of token t's V scale (native float32)."""
        return self.k_scale_index + UNIT_TOKENS * SCALE_BYTES
