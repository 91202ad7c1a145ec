"""The figures of one arm on their own: throughputs, latencies and scores, by bucket and task.

No comparison is made here. Length-normalised throughput needs the token counts of the baseline,
pair by pair; without a baseline an arm's own counts stand for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
    figures: dict[str, _Figures] = {b.name: _Figures() for b in side.buckets}
    for record in good:
        figures.setdefault(record.bucket, _Figures()).add(record)
    for baseline, record in pairs:
        figures.setdefault(record.bucket, _Figures()).add_pair(baseline, record)
    buckets = {name: found.summarise() for name, found in figures.items()}
    weights = [b.weight for b in side.buckets]

    def weigh(figure: str) -> float | None:
        return compute_weighted([buckets[b.name][figure] for b in side.buckets], weights)

    return {
        "output_throughput": _compute_pooled([f.output for f in figures.values()]),
        "normalised_output_throughput": _compute_pooled([f.normalised for f in figures.values()]),
        "weighted_output_throughput": weigh("output_throughput"),
        "weighted_normalised_output_throughput": weigh("normalised_output_throughput"),
        "buckets": buckets,
        "tasks": _summarise_tasks(side),
    }


@dataclass
class _Figures:
    """One bucket's values, each computed once; ``output`` and ``normalised`` are (tokens, s)."""

    n: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    e2el_s: list[float] = field(default_factory=list)
    output: list[tuple[int, float]] = field(default_factory=list)
    normalised: list[tuple[int, float]] = field(default_factory=list)

    def add(self, record: RequestRecord) -> None:
        ttft_s, tpot_s, e2el_s = record.ttft_s, record.tpot_s, record.e2el_s
        self.n += 1
        if ttft_s is not None:
            self.ttft_s.append(ttft_s)
        # Several tokens in a single chunk have no time between them that was measured.
        if tpot_s:
            self.tpot_s.append(tpot_s)
        if e2el_s is not None:
            self.e2el_s.append(e2el_s)
            if record.output_tokens is not None:
                self.output.append((record.output_tokens, e2el_s))

    def add_pair(self, baseline: RequestRecord, record: RequestRecord) -> None:
        tokens = None if baseline.error else baseline.output_tokens
        seconds = compute_normalised_s(record.ttft_s, record.tpot_s, tokens)
        if tokens is not None and seconds is not None:
            self.normalised.append((tokens, seconds))

    def summarise(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "output_throughput": _compute_pooled([self.output]),
            "normalised_output_throughput": _compute_pooled([self.normalised]),
            "ttft_s": _describe(self.ttft_s),
            "tpot_s": _describe(self.tpot_s),
            "e2el_s": _describe(self.e2el_s),
        }


def _describe(values: Sequence[float]) -> dict[str, Any]:
    percentiles = {f"p{p}": compute_percentile(values, p) for p in PERCENTS}
    return {"n": len(values), "mean": sum(values) / len(values) if values else None, **percentiles}


def _compute_pooled(groups: Sequence[Sequence[tuple[int, float]]]) -> float | None:
    known = [value for group in groups for value in group]
    return compute_throughput([n for n, _ in known], [s for _, s in known])


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
    return None if depth is None else round(float(depth) * 4) / 4


def _average_by_depth(values: Iterable[tuple[float | None, float]]) -> dict[str, dict[str, Any]]:
    by_depth = defaultdict(list)
    for depth, score in values:
        if depth is not None:
            by_depth[depth].append(score)
    return {f"{depth:g}": _average(by_depth[depth]) for depth in sorted(by_depth)}


def _average(scores: Sequence[float]) -> dict[str, Any]:
    return {"n": len(scores), "mean": sum(scores) / len(scores)}
