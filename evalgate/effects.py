"""What one rule is judged by: an estimate with its counts, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evalgate.stats import Estimate


@dataclass(frozen=True)
class Effect:
    """A change measured over pairs, in log-ratio (speed) or difference (scores, fidelity).

    ``problem`` is a sentence that says why the estimate is missing or may not be judged yet;
    ``value`` is shown even when there is no estimate of its error. ``more`` is what to add, when
    the problem itself says so: {"unit", "more"}.
    """

    value: float | None
    estimate: Estimate | None
    n_pairs: int
    n_dropped: int
    n_blocks: int
    problem: str | None = None
    more: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)
