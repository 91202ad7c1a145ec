"""The page's plots: changes against margins, distributions, order of execution, lengths, scores.

Each takes plain values and gives an SVG. Baseline and candidate differ by shape (circle, diamond)
as well as by colour. A value far outside is drawn at the edge as an arrow and counted in words,
so that one stray request does not squeeze the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
from markupsafe import Markup

from evalgate.report.evidence import MAX_POINTS, LengthPoint, Point, Step, thin
from evalgate.report.svg import Plot, Scale, build_scale, format_tick
from evalgate.report.words import (
    ARMS,
    Rule,
    compute_threshold,
    format_ms,
    is_better_upwards,
)
from evalgate.trend import Series

LEFT, RIGHT = 3.0, 97.0  # percent of the width that a plot without a left-hand scale uses
Y_LEFT = 11.0  # where one with a left-hand scale begins
ROW = 18.0
AXIS = 22.0


@dataclass(frozen=True)
class Figure:
    """A plot and what the reader must know of it in words."""

    svg: Markup
    note: str = ""


def draw_forest_row(rule: Rule, scale: Scale) -> Markup:
    """One rule: its interval and change, zero, its margin, and a bar over what would pass."""
    height, y = 26.0, 13.0
    plot = Plot(height, f"{rule['name']}: change against margin")
    threshold = compute_threshold(rule)
    if threshold is not None:
        edge = scale(threshold)
        span = (edge, RIGHT) if is_better_upwards(rule) else (LEFT, edge)
        plot.rect(span[0], 0, span[1], height, "passing")
    floor = (rule["details"] or {}).get("noise_floor") or {}
    if floor.get("ci_low") is not None and floor.get("ci_high") is not None:
        plot.rect(scale(floor["ci_low"]), y - 5, scale(floor["ci_high"]), 10, "noise")
    plot.line(scale(0.0), 0, scale(0.0), height, "zero")
    if threshold is not None:
        plot.line(scale(threshold), 0, scale(threshold), height, "margin")
    low, high, observed = rule["ci_low"], rule["ci_high"], rule["observed"]
    if low is not None and high is not None:
        plot.line(scale(low), y, scale(high), y, "interval")
        for end in (low, high):
            if scale.holds(end):
                plot.line(scale(end), y - 4, scale(end), y + 4, "interval")
            else:
                plot.marker(_side(end), scale(end), y)
    if observed is not None:
        plot.marker("estimate" if scale.holds(observed) else _side(observed), scale(observed), y)
    return plot.render()


def build_forest_scale(rules: Sequence[Rule]) -> Scale | None:
    """One axis for rules of one unit; None when no rule has a figure.

    It always holds zero and every margin. A change many margins away would hide the rest, so the
    axis ends at five margins, or at twice the median end where that is more.
    """
    margins = [t for r in rules if (t := compute_threshold(r)) is not None]
    ends = [r[k] for r in rules for k in ("ci_low", "ci_high", "observed") if r[k] is not None]
    if not ends:
        return None
    widest = max(map(abs, ends))
    reach = max(5 * max(map(abs, margins), default=0.0), 2 * median(map(abs, ends)))
    limit = min(widest, reach) if reach > 0 else widest
    inside = [max(-limit, min(limit, v)) for v in ends]
    return build_scale([0.0, *margins, *inside], LEFT, RIGHT, pad=0.06)


def draw_axis(scale: Scale, unit: str) -> Markup:
    plot = Plot(AXIS, f"axis in {unit}")
    _add_x_axis(plot, scale, 2, n=5)
    return plot.render()


def draw_distribution(arms: dict[str, list[Point]], label: str) -> Figure | None:
    """Values of both arms over one axis in ms, one row of points for each launch.

    The box spans the middle half, its bar is the median, the thin line spans p5 to p95. None when
    nothing was measured.
    """
    pooled = [p.value for points in arms.values() for p in points]
    if not pooled:
        return None
    scale, n_outside = _build_robust_scale(pooled, LEFT, RIGHT)
    top, tops = 2.0, {}
    for arm in ARMS:
        blocks = sorted({p.block for p in arms[arm]})
        tops[arm] = (top, blocks)
        top += 16 + max(10.0, min(len(blocks), 8) * 7.0) + 14
    plot = Plot(top + AXIS, label)
    is_thinned = False
    for arm in ARMS:
        y, blocks = tops[arm]
        if not arms[arm]:
            plot.text(LEFT, y + 12, f"{arm}: nothing measured", "dim", "start")
            continue
        _add_box(plot, scale, [p.value for p in arms[arm]], y + 7, arm)
        shown = thin(arms[arm], MAX_POINTS, lambda p: p.value)
        is_thinned |= len(shown) < len(arms[arm])
        lanes = min(len(blocks), 8)
        for p in shown:
            lane = blocks.index(p.block) * lanes // len(blocks)
            kind = arm if scale.holds(p.value) else _side(p.value - scale.low)
            plot.marker(
                kind,
                scale(p.value),
                y + 21 + lane * 7,
                f"{arm}, {p.title}: {format_ms(p.value)} ms",
            )
    _add_x_axis(plot, scale, top, n=5, factor=1e3)
    return Figure(plot.render(), _join(_outside(n_outside), _thinned(is_thinned)))


def draw_timeline(steps: Sequence[Step], metric: str) -> Figure | None:
    """Every request in order of execution, as percent of its bucket's median over both arms.

    Warm-ups are hollow, failures are crosses along the bottom, an upright line marks where the
    launch changes.
    """
    values = {s.order: v for s in steps if (v := getattr(s, f"{metric}_s")) is not None}
    pooled: dict[str, list[float]] = {}
    for s in steps:
        if s.order in values and not s.is_warmup:
            pooled.setdefault(s.bucket, []).append(values[s.order])
    medians = {bucket: median(v) for bucket, v in pooled.items() if median(v) > 0}
    percent = {
        s.order: 100 * values[s.order] / medians[s.bucket]
        for s in steps
        if s.order in values and s.bucket in medians
    }
    if not percent:
        return None
    height, bottom = 190.0, 160.0
    y_scale, n_outside = _build_robust_scale([*percent.values(), 100.0], bottom, 8.0)
    x_scale = Scale(0.0, len(steps) + 1.0, Y_LEFT, RIGHT)
    plot = Plot(height, f"{metric.upper()} in order of execution")
    _add_y_axis(plot, y_scale, "%")
    plot.line(Y_LEFT, y_scale(100.0), RIGHT, y_scale(100.0), "zero")
    for before, after in pairwise(steps):
        if before.block != after.block:
            x = x_scale((before.order + after.order) / 2)
            plot.line(x, 4, x, bottom, "launch")
    shown = thin(steps, 2 * MAX_POINTS, lambda s: percent.get(s.order, 100.0))
    for s in shown:
        if s.error:
            plot.marker("failed", x_scale(s.order), bottom - 6, f"{s.title}: {s.error}")
        elif s.order in percent:
            value = percent[s.order]
            kind = f"{s.arm}-warmup" if s.is_warmup else s.arm
            if not y_scale.holds(value):
                kind = "up" if value > 100 else "down"
            title = f"{s.title}: {format_ms(values[s.order])} ms, {value:.1f} % of the median"
            plot.marker(kind, x_scale(s.order), y_scale(value), title)
    _add_x_axis(plot, Scale(x_scale.low, x_scale.high, Y_LEFT, RIGHT), bottom, n=5, whole=True)
    note = _join(_outside(n_outside), _thinned(len(shown) < len(steps)))
    return Figure(plot.render(), note)


def draw_lengths(points: Sequence[LengthPoint]) -> Figure | None:
    """Output tokens of both arms of each pair; on the line both gave the same number."""
    if not points:
        return None
    ends = [v for p in points for v in (p.baseline, p.candidate)]
    height, bottom = 300.0, 262.0
    x_scale = build_scale(ends, Y_LEFT, RIGHT)
    y_scale = Scale(x_scale.low, x_scale.high, bottom, 8.0)
    plot = Plot(height, "output tokens of the candidate against those of the baseline")
    _add_y_axis(plot, y_scale, "")
    plot.line(Y_LEFT, bottom, RIGHT, 8.0, "identity")
    for p in thin(points, MAX_POINTS, lambda p: abs(p.baseline - p.candidate)):
        pairs = "1 pair" if p.count == 1 else f"{p.count} pairs"
        title = f"baseline {p.baseline}, candidate {p.candidate} tokens: {pairs}"
        kind = "same" if p.baseline == p.candidate else "candidate"
        plot.marker(kind, x_scale(p.baseline), y_scale(p.candidate), title)
    _add_x_axis(plot, x_scale, bottom, n=5, whole=True)
    n_pairs = sum(p.count for p in points)
    n_same = sum(p.count for p in points if p.baseline == p.candidate)
    totals = [sum(getattr(p, arm) * p.count for p in points) for arm in ARMS]
    return Figure(
        plot.render(),
        f"{n_same:,} of {n_pairs:,} pairs have the same number of output tokens; in all "
        f"{totals[0]:,} (baseline) and {totals[1]:,} (candidate).",
    )


def draw_nights(series: Series, names: Sequence[str], pinned: str) -> Figure | None:
    """A figure over the nights, the level of each stretch, and where the pinned night stands."""
    known = [(i, v) for i, v in enumerate(series.values) if v is not None]
    if not known:
        return None
    height, bottom = 150.0, 122.0
    y_scale = build_scale([0.0, *(v for _, v in known)], bottom, 8.0)
    x_scale = Scale(0.0, len(names) + 1.0, Y_LEFT, RIGHT)
    plot = Plot(height, f"{series.name} over {len(names)} nights")
    _add_y_axis(plot, y_scale, "")
    plot.line(Y_LEFT, y_scale(0.0), RIGHT, y_scale(0.0), "zero")
    at = names.index(pinned)
    reference = series.values[at]
    if reference is not None:
        plot.line(Y_LEFT, y_scale(reference), RIGHT, y_scale(reference), "margin")
    ends = [*(step.index for step in series.steps), len(names)]
    for start, end in zip([0, *ends], ends, strict=False):
        level = [v for i, v in known if start <= i < end]
        y = y_scale(sum(level) / len(level))
        plot.line(x_scale(start + 0.6), y, x_scale(end + 0.4), y, "interval")
    for step in series.steps:
        plot.line(x_scale(step.index + 0.5), 4, x_scale(step.index + 0.5), bottom, "launch")
    for i, value in known:
        kind = "estimate" if i == at else "candidate"
        plot.marker(kind, x_scale(i + 1), y_scale(value), f"{names[i]}: {value:+.2f}")
    _add_x_axis(plot, x_scale, bottom, n=5, whole=True)
    return Figure(plot.render())


def draw_scores(baseline: float | None, candidate: float | None, label: str) -> Markup:
    """Two mean scores (0 to 1) on one short axis from 0 to 1, joined."""
    plot = Plot(ROW, f"{label}: mean scores of both arms, from 0 to 100")
    scale = Scale(0.0, 1.0, 6.0, 94.0)
    y = ROW / 2
    plot.line(6.0, y, 94.0, y, "grid")
    for end in (0.0, 1.0):
        plot.line(scale(end), y - 4, scale(end), y + 4, "grid")
    if baseline is not None and candidate is not None:
        plot.line(scale(baseline), y, scale(candidate), y, "interval")
    for arm, mean in zip(ARMS, (baseline, candidate), strict=True):
        if mean is not None:
            offset = -3 if arm == "baseline" else 3  # equal scores must not hide each other
            plot.marker(arm, scale(mean), y + offset, f"{arm} {mean * 100:.2f}")
    return plot.render()


def _build_robust_scale(values: Sequence[float], start: float, end: float) -> tuple[Scale, int]:
    """A scale that leaves stray values out, and how many it leaves out.

    Stray: more than six quartile ranges beyond the quartiles, and more than the width of the
    middle nine tenths beyond those; so a second mode is no stray.
    """
    p5, q1, q3, p95 = np.percentile(values, [5, 25, 75, 95])
    low = min(q1 - 6 * (q3 - q1), 2 * p5 - p95)
    high = max(q3 + 6 * (q3 - q1), 2 * p95 - p5)
    inside = [v for v in values if low <= v <= high]
    return build_scale(inside, start, end), len(values) - len(inside)


def _add_box(plot: Plot, scale: Scale, values: list[float], y: float, arm: str) -> None:
    p5, q1, q2, q3, p95 = np.percentile(values, [5, 25, 50, 75, 95])
    plot.line(scale(p5), y, scale(p95), y, f"whisker {arm}")
    plot.rect(scale(q1), y - 5, scale(q3), 10, f"box {arm}")
    plot.line(scale(q2), y - 6, scale(q2), y + 6, f"median {arm}")


def _add_x_axis(
    plot: Plot, scale: Scale, y: float, *, n: int, factor: float = 1.0, whole: bool = False
) -> None:
    """Ticks below ``y``; ``factor`` turns the scale's unit into the one that is written."""
    written = Scale(scale.low * factor, scale.high * factor, scale.start, scale.end)
    ticks = [t for t in written.ticks(n) if not whole or t == int(t)]
    plot.line(scale.start, y, scale.end, y, "axis")
    for tick in ticks:
        x = written(tick)
        plot.line(x, y, x, y + 4, "axis")
        anchor = "start" if x < 8 else "end" if x > 92 else "middle"
        plot.text(x, y + 17, format_tick(tick, ticks), "tick", anchor)


def _add_y_axis(plot: Plot, scale: Scale, unit: str) -> None:
    ticks = scale.ticks(5)
    for tick in ticks:
        plot.line(Y_LEFT, scale(tick), RIGHT, scale(tick), "grid")
        label = format_tick(tick, ticks) + unit
        plot.text(Y_LEFT - 1.5, scale(tick) + 4, label, "tick", "end")


def _side(offset: float) -> str:
    return "left" if offset < 0 else "right"


def _outside(n: int) -> str:
    return "" if n == 0 else f"{n:,} beyond the axis, drawn as arrows at its edge"


def _thinned(is_thinned: bool) -> str:
    return "an even choice of the points is drawn, with both extremes" if is_thinned else ""


def _join(*parts: str) -> str:
    text = "; ".join(p for p in parts if p)
    return f"{text[0].upper()}{text[1:]}." if text else ""
