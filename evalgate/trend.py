"""The nights of a gate as series: each against a pinned night, with the nights where it changed.

Every figure is candidate over baseline of the same night, so that a slower machine moves neither;
it is then set against the pinned night, which never moves by itself: a gate that compared with last
night would follow a slow regression down. Change points come from ruptures (extra ``trend``).
Verdicts in, numbers out; no file is opened here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalgate.errors import UsageError

MIN_NIGHTS = 8  # fewer cannot tell a step from noise
MIN_SEGMENT = 3  # nights that a level must last to be one
# A step costs at least 15 squared noise units: a penalty of 3 ln n alone shows a step in 16 % of
# series of pure noise at 8 nights (docs/reports.md has the simulated figures).
MIN_PENALTY = 15.0


@dataclass(frozen=True)
class Night:
    """One stored verdict: the run's name, its start (ISO-8601, UTC), the JSON verdict.

    ``subject`` says what was measured, as nights of another spec or model are no trend of this one.
    """

    name: str
    started_at: str
    verdict: Mapping[str, Any]
    subject: str = ""


@dataclass(frozen=True)
class Step:
    """The level changes with night ``index``, by ``change`` in the series' unit."""

    index: int
    night: str
    change: float
    is_worse: bool


@dataclass(frozen=True)
class Series:
    """One figure over the nights, None where a night lacks it.

    ``values`` are candidate against baseline in percent, or in points for a score; ``noise`` is
    the standard deviation from night to night, ``against_pinned`` the last value minus the pinned
    night's. ``note`` says why no change points were looked for.
    """

    name: str
    unit: str
    higher_is_better: bool
    values: tuple[float | None, ...]
    noise: float | None
    against_pinned: float | None
    steps: tuple[Step, ...]
    note: str = ""


@dataclass(frozen=True)
class Trend:
    """Nights in order of their start, valid ones only, and the night that all are held against.

    ``left_out``: names of invalid ones; ``others``: names of those of another subject;
    ``skipped``: a sentence for each run that could not be judged at all.
    """

    nights: tuple[Night, ...]
    pinned: str
    left_out: tuple[str, ...]
    series: tuple[Series, ...]
    others: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def build_trend(
    nights: Sequence[Night], pinned: str | None = None, skipped: Sequence[str] = ()
) -> Trend:
    """Put nights in order and look for steps in every figure.

    Nights with an invalid verdict, and those of another subject, are named and left out.
    ``pinned`` is the name of the night that counts as right; without one it is the oldest of the
    latest night's subject. Raises UsageError when there is no night, or none of that name.
    """
    ordered = sorted(nights, key=lambda n: (n.started_at, n.name))
    valid = [n for n in ordered if n.verdict["status"] != "invalid"]
    left_out = tuple(n.name for n in ordered if n.verdict["status"] == "invalid")
    if not valid:
        raise UsageError(
            f"no night with a valid verdict among {len(ordered)}: run `evalgate run` into this "
            f"folder first{''.join(f'; {reason}' for reason in skipped)}"
        )
    subjects = {n.name: n.subject for n in valid}
    if pinned is not None and pinned not in subjects:
        raise UsageError(
            f"the pinned night {pinned!r} is not among the valid ones: {', '.join(subjects)}"
        )
    subject = valid[-1].subject if pinned is None else subjects[pinned]
    others = tuple(n.name for n in valid if n.subject != subject)
    valid = [n for n in valid if n.subject == subject]
    names = [n.name for n in valid]
    reference = names[0] if pinned is None else pinned
    figures = [dict(_read_figures(n.verdict["summary"])) for n in valid]
    keys = dict.fromkeys(key for night in figures for key in night)
    series = [
        _build_series(key, [night.get(key) for night in figures], names, names.index(reference))
        for key in keys
    ]
    return Trend(tuple(valid), reference, left_out, tuple(series), others, tuple(skipped))


