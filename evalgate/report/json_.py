"""The JSON verdict as text, the form that other people's scripts read."""

from __future__ import annotations

import json

from evalgate.report.words import Verdict


def render_json(verdict: Verdict) -> str:
    """The verdict with its keys in order. NaN and infinity raise ValueError: they are a fault."""
    return json.dumps(verdict, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
