"""When a run that adds launches until its rules are decided goes on, looks, and ends; and the
minutes of one whose number of launches is fixed.

Knows blocks, minutes and the share of the error rate that each look spends; the results themselves
are looked at by a function that is handed in, so nothing is judged here. Whatever decides when a
look is taken, or that it is the last, is known from durations alone: an error rate is only kept
when the results do not choose the moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evalgate.errors import EvidenceError
from evalgate.looks import Look, compute_spent

MAX_BLOCKS = 50  # launches of each arm; what they leave open, more will hardly settle
MIN_LAUNCHES = 2  # below, nothing says how far launches vary


def estimate_block_s(block_s: Sequence[float], heavy_blocks: int) -> float:
    """Seconds of another block: the longest of the finished ones with the same work.

    ``heavy_blocks``: the first so many hold the tasks and the replay too.
    """
    return max(block_s[heavy_blocks:] or block_s)


@dataclass
class TimeLimit:
    """The minutes that a run may take, from now on: where a machine is to be had for so long only,
    a launch that would be cut off is better not begun.

    ``used_before_s``: of the minutes, what an earlier attempt used.
    """

    max_minutes: float
    used_before_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @property
    def used_s(self) -> float:
        return self.used_before_s + self.clock() - self._started

    @property
    def left_s(self) -> float:
        return 60 * self.max_minutes - self.used_s


@dataclass
class Stopping:
    """The state of such a run; ``block_s`` are the seconds of the finished blocks, which whoever
    measures them adds.

    ``first_look``: launches before the results are looked at. ``heavy_blocks`` as in
    ``estimate_block_s``. ``open_rules`` names the rules that more launches could decide; it is
    called when the look lies on disk.
    """

    limit: TimeLimit
    first_look: int
    heavy_blocks: int
    open_rules: Callable[[], Sequence[str]]
    block_s: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    planned_blocks: int | None = None
    ended: str | None = None

    @classmethod
    def restore(
        cls,
        stored: dict[str, Any],
        open_rules: Callable[[], Sequence[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> Stopping:
        """Go on from what ``to_json`` stored, with the minutes that are left.

        Raises EvidenceError when something is missing.
        """
        try:
            return cls(
                limit=TimeLimit(stored["max_minutes"], stored["used_s"], clock),
                first_look=stored["first_look"],
                heavy_blocks=stored["heavy_blocks"],
                open_rules=open_rules,
                block_s=list(stored["block_s"]),
                looks=[Look(**look) for look in stored["looks"]],
                planned_blocks=stored["planned_blocks"],
            )
        except (KeyError, TypeError) as exc:
            raise EvidenceError(
                f"run.json: extra.sequential is damaged ({exc!r}): it cannot be resumed, run again"
            ) from None

    def _estimate(self) -> float:
        return estimate_block_s(self.block_s, self.heavy_blocks)

    def wants_block(self, done: int, save: Callable[[], None], say: Callable[[str], None]) -> bool:
        """Whether another block is to be measured after ``done`` of them; looks when one is due."""
        if done == 0:
            return True
        fit = max(0, int(self.limit.left_s / self._estimate()))
        if done < self.first_look and fit > 0:
            return True
        if not self.looks or self.looks[-1].blocks < done:
            self._take_look(done, fit)
            save()
        found = self.open_rules()
        if not found:
            self.ended = "decided"
        elif fit == 0:
            self.ended = "minutes"
        elif self.looks[-1].spent >= 1:
            self.ended = "launches"
        say(self._describe(done, found))
        return self.ended is None

    def _take_look(self, done: int, fit: int) -> None:
        if self.planned_blocks is None:
            self.planned_blocks = max(done, min(done + fit, MAX_BLOCKS))
        is_last = fit == 0 or done >= self.planned_blocks
        # What is not spent by the last look would be spent for nothing.
        self.looks.append(Look(done, 1.0 if is_last else compute_spent(done, self.planned_blocks)))

    def _describe(self, done: int, found: Sequence[str]) -> str:
        head = f"look {len(self.looks)}, {done} of at most {self.planned_blocks} launches"
        if self.ended == "decided":
            return f"{head}: nothing is left that more launches could decide"
        why = {
            "minutes": f"; another takes about {self._estimate() / 60:.1f} minutes, "
            f"{max(self.limit.left_s, 0) / 60:.1f} are left",
            "launches": "; no more were planned",
            None: "",
        }[self.ended]
        return f"{head}: open are {', '.join(found)}{why}"

    def to_json(self) -> dict[str, Any]:
        """What run.json keeps under ``extra.sequential``: enough to judge, and to go on."""
        return {
            "max_minutes": self.limit.max_minutes,
            "first_look": self.first_look,
            "heavy_blocks": self.heavy_blocks,
            "planned_blocks": self.planned_blocks,
            "looks": [{"blocks": x.blocks, "spent": x.spent} for x in self.looks],
            "block_s": [round(s, 3) for s in self.block_s],
            "used_s": round(self.limit.used_s, 3),
            "ended": self.ended,
        }
