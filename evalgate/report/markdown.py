"""The verdict as Markdown for a pull request: the answer in the first line, the rest folded."""

from __future__ import annotations

import re

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
    Verdict,
    check_verdict,
    describe_rule,
    printable,
)

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")
_LEADING = re.compile(r"^(#|[-+](?=[\s-]|$))")


def render_markdown(verdict: Verdict) -> str:
    """GitHub-flavoured Markdown. Foreign text can form no markup, link, HTML or mention."""
    check_verdict(verdict)
    status = STATUSES[verdict["status"]]
    rules = [describe_rule(rule, status.key) for rule in verdict["rules"]]
    parts = [f"## evalgate: {status}", f"{status.meaning.capitalize()}."]
    parts += _render_list("", verdict["invalid_reasons"])
    parts += _render_list("", [f"{r.name}: {r.reason}" for r in rules if r.status.key == "fail"])
    if rules:
        parts += [_render_rules(rules), f"<sub>{INTERVAL_NOTE}</sub>"]
    unsettled = [f"{r.name}: {r.unsettled}" for r in rules if r.unsettled]
    parts += _render_list("What would settle the open rules", unsettled)
    parts += _render_list("Warnings", verdict["warnings"])
    folded = [
        _render_table(t)
        for t in [
            *build_load_tables(verdict),
            build_task_table(verdict),
            build_depth_table(verdict),
            build_fidelity_table(verdict),
            build_identical_table(verdict),
        ]
        if t
    ]
    folded += ["\n\n".join(_render_list("Differing fields", verdict["differing_fields"]))]
    body = "\n\n".join(part for part in folded if part)
    if body:
        parts += [f"<details>\n<summary>Figures and differences</summary>\n\n{body}\n\n</details>"]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    plain = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"\s+", " ", _SPECIAL.sub(r"\\\1", plain)).strip()
    line = re.sub(r"^(\d+)(?=[.)]\s)", r"\1\\", line)
    line = _LEADING.sub(r"\\\1", line)
    # Mentions are looked for after Markdown, in running text: a comment splits that text.
    return line.replace("@", "@<!-- -->").replace("://", "&#58;//")


def _render_rules(rules: list[RuleWords]) -> str:
    heads = ("status", "rule", "change", "95 % bounds", "must be", "pairs", "launches")
    rows = []
    for r in rules:
        name = f"{r.name} ({'; '.join(r.notes)})" if r.notes else r.name
        rows.append((str(r.status), name, r.change, r.interval, r.margin, r.pairs, r.launches))
    return _render_grid(heads, rows)


def _render_table(table: Table) -> str:
    return f"**{escape(table.title)}**\n\n{_render_grid(table.heads, table.rows, table.n_names)}"


def _render_grid(heads: tuple[str, ...], rows: list[tuple[str, ...]], n_names: int = 2) -> str:
    rule = [":--" if i < n_names else "--:" for i in range(len(heads))]
    lines = [heads, *rows]
    cells = [[escape(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [cells[0], rule, *cells[1:]])


def _render_list(title: str, sentences: list[str]) -> list[str]:
    if not sentences:
        return []
    items = "\n".join(f"- {escape(s)}" for s in sentences)
    return [f"**{title}**\n\n{items}" if title else items]