def find_steps(values: Sequence[float]) -> list[int]:
    """Indices at which a new level begins; PELT with squared error in units of the noise.

    The noise is estimated from neighbouring differences (1.4826 MAD / sqrt 2), which a few steps
    hardly touch. Raises UsageError when ruptures is not installed.
    """
    if len(values) < MIN_NIGHTS:
        return []
    noise = compute_noise(values)
    data = np.asarray(values, dtype=float)
    if not noise:
        noise = float(np.ptp(data)) / 100 or 1.0  # most nights are equal to the digit
    penalty = max(MIN_PENALTY, 3 * math.log(len(data)))
    search = _load_search()
    return search(((data - data.mean()) / noise).reshape(-1, 1), penalty)


def compute_noise(values: Sequence[float]) -> float | None:
    """Standard deviation of one night, from the differences of neighbours; None below 3 nights."""
    if len(values) < 3:
        return None
    differences = np.diff(np.asarray(values, dtype=float))
    spread = np.median(np.abs(differences - np.median(differences)))
    return float(1.4826 * spread / math.sqrt(2))


def _load_search() -> Callable[[np.ndarray, float], list[int]]:
    try:
        from ruptures import Pelt
    except ImportError:
        raise UsageError(
            "change points need ruptures, which is not installed: pip install 'evalgate[trend]'"
        ) from None

    def search(signal: np.ndarray, penalty: float) -> list[int]:
        algorithm = Pelt(model="l2", min_size=MIN_SEGMENT, jump=1)
        return [int(i) for i in algorithm.fit(signal).predict(pen=penalty)[:-1]]

    return search


def _build_series(
    key: tuple[str, str, bool], values: list[float | None], names: list[str], pinned: int
) -> Series:
    name, unit, higher_is_better = key
    places = [i for i, v in enumerate(values) if v is not None]
    known = [v for v in values if v is not None]
    note = ""
    if len(known) < MIN_NIGHTS:
        note = f"{len(known)} nights: change points are looked for from {MIN_NIGHTS} up"
    steps = []
    cuts = [0, *find_steps(known), len(known)]
    for before, at, after in zip(cuts, cuts[1:], cuts[2:], strict=False):
        change = float(np.mean(known[at:after]) - np.mean(known[before:at]))
        worse = (change < 0) == higher_is_better
        steps.append(Step(places[at], names[places[at]], change, worse))
    reference, last = values[pinned], values[-1]
    return Series(
        name=name,
        unit=unit,
        higher_is_better=higher_is_better,
        values=tuple(values),
        noise=compute_noise(known),
        against_pinned=None if reference is None or last is None else last - reference,
        steps=tuple(steps),
        note=note,
    )


def _read_figures(summary: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, bool], float]]:
    """((name, unit, higher is better), candidate against baseline) of one night."""
    base, cand = summary.get("baseline") or {}, summary.get("candidate") or {}
    for figure in ("weighted_normalised_output_throughput", "normalised_output_throughput"):
        change = _compute_percent(base.get(figure), cand.get(figure))
        if change is not None:
            yield (figure.replace("_", " "), "percent", True), change
    for bucket, theirs in (base.get("buckets") or {}).items():
        own = (cand.get("buckets") or {}).get(bucket) or {}
        for key in ("ttft_s", "tpot_s"):
            change = _compute_percent(
                (theirs.get(key) or {}).get("mean"), (own.get(key) or {}).get("mean")
            )
            if change is not None:
                yield (f"{key.removesuffix('_s').upper()} {bucket}", "percent", False), change
    for task, theirs in (base.get("tasks") or {}).items():
        own = ((cand.get("tasks") or {}).get(task) or {}).get("mean")
        if theirs.get("mean") is not None and own is not None:
            yield (f"{task} score", "points", True), 100 * (own - theirs["mean"])


def _compute_percent(base: float | None, cand: float | None) -> float | None:
    return None if not base or cand is None else 100 * (cand / base - 1)
