"""The verdict for a terminal: what it is and why first, then the rules, then the figures.

Drawn with rich into a string; the caller writes it. Foreign text is drawn as it is: it can neither
send control codes to the terminal nor act as rich markup.
"""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from evalgate.report.tables import (
    Table,
    build_depth_table,
    build_fidelity_table,
    build_identical_table,
    build_load_tables,
    build_task_table,
)
from evalgate.report.words import (
    INTERVAL_NOTE,
    STATUSES,
    RuleWords,
    Status,
    Verdict,
    check_verdict,
    describe_rule,
    printable,
)

NARROW = 96  # columns below which the table of rules has no room for its counts
STYLES = {
    "pass": "bold green",
    "fail": "bold red",
    "inconclusive": "bold yellow",
    "invalid": "bold magenta",
}


def render_text(verdict: Verdict, *, width: int = 100, colour: bool = False) -> str:
    """The verdict as text of at most ``width`` columns, with ANSI colours only when asked for."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        legacy_windows=False,
        highlight=False,
        emoji=False,
    )
    console.print(build_text(verdict, width=width))
    # Rich pads table cells to the full width; trailing blanks only make diffs and logs noisy.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def build_text(verdict: Verdict, *, width: int = 100) -> Group:
    """The same as a rich renderable, for a caller that has a console of its own."""
    check_verdict(verdict)
    status = STATUSES[verdict["status"]]
    rules = [describe_rule(rule, status.key) for rule in verdict["rules"]]
    parts: list[RenderableType] = [
        Text.assemble((f"{status}", STYLES[status.key]), f"  {status.meaning}")
    ]
    parts += _build_reasons(verdict, rules)
    if rules:
        parts += [
            Text(),
            _build_rules(rules, is_narrow=width < NARROW),
            Text(INTERVAL_NOTE, style="dim"),
        ]
    unsettled = [f"{r.name}: {r.unsettled}" for r in rules if r.unsettled]
    parts += _build_list("What would settle the open rules", unsettled)
    tables = [
        *build_load_tables(verdict),
        build_task_table(verdict),
        build_depth_table(verdict),
        build_fidelity_table(verdict),
        build_identical_table(verdict),
    ]
    for table in tables:
        if table is not None:
            parts += [Text(), _build_table(table)]
    parts += _build_list("Warnings", verdict["warnings"])
    parts += _build_list("Differing fields", verdict["differing_fields"])
    return Group(*parts)


def _build_reasons(verdict: Verdict, rules: list[RuleWords]) -> list[RenderableType]:
    reasons = [(STATUSES["invalid"], printable(r)) for r in verdict["invalid_reasons"]]
    reasons += [(r.status, f"{r.name}: {r.reason}") for r in rules if r.status.key == "fail"]
    return [
        Padding(Text.assemble((status.sign, STYLES[status.key]), f" {sentence}"), (0, 0, 0, 2))
        for status, sentence in reasons
    ]


def _build_rules(rules: list[RuleWords], *, is_narrow: bool) -> RichTable:
    """A row for each rule; a narrow table has its counts below the name, not in columns."""
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("status", no_wrap=True)
    table.add_column("rule", overflow="fold", min_width=12)
    counts = () if is_narrow else ("pairs", "launches")
    for head in ("change", "95 % bounds", "must be", *counts):
        table.add_column(head, justify="right", no_wrap=True)
    for r in rules:
        below = [f"pairs {r.pairs}", f"launches {r.launches}"] if is_narrow else []
        name = Text("\n").join([Text(r.name), *(Text(n, "dim") for n in [*below, *r.notes])])
        cells = [r.change, r.interval, r.margin]
        cells += [] if is_narrow else [r.pairs, r.launches]
        table.add_row(_status(r.status), name, *map(Text, cells))
    return table


def _build_table(data: Table) -> RichTable:
    table = RichTable(
        title=Text(data.title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    for i, head in enumerate(data.heads):
        table.add_column(head, justify="left" if i < data.n_names else "right", overflow="fold")
    for row in data.rows:
        table.add_row(*map(Text, row))
    return table


def _build_list(title: str, sentences: list[str]) -> list[RenderableType]:
    if not sentences:
        return []
    items = [Padding(Text(f"- {printable(s)}"), (0, 0, 0, 2)) for s in sentences]
    return [Text(), Text(title, style="bold"), *items]


def _status(status: Status) -> Text:
    return Text(str(status), style=STYLES[status.key])
