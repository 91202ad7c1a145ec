"""Whether the candidate's outputs ran away or broke off, which no latency can be trusted beside.

A broken kernel that repeats itself to the token limit looks fast in raw throughput; so lengths
are judged against the baseline's, pair by pair. Returns reasons as sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from evalgate.columns import is_cut
from evalgate.compare import RequestPairs, SamplePairs
from evalgate.policy import Validity
from evalgate.records import SampleRecord
from evalgate.stats import Estimate, estimate_bootstrap_strata

SURE_RATIO = 2.0  # beyond this the ratio speaks for itself, however few the pairs


@dataclass(frozen=True)
class Outputs:
    """Pairs of outputs without a failure, [pairs, (baseline, candidate)]; NaN where unknown.

    ``is_cut`` is 1 for an output that ended by finish_reason "length"; ``unit`` names the prompt.
    """

    tokens: np.ndarray
    is_cut: np.ndarray
    unit: Sequence[object]


@dataclass(frozen=True)
class LengthFindings:
    reasons: list[str]
    warnings: list[str]


def check_lengths(
    requests: RequestPairs, samples: SamplePairs, limits: Validity, *, forced: bool
) -> LengthFindings:
    """Judge output lengths of the load and of the tasks.

    ``forced``: the load ran to its token limit by ``ignore_eos``, so only the tasks say anything.
    """
    task_pairs = [(a, b) for a, b in samples.pairs if a.error is None and b.error is None]
    sources = {} if forced else {"load": _collect_load(requests)}
    sources["tasks"] = _collect_tasks(task_pairs)
    reasons = []
    for name, outputs in sources.items():
        reasons += _check_ratio(name, outputs, limits.max_length_ratio)
        reasons += _check_finish(name, outputs.is_cut, limits.max_length_finish_increase)
    reasons += _check_repetition(task_pairs, limits.max_repetition_increase)
    warnings = []
    if forced and not task_pairs:
        warnings.append(
            "output lengths were forced (ignore_eos) and there are no task outputs: nothing here "
            "shows whether the candidate's outputs run away; add tasks or set ignore_eos = false"
        )
    return LengthFindings(reasons, warnings)


def _collect_load(requests: RequestPairs) -> Outputs:
    good = ~np.any([side.failed for side in requests.facts], axis=0)

    def stack(name: str) -> np.ndarray:
        return np.stack([getattr(side, name)[good] for side in requests.facts], axis=1)

    return Outputs(stack("output_tokens"), stack("is_cut"), requests.prompt[good])


def _collect_tasks(pairs: Sequence[tuple[SampleRecord, SampleRecord]]) -> Outputs:
    def stack(read: Callable[[SampleRecord], float | None]) -> np.ndarray:
        return np.array([(read(a), read(b)) for a, b in pairs], dtype=float).reshape(-1, 2)

    return Outputs(
        stack(lambda sample: sample.output_tokens),
        stack(lambda sample: is_cut(sample.finish_reason)),
        [(a.task, a.sample_id) for a, _ in pairs],
    )


def _check_ratio(name: str, outputs: Outputs, limit: float) -> list[str]:
    known = _find_known(outputs.tokens)
    tokens = outputs.tokens[known]
    if limit == 0 or not len(tokens):
        return []
    totals = tokens.sum(axis=0)
    if totals.min() == 0:
        if totals.max() == 0:
            return []
        silent = "baseline" if totals[0] == 0 else "candidate"
        return [f"{name}: the {silent} produced no output token at all; find out why"]
    ratio = float(totals.max() / totals.min())
    if ratio <= limit:
        return []
    sign = 1 if totals[1] > totals[0] else -1
    units = [unit for unit, counted in zip(outputs.unit, known, strict=True) if counted]
    estimate = estimate_length_ratio(tokens, units)
    proven = ratio > SURE_RATIO
    shown = "beyond doubt at this size"
    if estimate is not None and not proven:
        bound = estimate.bounds()[0 if sign > 0 else 1]
        proven = sign * bound > 0
        shown = f"95 % bound {np.exp(sign * bound):.2f}"
    if not proven:
        return []
    return [
        f"{name}: the candidate's outputs are {ratio:.2f} times as "
        f"{'long' if sign > 0 else 'short'} as the baseline's ({totals[1]:.0f} against "
        f"{totals[0]:.0f} tokens, {shown}), above max_length_ratio {limit:g}: look at the "
        "outputs, the candidate is likely broken"
    ]


def estimate_length_ratio(tokens: np.ndarray, units: Sequence[object]) -> Estimate | None:
    """Log-ratio of summed tokens [pairs, (baseline, candidate)], units resampled together.

    None for fewer than two units.
    """
    numbers: dict[object, int] = {}
    codes = [numbers.setdefault(unit, len(numbers)) for unit in units]
    sums = np.stack([np.bincount(codes, column) for column in tokens.T], axis=1)

    def statistic(drawn: list[np.ndarray]) -> np.ndarray:
        totals = sums[drawn[0]].sum(axis=1)
        # A resample in which one side said nothing has no ratio; half a token keeps it extreme.
        return np.log(np.maximum(totals[:, 1], 0.5) / np.maximum(totals[:, 0], 0.5))

    return estimate_bootstrap_strata(statistic, [np.arange(len(numbers))], "bootstrap", "prompts")


def _check_finish(name: str, marks: np.ndarray, limit: float) -> list[str]:
    return _check_increase(
        marks[_find_known(marks)],
        f'{name}: the share of outputs that ended by finish_reason "length"',
        "max_length_finish_increase",
        limit,
    )


def _check_repetition(
    pairs: Sequence[tuple[SampleRecord, SampleRecord]], limit: float
) -> list[str]:
    marks = [("repetition" in a.flags, "repetition" in b.flags) for a, b in pairs]
    return _check_increase(
        np.array(marks, dtype=float),
        "tasks: the share of outputs flagged as repetition",
        "max_repetition_increase",
        limit,
    )


def _check_increase(marks: np.ndarray, what: str, key: str, limit: float) -> list[str]:
    """``marks``: 1 or 0 for each output, [pairs, (baseline, candidate)]."""
    if not len(marks):
        return []
    before, after = np.mean(marks, axis=0)
    # Shares are quotients of counts: a rise of exactly the limit must not fail by rounding.
    if after - before <= limit + 1e-12:
        return []
    return [
        f"{what} rose from {before:.1%} to {after:.1%} of {len(marks)} pairs, more than {key} "
        f"{limit:g}: look at the outputs, the candidate is likely broken"
    ]


def _find_known(values: np.ndarray) -> np.ndarray:
    """The pairs of which both values are known."""
    return ~np.isnan(values).any(axis=1)
