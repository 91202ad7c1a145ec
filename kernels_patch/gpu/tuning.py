"""Launch shapes as data: for each device, what ``python -m kernels_patch bench`` measured fastest.

A table is right on every Hopper GPU, whatever the device and the versions; only its speed was
measured on one. So a device without a table of its own takes the default.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeTuning:
    """``teams`` of warps share a CTA's tiles; a warp takes ``rows_a_warp`` (8 or 16) queries, and
    with 8 keeps them and their weights as two INT8 digits (``shape.DecodePlan.two_digits``).

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


@dataclass(frozen=True)
class LaunchTable:
    """What was fastest on ``device`` (its name by CUDA) with these versions; first fit counts.

    ``decode``: most rows (query positions times heads of the group), head size, tuning. ``write``:
    most tokens of one write, tuning. None fits all.
    """

    device: str
    torch: str
    triton: str
    decode: tuple[tuple[int | None, int | None, DecodeTuning], ...]
    write: tuple[tuple[int | None, ProducerTuning], ...]

    def decode_tuning(self, rows: int, head_dim: int) -> DecodeTuning:
        return next(
            tuning
            for most, dim, tuning in self.decode
            if (most is None or rows <= most) and (dim is None or dim == head_dim)
        )

    def producer_tuning(self, n_tokens: int) -> ProducerTuning:
        return next(tuning for most, tuning in self.write if most is None or n_tokens <= most)

    @property
    def write_sizes(self) -> tuple[int, ...]:
        """One write of each tuning, in tokens."""
        return (1, *(most + 1 for most, _ in self.write if most is not None))


DEFAULT = LaunchTable(
    device="NVIDIA H200",
    torch="2.11.0+cu130",
    triton="3.6.0",
    decode=(
        (8, 256, DecodeTuning(teams=4)),
        (8, None, DecodeTuning(teams=6)),
        (16, 256, DecodeTuning(teams=3)),
        (16, None, DecodeTuning(teams=4)),
        (24, 64, DecodeTuning(teams=4)),
        (32, 256, DecodeTuning(teams=3, rows_a_warp=16)),
        (32, None, DecodeTuning(teams=4, rows_a_warp=16)),
        (None, None, DecodeTuning(teams=2, rows_a_warp=16)),
    ),
    write=((64, ProducerTuning(tokens=1, warps=1, split=True)), (None, ProducerTuning(8, 4))),
)
TABLES = {table.device: table for table in (DEFAULT,)}


def table_for(device: str) -> LaunchTable:
    """The table of the device of this name, or the default one."""
    return TABLES.get(device, DEFAULT)


def describe_unmeasured(device: str, torch: str, triton: str) -> str | None:
    """A sentence where the speed of these launch shapes was measured with something else."""
    table = table_for(device)
    there = {"device": device, "torch": torch, "triton": triton}
    other = {name: it for name, it in there.items() if it != getattr(table, name)}
    if not other:
        return None
    measured = ", ".join(f"{name} {getattr(table, name)}" for name in other)
    here = ", ".join(f"{name} {it}" for name, it in other.items())
    return f"launch shapes were measured with {measured}, and here is {here}: right, maybe slower"
