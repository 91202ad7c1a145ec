"""From paired requests to the change of a speed metric, launches being what was sampled.

Every metric is one figure for each block and side, over the same pairs, in logarithms; a block's
value is the difference of its sides' figures. For a mean latency that is the mean of the pairs'
log-ratios, for a throughput or a percentile the log-ratio of the block's two figures. No policy
is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalgate.columns import Columns
from evalgate.compare import Bucket, RequestPairs
from evalgate.effects import Effect
from evalgate.metrics import METRICS, PERCENTILE_METHOD, Metric, compute_normalised_s
from evalgate.spread import compute_spread
from evalgate.stats import (
    Estimate,
    estimate_bootstrap_strata,
    estimate_paired,
    estimate_welch,
)

STATISTIC_PERCENT = {"p50": 50.0, "p99": 99.0}
MIN_P99_VALUES = 100
MAX_PROMPTS_RESAMPLED = 500  # in a bucket; more are resampled in that many groups

DEFINITIONS = {
    "ttft": "sending to the first chunk with a token",
    "tpot": "mean of requests' (last chunk - first chunk)/(tokens - 1), each request counting once",
    "e2el": "sending to the last chunk with a token",
    "output_throughput": "sum of output tokens / sum of E2EL, serial load",
    "normalised_output_throughput": "both arms given the baseline's token counts: "
    "sum of n / sum of (TTFT + TPOT (n - 1))",
    "weighted_output_throughput": "buckets' output throughput averaged with the spec's weights",
    "weighted_normalised_output_throughput": "buckets' length-normalised output throughput "
    "averaged with the spec's weights",
}


@dataclass(frozen=True)
class Side:
    """One side's rows: a latency's value, or a throughput's tokens (numerator) and seconds."""

    numerator: np.ndarray
    denominator: np.ndarray


@dataclass(frozen=True)
class Measure:
    """How rows become a side's log figure.

    ``reduce`` takes sums over rows by bucket, numerator and denominator [..., buckets], and gives
    log figures [...]; ``percent`` is set instead for percentiles, which need the rows themselves.
    """

    reduce: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    percent: float | None = None


def estimate_speed(
    pairs: RequestPairs,
    metric_name: str,
    buckets: Sequence[Bucket],
    *,
    bucket: str | None = None,
    statistic: str = "mean",
    apart: bool = False,
) -> Effect:
    """The change of a request metric in one bucket, or over all pairs when ``bucket`` is None.

    ``buckets`` are the spec's, with the weights for the weighted metrics. With ``apart``, or with
    references in ``pairs``, the launches of the two sides are not paired (Welch).
    """
    metric = METRICS[metric_name]
    sides = build_sides(pairs, metric)
    wanted = np.ones(len(pairs), dtype=bool)
    if bucket is not None:
        known = pairs.bucket_names.index(bucket) if bucket in pairs.bucket_names else -1
        wanted = pairs.bucket == known
    exists = wanted.copy()
    for side in sides:
        exists &= np.isfinite(side.numerator) & np.isfinite(side.denominator)
    rows = np.flatnonzero(exists)
    n_dropped = int(np.sum(wanted)) - len(rows)
    details: dict[str, Any] = {"definition": DEFINITIONS[metric.name], "statistic": statistic}
    if statistic in STATISTIC_PERCENT:
        details["percentile_method"] = PERCENTILE_METHOD

    def without(problem: str) -> Effect:
        return Effect(None, None, len(rows), n_dropped, 0, problem, details=details)

    if not len(rows):
        where = f" in bucket {bucket}" if bucket else ""
        return without(f"no pair{where} has {metric.label} in both arms ({n_dropped} left out)")
    order = _order_buckets(pairs, buckets)
    if metric.weighted and None in order:
        return without(_name_missing_buckets(pairs, buckets))
    measure = _build_measure(metric, statistic, buckets)
    groups = _split_blocks(pairs, rows, order if metric.weighted else None)
    if metric.weighted and not groups:
        return without(
            "no block has values in every bucket of the spec, as a weighted figure needs"
        )
    if statistic == "p99" and (fewest := min(len(g) for g in groups.values())) < MIN_P99_VALUES:
        return without(
            f"p99 is gated from {MIN_P99_VALUES} values up and a block has {fewest}: add prompts "
            "or repetitions"
        )
    codes = pairs.bucket if metric.weighted else np.zeros(len(pairs), dtype=int)
    position = order if metric.weighted else [0]
    figures = np.array(
        [
            [compute_figure(side, group, codes, position, measure) for side in sides]
            for group in groups.values()
        ]
    )
    estimate, details["method"] = _estimate(figures, apart or len(sides) == 4)
    spread = figures[:, 1] - figures[:, 0]
    if len(sides) == 4:
        spread = spread - (figures[:, 3] - figures[:, 2])
    details["block_values_percent"] = [100 * float(np.expm1(v)) for v in spread]
    if not metric.is_throughput and statistic == "mean":
        ratios = sides[1].numerator[rows] - sides[0].numerator[rows]
        found = compute_spread(ratios, pairs.block[rows])
        details["spread"] = found.to_json() if found else None
    if estimate is None:
        (group,) = groups.values()
        estimate = _bootstrap(pairs, sides, group, codes, position, measure)
        details["method"] = (
            "bootstrap over prompts within buckets, one launch (launches were not sampled)"
        )
    return Effect(
        value=float(np.mean(spread)),
        estimate=estimate,
        n_pairs=sum(len(g) for g in groups.values()),
        n_dropped=n_dropped + len(rows) - sum(len(g) for g in groups.values()),
        n_blocks=len(groups),
        problem=None if estimate else "one prompt in one launch: nothing says how far it varies",
        more=None if estimate else {"unit": "launches", "more": 1},
        details=details,
    )


