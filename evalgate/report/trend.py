"""The trend over the nights as text, JSON and a page; the numbers come from evalgate.trend."""

from __future__ import annotations

import io
import json

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from evalgate import __version__
from evalgate.errors import UsageError
from evalgate.report.html import load_template
from evalgate.report.plots import draw_nights
from evalgate.report.words import (
    ABSENT,
    STATUSES,
    UNIT_SIGNS,
    check_verdict,
    format_change,
    printable,
)
from evalgate.trend import Series, Step, Trend

TREND_FORMATS = ("text", "json", "html")
HEADS = ("figure", "pinned night", "last night", "last against pinned", "noise", "changes of level")


def render_trend(format_name: str, trend: Trend) -> str:
    """A trend in one of TREND_FORMATS. Raises UsageError for another format."""
    renderers = {"text": _render_text, "json": _render_json, "html": _render_html}
    if format_name not in renderers:
        choices = ", ".join(TREND_FORMATS)
        raise UsageError(f"format {format_name!r} is not one of {choices}: choose one")
    for night in trend.nights:
        check_verdict(night.verdict)
    return renderers[format_name](trend)


def _render_text(trend: Trend) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False, emoji=False, color_system=None)
    console.print(Text(_explain(trend)))
    for line in _describe_left_out(trend):
        console.print(Text(line))
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for i, head in enumerate(HEADS):
        table.add_column(head, justify="right" if i else "left", overflow="fold")
    for row in _build_rows(trend):
        table.add_row(*map(Text, row))
    console.print(table)
    for line in _describe_steps(trend) or ["No change of level was found."]:
        console.print(Text(line))
    for note in dict.fromkeys(s.note for s in trend.series if s.note):
        console.print(Text(note))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _render_json(trend: Trend) -> str:
    data = {
        "pinned": trend.pinned,
        "left_out": list(trend.left_out),
        "others": list(trend.others),
        "skipped": list(trend.skipped),
        "nights": [
            {"name": n.name, "started_at": n.started_at, "status": n.verdict["status"]}
            for n in trend.nights
        ],
        "series": [
            {
                "name": s.name,
                "unit": s.unit,
                "higher_is_better": s.higher_is_better,
                "values": list(s.values),
                "noise": s.noise,
                "against_pinned": s.against_pinned,
                "steps": [
                    {"night": t.night, "change": t.change, "is_worse": t.is_worse} for t in s.steps
                ],
                "note": s.note,
            }
            for s in trend.series
        ],
    }
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _render_html(trend: Trend) -> str:
    names = [n.name for n in trend.nights]
    figures = [(s, draw_nights(s, names, trend.pinned)) for s in trend.series]
    return load_template("trend.html.j2").render(
        trend=trend,
        explanation=_explain(trend),
        left_out=_describe_left_out(trend),
        steps=_describe_steps(trend),
        heads=HEADS,
        rows=_build_rows(trend),
        plots=[(s, figure) for s, figure in figures if figure],
        nights=[(n, STATUSES[n.verdict["status"]]) for n in trend.nights],
        version=__version__,
    )


def _explain(trend: Trend) -> str:
    return (
        "Every figure is candidate against baseline of the same night, held against the pinned "
        f"night {printable(trend.pinned)}."
    )


def _describe_left_out(trend: Trend) -> list[str]:
    lines = [
        f"{what}: {printable(', '.join(names))}."
        for what, names in (
            ("Left out as invalid", trend.left_out),
            ("Left out, as they measured something else", trend.others),
        )
        if names
    ]
    return [*lines, *(f"Skipped: {printable(reason)}" for reason in trend.skipped)]


def _build_rows(trend: Trend) -> list[tuple[str, ...]]:
    at = [n.name for n in trend.nights].index(trend.pinned)
    return [
        (
            printable(s.name),
            format_change(s.values[at], s.unit),
            format_change(s.values[-1], s.unit),
            format_change(s.against_pinned, "points"),
            ABSENT if s.noise is None else f"± {s.noise:.2f} {UNIT_SIGNS[s.unit]}",
            str(len(s.steps)),
        )
        for s in trend.series
    ]


def _describe_steps(trend: Trend) -> list[str]:
    return [_describe_step(s, step) for s in trend.series for step in s.steps]


def _describe_step(series: Series, step: Step) -> str:
    word = "✗ worse" if step.is_worse else "✓ better"
    change = format_change(step.change, "points")
    return f"{word}: {printable(series.name)} by {change} from {printable(step.night)} on"
