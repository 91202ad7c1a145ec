"""From records and verdicts to pages and tables; renders strings, writes nothing.

``render`` is the one face. Each format is a module, imported when it is asked for: text, json_,
markdown, junit, html; ``words`` and ``tables`` say what they share, ``evidence`` and ``plots`` what
the page adds.
"""

from __future__ import annotations

from evalgate.errors import UsageError
from evalgate.report.evidence import Context, describe_other_load
from evalgate.report.words import Verdict

FORMATS = ("text", "json", "markdown", "html", "junit")

__all__ = ["FORMATS", "Context", "describe_other_load", "render"]


def render(format_name: str, verdict: Verdict, context: Context | None = None) -> str:
    """A JSON verdict in one of FORMATS. ``context`` adds to HTML what lies behind the verdict.

    Raises UsageError for another format, EvidenceError for a verdict of another version.
    """
    match format_name:
        case "html":
            from evalgate.report.html import render_html

            return render_html(verdict, context)
        case "text":
            from evalgate.report.text import render_text as chosen
        case "json":
            from evalgate.report.json_ import render_json as chosen
        case "markdown":
            from evalgate.report.markdown import render_markdown as chosen
        case "junit":
            from evalgate.report.junit import render_junit as chosen
        case _:
            raise UsageError(
                f"format {format_name!r} is not one of {', '.join(FORMATS)}: choose one"
            )
    return chosen(verdict)