def build_sides(pairs: RequestPairs, metric: Metric) -> list[Side]:
    """Rows of every side: baseline, candidate, then the references of a ratio of ratios."""
    tokens = pairs.baseline.output_tokens
    return [
        _build_side(columns, metric, tokens)
        for columns in (pairs.baseline, pairs.candidate, *(pairs.references or ()))
    ]


def _build_side(columns: Columns, metric: Metric, baseline_tokens: np.ndarray) -> Side:
    if not metric.is_throughput:
        values = getattr(columns, f"{metric.name}_s")
        return Side(np.log(values), np.where(np.isfinite(values), 1.0, np.nan))
    if "normalised" in metric.name:
        seconds = compute_normalised_s(columns.ttft_s, columns.tpot_s, baseline_tokens)
        return Side(baseline_tokens, seconds)
    return Side(columns.output_tokens, columns.e2el_s)


def _build_measure(metric: Metric, statistic: str, buckets: Sequence[Bucket]) -> Measure:
    if statistic in STATISTIC_PERCENT:
        return Measure(percent=STATISTIC_PERCENT[statistic])
    if metric.weighted:
        weights = np.array([b.weight for b in buckets])
        return Measure(lambda n, d: np.log(np.average(n / d, axis=-1, weights=weights)))
    if metric.is_throughput:
        return Measure(lambda n, d: np.log(n[..., 0] / d[..., 0]))
    return Measure(lambda n, d: n[..., 0] / d[..., 0])


def compute_figure(
    side: Side, rows: np.ndarray, codes: np.ndarray, position: Sequence[int], measure: Measure
) -> float:
    """A side's log figure over ``rows``. ``position``: the bucket code of each place in the sum."""
    if measure.percent is not None:
        values = np.exp(side.numerator[rows])
        return float(np.log(np.percentile(values, measure.percent, method=PERCENTILE_METHOD)))
    sums = [
        np.bincount(codes[rows], values[rows], minlength=max(position) + 1)[list(position)]
        for values in (side.numerator, side.denominator)
    ]
    return float(measure.reduce(*sums))


def _estimate(figures: np.ndarray, unpaired: bool) -> tuple[Estimate | None, str]:
    """Student's or Welch's t over blocks; no estimate from a single one.

    ``figures`` is [blocks, sides].
    """
    n_sides = figures.shape[1]
    if n_sides == 4:
        method = "ratio of ratios to the common baseline arm, Welch's t over launches"
        baseline, candidate = figures[:, 0] - figures[:, 2], figures[:, 1] - figures[:, 3]
    else:
        method = "Welch's t over launches" if unpaired else "Student's t over launches, paired"
        baseline, candidate = figures[:, 0], figures[:, 1]
    if len(figures) < 2:
        return None, method
    if unpaired:
        return estimate_welch(baseline, candidate, method), method
    return estimate_paired(candidate - baseline, method), method


