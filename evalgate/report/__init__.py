"""From records and verdicts to pages and tables; renders strings, writes nothing.

``render`` is the one face. Each format is a module: text, json_, markdown, junit, html; ``words``
and ``tables`` say what they share, ``evidence`` and ``plots`` what the page adds.
"""

from __future__ import annotations

from evalgate.errors import UsageError
from evalgate.report.evidence import Context, describe_other_load
from evalgate.report.html import render_html
from evalgate.report.json_ import render_json
from evalgate.report.junit import render_junit
from evalgate.report.markdown import render_markdown
from evalgate.report.text import build_text, render_text
from evalgate.report.words import Verdict

FORMATS = ("text", "json", "markdown", "html", "junit")

__all__ = [
    "FORMATS",
    "Context",
    "build_text",
    "describe_other_load",
    "render",
    "render_text",
]


def render(format_name: str, verdict: Verdict, context: Context | None = None) -> str:
    """A JSON verdict in one of FORMATS. ``context`` adds to HTML what lies behind the verdict.

    Raises UsageError for another format, EvidenceError for a verdict of another version.
    """
    if format_name == "html":
        return render_html(verdict, context)
    renderers = {
        "text": render_text,
        "json": render_json,
        "markdown": render_markdown,
        "junit": render_junit,
    }
    if format_name not in renderers:
        raise UsageError(f"format {format_name!r} is not one of {', '.join(FORMATS)}: choose one")
    return renderers[format_name](verdict)
