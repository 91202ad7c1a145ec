"""The figures of one arm on their own: throughputs, latencies and scores, by bucket and task.

No comparison is made here. Length-normalised throughput needs the token counts of the baseline,
pair by pair; without a baseline an arm's own counts stand for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from evalgate.columns import Numbered, number_by_appearance
from evalgate.compare import ArmView, RequestPairs
from evalgate.metrics import (
    compute_normalised_s,
    compute_percentiles,
    compute_throughput,
    compute_weighted,
)
from evalgate.records import SampleRecord, is_finite

PERCENTS = (50, 90, 95, 99)


def summarise(side: ArmView, pairs: RequestPairs | None = None) -> dict[str, Any]:
    """The "summary" part of the JSON verdict for one arm; times in s, throughputs in tokens/s.

    Failed requests and warm-up count nowhere; what has no value is None. TPOT is the mean of the
    requests' TPOT; percentiles interpolate linearly. ``pairs`` of (baseline, this arm) give the
    token counts for the normalised figures.
    """
    own, good = side.columns, ~side.facts.failed
    places = side.key_fields["bucket"]
    normalised = (own, own.output_tokens, places)
    if pairs is not None:
        paired_places = Numbered(pairs.bucket_names, pairs.bucket)
        normalised = (pairs.candidate, pairs.baseline.output_tokens, paired_places)
    columns, tokens, paired_places = normalised
    seconds = compute_normalised_s(columns.ttft_s, columns.tpot_s, tokens)
    first, _ = number_by_appearance(places.place[good])
    found = [places.distinct[i] for i in places.place[good][first]]
    buckets = {}
    for name in dict.fromkeys([*(b.name for b in side.buckets), *found]):
        inside, paired = good & places.find(name), paired_places.find(name)
        buckets[name] = {
            "n": int(np.sum(inside)),
            "output_throughput": compute_throughput(own.output_tokens[inside], own.e2el_s[inside]),
            "normalised_output_throughput": compute_throughput(tokens[paired], seconds[paired]),
            "ttft_s": _describe(own.ttft_s[inside]),
            "tpot_s": _describe(own.tpot_s[inside]),
            "e2el_s": _describe(own.e2el_s[inside]),
        }
    weights = [b.weight for b in side.buckets]

    def weigh(figure: str) -> float | None:
        return compute_weighted([buckets[b.name][figure] for b in side.buckets], weights)

    return {
        "output_throughput": compute_throughput(own.output_tokens, own.e2el_s),
        "normalised_output_throughput": compute_throughput(tokens, seconds),
        "weighted_output_throughput": weigh("output_throughput"),
        "weighted_normalised_output_throughput": weigh("normalised_output_throughput"),
        "buckets": buckets,
        "tasks": _summarise_tasks(side),
    }


def _describe(column: np.ndarray) -> dict[str, Any]:
    values = column[np.isfinite(column)]
    return {
        "n": len(values),
        "mean": float(np.mean(values)) if len(values) else None,
        **{
            f"p{p}": v for p, v in zip(PERCENTS, compute_percentiles(values, PERCENTS), strict=True)
        },
    }


def _summarise_tasks(side: ArmView) -> dict[str, Any]:
    """Means over distinct samples, each averaged over its blocks first.

    A task whose samples tell where in the context the answer stands has "depths" too: bucket, then
    depth to the nearest quarter.
    """
    by_task: dict[str, dict[str, list[SampleRecord]]] = defaultdict(lambda: defaultdict(list))
    for sample in side.samples:
        if sample.score is not None:
            by_task[sample.task][sample.sample_id].append(sample)
    tasks = {}
    for task, samples in sorted(by_task.items()):
        scores = {
            key: sum(s.score for s in found if s.score is not None) / len(found)
            for key, found in samples.items()
        }
        places = {key: side.find_bucket(found[0].prompt_tokens) for key, found in samples.items()}
        tasks[task] = {
            **_average(list(scores.values())),
            "buckets": {
                b.name: _average(inside)
                for b in side.buckets
                if (inside := [scores[key] for key in scores if places[key] == b.name])
            },
        }
        depths = {key: _find_depth(found[0]) for key, found in samples.items()}
        if any(depth is not None for depth in depths.values()):
            tasks[task]["depths"] = {
                b.name: by_depth
                for b in side.buckets
                if (
                    by_depth := _average_by_depth(
                        (depths[key], scores[key]) for key in scores if places[key] == b.name
                    )
                )
            }
    return tasks


def _find_depth(sample: SampleRecord) -> float | None:
    """Where the answer stands in the context, to the nearest quarter; None where none is known."""
    depth = (sample.extra or {}).get("depth")
    is_number = isinstance(depth, int | float) and is_finite(depth)
    return round(depth * 4) / 4 if is_number else None


def _average_by_depth(values: Iterable[tuple[float | None, float]]) -> dict[str, dict[str, Any]]:
    by_depth = defaultdict(list)
    for depth, score in values:
        if depth is not None:
            by_depth[depth].append(score)
    return {f"{depth:g}": _average(by_depth[depth]) for depth in sorted(by_depth)}


def _average(scores: Sequence[float]) -> dict[str, Any]:
    return {"n": len(scores), "mean": sum(scores) / len(scores)}