def _bootstrap(
    pairs: RequestPairs,
    sides: Sequence[Side],
    rows: np.ndarray,
    codes: np.ndarray,
    position: Sequence[int],
    measure: Measure,
) -> Estimate | None:
    """One launch: resample prompts, all their repetitions together, within buckets."""
    rows = rows[np.isin(codes[rows], position)]  # a bucket that the spec lacks has no weight
    units = _number_units(pairs, rows)
    first_row = rows[np.unique(units, return_index=True)[1]]
    strata = [
        np.flatnonzero(pairs.bucket[first_row] == code) for code in np.unique(pairs.bucket[rows])
    ]
    signs = (-1, 1, 1, -1)[: len(sides)]
    if measure.percent is not None:
        tables = [_tabulate(np.exp(side.numerator[rows]), units) for side in sides]
        # The form that skips holes is a hundred times slower: only where there are any.
        percentile = np.nanpercentile if np.isnan(tables[0]).any() else np.percentile

        def statistic(drawn: list[np.ndarray]) -> np.ndarray:
            chosen = np.concatenate(drawn, axis=1)
            return sum(
                sign * np.log(percentile(t[chosen].reshape(len(chosen), -1), measure.percent, 1))
                for sign, t in zip(signs, tables, strict=True)
            )
    else:
        places = {code: place for place, code in enumerate(position)}
        n_units = len(first_row)
        sums = [
            tuple(
                np.bincount(units, v[rows], minlength=n_units) for v in (s.numerator, s.denominator)
            )
            for s in sides
        ]

        def statistic(drawn: list[np.ndarray]) -> np.ndarray:
            total = 0
            for sign, (numerator, denominator) in zip(signs, sums, strict=True):
                by_place = np.zeros((2, len(drawn[0]), len(position)))
                for chosen in drawn:
                    place = places[int(codes[first_row[chosen[0, 0]]])]
                    by_place[0, :, place] += numerator[chosen].sum(axis=1)
                    by_place[1, :, place] += denominator[chosen].sum(axis=1)
                total = total + sign * measure.reduce(by_place[0], by_place[1])
            return total

    return estimate_bootstrap_strata(statistic, strata, "bootstrap over prompts", "prompts")


def _number_units(pairs: RequestPairs, rows: np.ndarray) -> np.ndarray:
    """The unit of each row: its prompt, or its group of prompts where there are very many."""
    units = np.empty(len(rows), dtype=int)
    start = 0
    for code in np.unique(pairs.bucket[rows]):
        inside = pairs.bucket[rows] == code
        _, prompts = np.unique(pairs.prompt[rows][inside], return_inverse=True)
        units[inside] = start + prompts % MAX_PROMPTS_RESAMPLED
        start = int(units[inside].max()) + 1
    return units


def _tabulate(values: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Values [units, repetitions], NaN where a unit has fewer."""
    counts = np.bincount(units)
    table = np.full((len(counts), counts.max()), np.nan)
    order = np.argsort(units, kind="stable")
    ranks = np.arange(len(units)) - np.repeat(np.cumsum(counts) - counts, counts)
    table[units[order], ranks] = values[order]
    return table


def _order_buckets(pairs: RequestPairs, buckets: Sequence[Bucket]) -> list[int | None]:
    """The code that each bucket of the spec has in ``pairs``; None where it has no pair."""
    names = pairs.bucket_names
    return [names.index(b.name) if b.name in names else None for b in buckets] or [None]


def _name_missing_buckets(pairs: RequestPairs, buckets: Sequence[Bucket]) -> str:
    missing = [b.name for b in buckets if b.name not in pairs.bucket_names]
    if not buckets:
        return "the run's spec names no buckets, so there are no weights for a weighted figure"
    return f"no pair in bucket {', '.join(missing)}: a weighted figure needs every bucket"


def _split_blocks(
    pairs: RequestPairs, rows: np.ndarray, required: Sequence[int] | None
) -> dict[int, np.ndarray]:
    """Rows by block; with ``required``, only blocks that have every one of those buckets."""
    groups = {
        int(block): rows[pairs.block[rows] == block] for block in np.unique(pairs.block[rows])
    }
    if required is None:
        return groups
    return {b: g for b, g in groups.items() if set(required) <= set(pairs.bucket[g].tolist())}
