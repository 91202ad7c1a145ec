"""What decode.cu is compiled for, and what fits into an SM (arithmetic only, no device).

``DecodeShape`` is the problem, ``DecodePlan`` how a CTA is laid out for it; both refuse what the
kernel does not serve, so that a dispatcher can ask before anything is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels_patch.gpu.layout import UnitLayout
from kernels_patch.gpu.tuning import DEFAULT, DecodeTuning, LaunchTable

HEAD_DIMS = (64, 128, 256)
MAX_Q_LEN = 8
MAX_ROWS = 64
SHARED_BYTES = 227 * 1024  # what one CTA of an SM 9.0 can have
MAX_STAGES = 48
MAX_WARPS = {8: 12, 16: 8}  # rows of a warp -> warps of a CTA that still find registers for them
_BARRIER_BYTES = 16  # of a stage: full and empty


@dataclass(frozen=True)
class DecodeShape:
    """A problem. ``group`` is query heads per KV head; raises ValueError if it is not served."""

    head_dim: int
    group: int
    q_len: int
    block_size: int
    fp16: bool = False

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {self.head_dim}: decode serves {HEAD_DIMS}")
        if not 1 <= self.q_len <= MAX_Q_LEN:
            raise ValueError(f"q_len is {self.q_len}: decode serves 1 to {MAX_Q_LEN}")
        if self.rows > MAX_ROWS:
            raise ValueError(
                f"q_len {self.q_len} times {self.group} heads a group is {self.rows} rows: "
                f"decode serves up to {MAX_ROWS}"
            )
        UnitLayout(self.block_size, self.head_dim)

    @property
    def rows(self) -> int:
        """Queries that read one KV head: query positions times heads of the group."""
        return self.q_len * self.group

    def plan(self, tuning: DecodeTuning | None = None, table: LaunchTable = DEFAULT) -> DecodePlan:
        """With ``tuning``, or as ``table`` has it."""
        return DecodePlan(self, tuning or table.decode_tuning(self.rows, self.head_dim))


@dataclass(frozen=True)
class DecodePlan:
    """How one CTA works on a shape; raises ValueError if that does not fit into an SM."""

    shape: DecodeShape
    tuning: DecodeTuning

    def __post_init__(self) -> None:
        rows_a_warp, warps = self.tuning.rows_a_warp, self.tuning.teams * self.row_blocks
        if rows_a_warp not in MAX_WARPS:
            raise ValueError(f"a warp takes {rows_a_warp} rows: give one of {tuple(MAX_WARPS)}")
        if warps > MAX_WARPS[rows_a_warp] or self.stages < self.tuning.teams:
            raise ValueError(
                f"{self.tuning.teams} teams of {self.row_blocks} warps do not fit into one SM "
                f"for {self.shape}"
            )

    @property
    def row_blocks(self) -> int:
        """Warps of a team."""
        return -(-self.shape.rows // self.tuning.rows_a_warp)

    @property
    def two_digits(self) -> bool:
        """Are queries and weights kept as two INT8 digits? They are where a warp's 8 rows leave
        half of the matrix instruction's 16 idle, and then only K and V are rounded to INT8."""
        return self.tuning.rows_a_warp == 8

    @property
    def threads(self) -> int:
        return 32 * (self.tuning.teams * self.row_blocks + 1)

    @property
    def stages(self) -> int:
        """Ring depth: as deep as shared memory allows, the same number of stages for each team."""
        one = self._shared_bytes(1) - self._shared_bytes(0)
        most = min(MAX_STAGES, (SHARED_BYTES - self._shared_bytes(0)) // one)
        return most // self.tuning.teams * self.tuning.teams

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA; decode.cu lays it out in the same order."""
        return self._shared_bytes(self.stages)

    @property
    def definitions(self) -> dict[str, int]:
        """The constants that decode.cu is compiled with."""
        return {
            "HEAD_DIM": self.shape.head_dim,
            "GROUP": self.shape.group,
            "Q_LEN": self.shape.q_len,
            "BLOCK_SIZE": self.shape.block_size,
            "ROWS_A_WARP": self.tuning.rows_a_warp,
            "ROW_BLOCKS": self.row_blocks,
            "TEAMS": self.tuning.teams,
            "STAGES": self.stages,
            "FP16": int(self.shape.fp16),
        }

    def _shared_bytes(self, stages: int) -> int:
        stage = 2 * UnitLayout(self.shape.block_size, self.shape.head_dim).unit_bytes + 128
        rows = self.tuning.teams * self.shape.rows
        partials = rows * (self.shape.head_dim + 8) * 4 + rows * 8
        return stages * (stage + _BARRIER_BYTES) + partials
