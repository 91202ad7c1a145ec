"""From records and verdicts to pages and tables; renders strings, writes nothing.

``render`` is the one face. Each format is a module: text, json_, markdown, junit, html; ``words``
and ``tables`` say what they share, ``evidence`` and ``plots`` what the page adds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from evalgate.errors import UsageError

if TYPE_CHECKING:
    from evalgate.report.evidence import Context
    from evalgate.report.words import Verdict

FORMATS = ("text", "json", "markdown", "html", "junit")


def render(format_name: str, verdict: Verdict, context: Context | None = None) -> str:
    """A JSON verdict in one of FORMATS. ``context`` adds to HTML what lies behind the verdict.

    Raises UsageError for another format, EvidenceError for a verdict of another version.
    """
    if format_name not in FORMATS:
        raise UsageError(f"format {format_name!r} is not one of {', '.join(FORMATS)}: choose one")
    # Imported when asked for: a command line that only needs FORMATS must not wait for Jinja2.
    module = import_module(f"evalgate.report.{'json_' if format_name == 'json' else format_name}")
    if format_name == "html":
        return module.render_html(verdict, context)
    return getattr(module, f"render_{format_name}")(verdict)
