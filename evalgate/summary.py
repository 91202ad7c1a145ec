"""The figures of one arm on their own: throughputs, latencies and scores, by bucket and task.

No comparison is made here. Length-normalised throughput needs the token counts of the baseline,
pair by pair; without a baseline an arm's own counts stand for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from evalgate.compare import ArmView
from evalgate.metrics import (
    compute_normalised_s,
    compute_percentile,
    compute_throughput,
    compute_weighted,
)
from evalgate.records import RequestRecord, SampleRecord

PERCENTS = (50, 90, 95, 99)
Pair = tuple[RequestRecord, RequestRecord]


def summarise(side: ArmView, pairs: Sequence[Pair] | None = None) -> dict[str, Any]:
    """The "summary" part of the JSON verdict for one arm; times in s, throughputs in tokens/s.

    Failed requests and warm-up count nowhere; what has no value is None. TPOT is the mean of the
    requests' TPOT; percentiles interpolate linearly. ``pairs`` of (baseline, this arm) give the
    token counts for the normalised figures.
    """
    good = [r for r in side.measured if r.error is None]
    pairs = [(r, r) for r in good] if pairs is None else pairs
    by_bucket: dict[str, tuple[list[RequestRecord], list[Pair]]] = {
        b.name: ([], []) for b in side.buckets
    }
    for record in good:
        by_bucket.setdefault(record.bucket, ([], []))[0].append(record)
    for pair in pairs:
        by_bucket.setdefault(pair[1].bucket, ([], []))[1].append(pair)
    buckets = {name: _summarise_bucket(*found) for name, found in by_bucket.items()}
    weights = [b.weight for b in side.buckets]

    def weigh(figure: str) -> float | None:
        return compute_weighted([buckets[b.name][figure] for b in side.buckets], weights)

    return {
        "output_throughput": _compute_output_throughput(good),
        "normalised_output_throughput": _compute_normalised_throughput(pairs),
        "weighted_output_throughput": weigh("output_throughput"),
        "weighted_normalised_output_throughput": weigh("normalised_output_throughput"),
        "buckets": buckets,
        "tasks": _summarise_tasks(side),
    }


def _summarise_bucket(records: Sequence[RequestRecord], pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "n": len(records),
        "output_throughput": _compute_output_throughput(records),
        "normalised_output_throughput": _compute_normalised_throughput(pairs),
        "ttft_s": _describe([r.ttft_s for r in records]),
        # Several tokens in a single chunk have no time between them that was measured.
        "tpot_s": _describe([r.tpot_s or None for r in records]),
        "e2el_s": _describe([r.e2el_s for r in records]),
    }


def _describe(values: Sequence[float | None]) -> dict[str, Any]:
    known = [v for v in values if v is not None]
    percentiles = {f"p{p}": compute_percentile(known, p) for p in PERCENTS}
    return {"n": len(known), "mean": sum(known) / len(known) if known else None, **percentiles}


def _compute_output_throughput(records: Sequence[RequestRecord]) -> float | None:
    known = [
        (r.output_tokens, r.e2el_s)
        for r in records
        if r.output_tokens is not None and r.e2el_s is not None
    ]
    return compute_throughput([n for n, _ in known], [s for _, s in known])


def _compute_normalised_throughput(pairs: Sequence[Pair]) -> float | None:
    known = []
    for a, b in pairs:
        seconds = compute_normalised_s(b.ttft_s, b.tpot_s, a.output_tokens)
        if seconds is not None and a.error is None:
            known.append((a.output_tokens or 0, seconds))
    return compute_throughput([n for n, _ in known], [s for _, s in known])


def _summarise_tasks(side: ArmView) -> dict[str, Any]:
    """Means over distinct samples, each averaged over its blocks first."""
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
    return tasks


def _average(scores: Sequence[float]) -> dict[str, Any]:
    return {"n": len(scores), "mean": sum(scores) / len(scores)}
