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

from evalgate.report.tables import Table, build_load_tables, build_task_table
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
    console.print(build_text(verdict))
    # Rich pads table cells to the full width; trailing blanks only make diffs and logs noisy.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def build_text(verdict: Verdict) -> Group:
    """The same as a rich renderable, for a caller that has a console of its own."""
    check_verdict(verdict)
    status = STATUSES[verdict["status"]]
    rules = [describe_rule(rule, status.key) for rule in verdict["rules"]]
    parts: list[RenderableType] = [
        Text.assemble((f"{status}", STYLES[status.key]), f"  {status.meaning}")
    ]
    parts += _build_reasons(verdict, rules)
    if rules:
        parts += [Text(), _build_rules(rules), Text(INTERVAL_NOTE, style="dim")]
    unsettled = [f"{r.name}: {r.unsettled}" for r in rules if r.unsettled]
    parts += _build_list("What would settle the open rules", unsettled)
    tables = [*build_load_tables(verdict), build_task_table(verdict)]
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


def _build_rules(rules: list[RuleWords]) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("status", no_wrap=True)
    table.add_column("rule", overflow="fold", ratio=1)
    for head in ("change", "95 % bounds", "must be", "noise floor"):
        if head == "noise floor" and not any(r.noise_floor for r in rules):
            continue
        table.add_column(head, justify="right", overflow="fold")
    table.add_column("n", overflow="fold")
    for r in rules:
        cells = [r.change, r.interval, r.margin]
        if any(other.noise_floor for other in rules):
            cells.append(r.noise_floor or "")
        name = r.name if r.name.casefold() == r.about.casefold() else f"{r.name}\n{r.about}"
        table.add_row(_status(r.status), Text(name), *map(Text, cells), Text(r.n))
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
