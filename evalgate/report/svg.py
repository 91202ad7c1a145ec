"""A small helper for inline SVG plots that stay readable at every width.

A plot has no viewBox: x runs in percent of the width, y in pixels. So a plot grows and shrinks with
the page while its text and its markers keep their size. Colours, strokes and marker shapes
come from the page's style sheet and its ``<defs>``; ElementTree does the escaping.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from evalgate.report.words import printable


@dataclass(frozen=True)
class Scale:
    """A linear map from ``low..high`` to ``start..end``; values outside are held at the ends."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 3)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self, n: int) -> list[float]:
        """About ``n`` round values inside the range, steps of 1, 2 or 5 times a power of ten."""
        raw = (self.high - self.low) / n
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        digits = -math.floor(math.log10(step) + 1e-9)
        return sorted({round(i * step, digits) + 0.0 for i in range(first, last + 1)})


def build_scale(values: Sequence[float], start: float, end: float, *, pad: float = 0.04) -> Scale:
    """A scale that holds ``values`` with a little air; a single value gets a range around it."""
    low, high = min(values), max(values)
    air = (high - low) * pad or abs(low) * 0.05 or 1.0
    return Scale(low - air, high + air, start, end)


def format_tick(value: float, ticks: Sequence[float]) -> str:
    """A tick's label with as many decimals as its neighbours need."""
    gaps = [abs(b - a) for a, b in pairwise(ticks)]
    step = min(gaps, default=abs(value) or 1.0)
    if not 1e-6 <= step < 1e12:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{digits}f}"


class Plot:
    """One SVG of ``height`` pixels. ``label`` is what a screen reader says."""

    def __init__(self, height: float, label: str) -> None:
        self.root = ET.Element(
            "svg",
            {"class": "plot", "width": "100%", "height": f"{height:g}", "role": "img"},
        )
        self.root.set("aria-label", printable(label))

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str) -> None:
        self._add("line", cls, x1=f"{x1:g}%", y1=f"{y1:g}", x2=f"{x2:g}%", y2=f"{y2:g}")

    def rect(self, x1: float, y: float, x2: float, height: float, cls: str) -> None:
        width = f"{max(x2 - x1, 0):g}%"
        self._add("rect", cls, x=f"{x1:g}%", y=f"{y:g}", width=width, height=f"{height:g}")

    def text(self, x: float, y: float, text: str, cls: str = "", anchor: str = "middle") -> None:
        element = self._add("text", cls, x=f"{x:g}%", y=f"{y:g}")
        element.set("text-anchor", anchor)
        element.text = printable(text)

    def marker(self, kind: str, x: float, y: float, title: str | None = None) -> None:
        """The page's shape ``#m-KIND`` at a point, with ``title`` shown when pointed at."""
        element = self._add("use", f"m {kind}", href=f"#m-{kind}", x=f"{x:g}%", y=f"{y:g}")
        if title:
            ET.SubElement(element, "title").text = printable(title)

    def render(self) -> Markup:
        return Markup(ET.tostring(self.root, encoding="unicode"))

    def _add(self, tag: str, cls: str, **attributes: str) -> ET.Element:
        element = ET.SubElement(self.root, tag, attributes)
        if cls:
            element.set("class", cls)
        return element
