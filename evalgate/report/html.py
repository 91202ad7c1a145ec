"""One self-contained HTML page: verdict and reasons first, then what they rest on.

Jinja2 escapes every string (autoescape); the only ready-made markup is the SVG that plots.py draws,
which ElementTree escapes. The page needs no script and loads nothing, and its Content-Security-
Policy forbids both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from evalgate import __version__
from evalgate.report import plots
from evalgate.report.evidence import Context, collect_evidence
from evalgate.report.tables import (
    TaskLine,
    build_depth_table,
    build_fidelity_table,
    build_identical_table,
    build_load_tables,
    build_task_lines,
    format_task_n,
)
from evalgate.report.words import (
    ABSENT,
    ARMS,
    INTERVAL_NOTE,
    STATUSES,
    Rule,
    RuleWords,
    Verdict,
    check_verdict,
    describe_rule,
    format_change,
    format_score,
    printable,
)

METRIC_LABELS = {"ttft": "TTFT", "tpot": "TPOT"}


@dataclass(frozen=True)
class ForestRow:
    words: RuleWords
    svg: Markup


@dataclass(frozen=True)
class Forest:
    """Rules of one unit over one axis; ``open`` rules have no figures to draw."""

    unit: str
    rows: list[ForestRow]
    axis: Markup


def render_html(verdict: Verdict, context: Context | None = None) -> str:
    """The page as text. Without ``context`` it holds what the verdict alone can show."""
    check_verdict(verdict)
    status = STATUSES[verdict["status"]]
    rules = [describe_rule(rule, status.key) for rule in verdict["rules"]]
    return load_template("page.html.j2").render(
        title=printable(context.title) if context else "",
        status=status,
        invalid_reasons=verdict["invalid_reasons"],
        rules=rules,
        interval_note=INTERVAL_NOTE,
        forests=_build_forests(verdict["rules"], status.key),
        tables=build_load_tables(verdict),
        identical=build_identical_table(verdict),
        depths=build_depth_table(verdict),
        fidelity=build_fidelity_table(verdict),
        tasks=[(line, _draw_task(line)) for line in build_task_lines(verdict)],
        warnings=verdict["warnings"],
        differing_fields=verdict["differing_fields"],
        arms=ARMS,
        version=__version__,
        **_build_evidence(context),
    )


def load_template(name: str) -> Template:
    """A page's template, with everything escaped and undefined names refused."""
    environment = Environment(
        loader=PackageLoader("evalgate.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "printable": printable,
        "score": format_score,
        "points": lambda value: format_change(value, "points").removesuffix(" pt"),
        "task_n": format_task_n,
        "absent": lambda value: ABSENT if value is None else value,
    }
    return environment.get_template(name)


def _build_forests(rules: list[Rule], overall: str) -> list[Forest]:
    forests = []
    for unit in ("percent", "points"):
        group = [r for r in rules if r["unit"] == unit]
        scale = plots.build_forest_scale(group)
        if scale is not None:
            rows = [
                ForestRow(describe_rule(r, overall), plots.draw_forest_row(r, scale)) for r in group
            ]
            forests.append(Forest(unit, rows, plots.draw_axis(scale, unit)))
    return forests


def _build_evidence(context: Context | None) -> dict[str, Any]:
    if context is None:
        return {
            "sources": [],
            "evidence": None,
            "distributions": [],
            "timelines": [],
            "lengths": None,
        }
    evidence = collect_evidence(context)
    distributions = [
        (printable(bucket), METRIC_LABELS[metric], figure)
        for bucket, metrics in evidence.latencies.items()
        for metric, arms in metrics.items()
        if (figure := plots.draw_distribution(arms, f"{METRIC_LABELS[metric]}, bucket {bucket}"))
    ]
    timelines = [
        (label, figure)
        for metric, label in METRIC_LABELS.items()
        if (figure := plots.draw_timeline(evidence.steps, metric))
    ]
    sources = [
        (
            name,
            f"arm {view.arm} of run {view.run.name} ({view.run.run_id}), "
            f"started {view.run.started_at}",
        )
        for name, view in context.arms.items()
    ]
    return {
        "sources": sources,
        "evidence": evidence,
        "distributions": distributions,
        "timelines": timelines,
        "lengths": plots.draw_lengths(evidence.lengths),
    }


def _draw_task(line: TaskLine) -> Markup:
    label = line.task if line.bucket is None else f"{line.task}, {line.bucket}"
    return plots.draw_scores(*(line.mean[arm] for arm in ARMS), label)
