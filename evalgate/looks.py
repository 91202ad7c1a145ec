"""When a run was looked at while it went on, and what share of the error rate each look spent.

The share (blocks/planned)^1.5 of the error rate is spent by a look: the power family of spending
functions (K. Kim and D. L. DeMets, "Design and analysis of group sequential tests based on the type
I error spending rate function", Biometrika 74, 1987, 149-154; the idea of spending is K. K. G. Lan
and D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70, 1983,
659-663). The measuring half writes the looks into run.json, the judging half reads them; neither
what a look found nor what follows from its share is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalgate.errors import EvidenceError
from evalgate.records import Run, is_finite

POWER_OF_SPENDING = 1.5


@dataclass(frozen=True)
class Look:
    """The results were looked at after ``blocks`` launches of each arm; ``spent`` is the share of
    the error rate that was spent by then, 0 to 1."""

    blocks: int
    spent: float


def compute_spent(blocks: int, planned: int) -> float:
    """Share of the error rate spent by a look after ``blocks`` of ``planned`` launches."""
    return float(min(blocks / planned, 1.0) ** POWER_OF_SPENDING)


def read_looks(run: Run) -> tuple[Look, ...]:
    """The looks of a run that was stopped by its results; empty for any other run.

    Raises EvidenceError when what run.json says of them is damaged: without them no interval holds.
    """
    stored = (run.extra or {}).get("sequential")
    if stored is None:
        return ()
    try:
        looks = tuple(Look(look["blocks"], look["spent"]) for look in stored["looks"])
        blocks, spent = [0, *(x.blocks for x in looks)], [0.0, *(x.spent for x in looks)]
        sound = all(isinstance(b, int) and is_finite(s) for b, s in zip(blocks, spent, strict=True))
        sound = sound and blocks == sorted(set(blocks)) and spent == sorted(spent)
    except (KeyError, TypeError):
        sound = False
    if not sound or spent[-1] > 1:
        raise EvidenceError(
            f"run {run.run_id}: run.json: extra.sequential is damaged ({stored!r:.200}): its looks "
            "need rising blocks and spent, at most 1; restore run.json, or run again"
        )
    return looks


def describe_looks(looks: Sequence[Look]) -> str:
    """For people: after how many launches the results were looked at."""
    return ", ".join(str(look.blocks) for look in looks)
