"""Whether the candidate's outputs ran away or broke off, which no latency can be trusted beside.

A broken kernel that repeats itself to the token limit looks fast in raw throughput; so lengths
are judged against the baseline's, pair by pair. Returns reasons as sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evalgate.compare import RequestPairs, SamplePairs
from evalgate.policy import Validity
from evalgate.records import RequestRecord, SampleRecord
from evalgate.stats import Estimate, estimate_bootstrap_strata

Pairs = Sequence[tuple[RequestRecord | SampleRecord, RequestRecord | SampleRecord]]

SURE_RATIO = 2.0  # beyond this the ratio speaks for itself, however few the pairs


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
    sources: list[tuple[str, Pairs]] = []
    if not forced:
        sources.append(("load", _keep_good(requests.pairs)))
    task_pairs = _keep_good(samples.pairs)
    sources.append(("tasks", task_pairs))
    reasons = []
    for name, pairs in sources:
        reasons += _check_ratio(name, pairs, limits.max_length_ratio)
        reasons += _check_finish(name, pairs, limits.max_length_finish_increase)
    reasons += _check_repetition(task_pairs, limits.max_repetition_increase)
    warnings = []
    if forced and not task_pairs:
        warnings.append(
            "output lengths were forced (ignore_eos) and there are no task outputs: nothing here "
            "shows whether the candidate's outputs run away; add tasks or set ignore_eos = false"
        )
    return LengthFindings(reasons, warnings)


def _check_ratio(name: str, pairs: Pairs, limit: float) -> list[str]:
    counts = [(a.output_tokens, b.output_tokens) for a, b in pairs]
    tokens = np.array(counts, dtype=float).reshape(-1, 2)  # None becomes NaN
    known = ~np.isnan(tokens).any(axis=1)
    tokens = tokens[known]
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
    units = [_name_unit(a) for (a, _), counted in zip(pairs, known, strict=True) if counted]
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


def _check_finish(name: str, pairs: Pairs, limit: float) -> list[str]:
    return _check_increase(
        [
            (a.finish_reason == "length", b.finish_reason == "length")
            for a, b in pairs
            if a.finish_reason is not None and b.finish_reason is not None
        ],
        f'{name}: the share of outputs that ended by finish_reason "length"',
        "max_length_finish_increase",
        limit,
    )


def _check_repetition(pairs: Pairs, limit: float) -> list[str]:
    return _check_increase(
        [("repetition" in a.flags, "repetition" in b.flags) for a, b in pairs],
        "tasks: the share of outputs flagged as repetition",
        "max_repetition_increase",
        limit,
    )


def _check_increase(
    marks: Sequence[tuple[bool, bool]], what: str, key: str, limit: float
) -> list[str]:
    if not marks:
        return []
    before, after = np.mean(np.array(marks), axis=0)
    # Shares are quotients of counts: a rise of exactly the limit must not fail by rounding.
    if after - before <= limit + 1e-12:
        return []
    return [
        f"{what} rose from {before:.1%} to {after:.1%} of {len(marks)} pairs, more than {key} "
        f"{limit:g}: look at the outputs, the candidate is likely broken"
    ]


def _keep_good(pairs: Pairs) -> Pairs:
    return [(a, b) for a, b in pairs if a.error is None and b.error is None]


def _name_unit(record: RequestRecord | SampleRecord) -> object:
    return record.key[1:3]
