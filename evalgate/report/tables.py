"""The summary of a verdict as plain rows of text, shared by the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalgate.metrics import METRICS
from evalgate.report.words import (
    ABSENT,
    ARMS,
    Verdict,
    format_change,
    format_ms,
    format_number,
    format_score,
    printable,
)


@dataclass(frozen=True)
class Table:
    """``title``, column ``heads`` and ``rows`` of text; the first ``n_names`` columns are names."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    n_names: int = 2


@dataclass(frozen=True)
class TaskLine:
    """Mean score (0 to 1) of both arms for a task, as a whole (``bucket`` None) or in a bucket."""

    task: str
    bucket: str | None
    n: Mapping[str, int | None]
    mean: Mapping[str, float | None]

    @property
    def change_points(self) -> float | None:
        base, cand = (self.mean[arm] for arm in ARMS)
        return None if base is None or cand is None else (cand - base) * 100


def build_load_tables(verdict: Verdict) -> list[Table]:
    """Throughput and latency tables; empty when no load was measured."""
    summary = verdict["summary"]
    lines = [
        (bucket, arm, summary[arm]["buckets"][bucket])
        for bucket in _names(summary, "buckets")
        for arm in ARMS
        if bucket in (summary.get(arm) or {}).get("buckets", {})
    ]
    if not lines:
        return []
    throughput = [
        (
            printable(bucket),
            arm,
            f"{b['n']:,}",
            format_number(b["output_throughput"], 3),
            format_number(b["normalised_output_throughput"], 3),
        )
        for bucket, arm, b in lines
    ]
    for label, prefix in (("all requests", ""), ("weighted over buckets", "weighted_")):
        keys = (f"{prefix}output_throughput", f"{prefix}normalised_output_throughput")
        throughput += [
            (label, arm, "", *(format_number(summary[arm][k], 3) for k in keys))
            for arm in ARMS
            if arm in summary
        ]
    latency = [
        (
            printable(bucket),
            metric.removesuffix("_s").upper(),
            arm,
            f"{b[metric]['n']:,}",
            *(format_ms(b[metric][k]) for k in ("mean", "p50", "p90", "p95", "p99")),
        )
        for metric in ("ttft_s", "tpot_s", "e2el_s")
        for bucket, arm, b in lines
    ]
    return [
        Table(
            "Throughput (tokens/s)",
            ("bucket", "arm", "n", "output", "length-normalised"),
            throughput,
        ),
        Table(
            "Latency (ms; percentiles by linear interpolation)",
            ("bucket", "metric", "arm", "n", "mean", "p50", "p90", "p95", "p99"),
            latency,
            n_names=3,
        ),
    ]


def build_task_lines(verdict: Verdict) -> list[TaskLine]:
    """Each task as a whole, then its buckets, in the order of the summary."""
    summary = verdict["summary"]
    lines = []
    for task in _names(summary, "tasks"):
        arms = {arm: (summary.get(arm) or {}).get("tasks", {}).get(task) or {} for arm in ARMS}
        lines.append(_build_task_line(task, None, arms))
        buckets = dict.fromkeys(b for arm in ARMS for b in arms[arm].get("buckets", {}))
        lines += [
            _build_task_line(
                task, b, {arm: arms[arm].get("buckets", {}).get(b) or {} for arm in ARMS}
            )
            for b in buckets
        ]
    return lines


def build_task_table(verdict: Verdict) -> Table | None:
    """Scores in points of 100; None when no task ran."""
    rows = [
        (
            printable(line.task),
            "all" if line.bucket is None else printable(line.bucket),
            *(format_score(line.mean[arm]) for arm in ARMS),
            format_change(line.change_points, "points").removesuffix(" pt"),
            format_task_n(line),
        )
        for line in build_task_lines(verdict)
    ]
    heads = ("task", "bucket", *ARMS, "change", "n")
    return Table("Tasks (score in points of 100)", heads, rows) if rows else None


def build_identical_table(verdict: Verdict) -> Table | None:
    """Share of pairs with the same output text, beside base against base; None if not known."""
    rows: dict[str, tuple[str, str, str]] = {}
    for rule in verdict["rules"]:
        shares = (rule["details"] or {}).get("identical_outputs") or {}
        if shares.get("share") is not None:
            named = [f"{k} {printable(rule[k])}" for k in ("task", "bucket") if rule[k] is not None]
            scope = named[0] if named else "all requests"
            values = [format_share(shares.get(k)) for k in ("share", "base_against_base")]
            rows.setdefault(scope, (scope, *values))
    heads = ("pairs", "identical", "base against base")
    title = "Identical outputs (% of pairs)"
    return Table(title, heads, list(rows.values()), n_names=1) if rows else None


def build_depth_table(verdict: Verdict) -> Table | None:
    """Mean scores by length and depth of the answer, ``baseline / candidate``; None if unknown."""
    summary = verdict["summary"]
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for arm in ARMS:
        for task, about in ((summary.get(arm) or {}).get("tasks") or {}).items():
            for bucket, by_depth in (about.get("depths") or {}).items():
                for depth, mean in by_depth.items():
                    found.setdefault((task, bucket), {}).setdefault(depth, {})[arm] = mean
    depths = sorted({depth for cells in found.values() for depth in cells}, key=float)
    rows = [
        (
            printable(task),
            printable(bucket),
            *(_format_depth(cells[depth]) if depth in cells else ABSENT for depth in depths),
        )
        for (task, bucket), cells in found.items()
    ]
    heads = ("task", "bucket", *(f"depth {depth}" for depth in depths))
    title = "Scores by depth of the answer (points of 100, baseline / candidate)"
    return Table(title, heads, rows) if rows else None


def _format_depth(arms: Mapping[str, Mapping[str, Any]]) -> str:
    means = [arms[arm]["mean"] * 100 if arm in arms else None for arm in ARMS]
    return " / ".join(format_number(mean, 1) for mean in means)


def build_fidelity_table(verdict: Verdict) -> Table | None:
    """Fidelity of both arms by prompt length, for each rule on it; None if none was measured."""
    rows: list[tuple[str, ...]] = []
    for rule in verdict["rules"]:
        details = rule["details"] or {}
        metric = METRICS.get(rule["metric"])
        if metric is None or metric.source != "fidelity" or details.get("value") is None:
            continue
        whole = {"n": rule["n_pairs"], **details}
        for bucket, found in [("all", whole), *(details.get("buckets") or {}).items()]:
            rows.append(
                (
                    f"{metric.label} ({metric.unit})",
                    printable(bucket),
                    format_number(found["yardstick_value"], 4),
                    format_number(found["value"], 4),
                    f"{found['n']:,}",
                )
            )
    title = "Token fidelity (the baseline's text; the baseline's own second pass beside it)"
    heads = ("metric", "bucket", "second pass", "candidate", "texts")
    return Table(title, heads, rows) if rows else None


def format_share(value: float | None) -> str:
    return ABSENT if value is None else f"{value * 100:.1f}"


def format_task_n(line: TaskLine) -> str:
    """``50``, or ``50 / 48`` when the arms differ."""
    counts = [ABSENT if line.n[arm] is None else f"{line.n[arm]:,}" for arm in ARMS]
    return counts[0] if counts[0] == counts[1] else " / ".join(counts)


def _build_task_line(
    task: str, bucket: str | None, arms: Mapping[str, Mapping[str, Any]]
) -> TaskLine:
    return TaskLine(
        task,
        bucket,
        {arm: arms[arm].get("n") for arm in ARMS},
        {arm: arms[arm].get("mean") for arm in ARMS},
    )


def _names(summary: Mapping[str, Any], part: str) -> list[str]:
    """Names in either arm, in the order in which they come."""
    return list(dict.fromkeys(n for arm in ARMS for n in (summary.get(arm) or {}).get(part, {})))
