"""Scales, ticks and the choice of points: what a plot must get right before it is drawn."""

from __future__ import annotations

import re

import pytest
from report_cases import make_rule

from evalgate.report.evidence import LengthPoint, Point, Step, thin
from evalgate.report.plots import (
    build_forest_scale,
    draw_distribution,
    draw_forest_row,
    draw_lengths,
    draw_timeline,
)
from evalgate.report.svg import Scale, build_scale, format_tick


def markers(svg: str, kind: str) -> list[tuple[float, float]]:
    """Where the markers of a kind stand: (x in percent, y in pixels)."""
    found = re.findall(rf'href="#m-{kind}" x="([\d.]+)%" y="([\d.]+)"', svg)
    return [(float(x), float(y)) for x, y in found]


def make_step(order: int, arm: str = "baseline", **changes) -> Step:
    values = {
        "order": order,
        "arm": arm,
        "block": 0,
        "bucket": "b",
        "is_warmup": False,
        "started_at": f"2026-11-29T02:00:{order:02d}Z",
        "ttft_s": 1.0,
        "tpot_s": 0.02,
        "error": None,
        "title": f"request {order}",
    }
    return Step(**{**values, **changes})


def test_a_scale_maps_linearly_and_holds_outsiders_at_its_ends():
    scale = Scale(0.0, 10.0, 20.0, 80.0)
    assert [scale(v) for v in (0, 5, 10, -3, 99)] == [20.0, 50.0, 80.0, 20.0, 80.0]


@pytest.mark.parametrize(
    ("low", "high", "n", "ticks"),
    [
        (0.0, 10.0, 5, [0, 2, 4, 6, 8, 10]),
        (-1.3, 2.2, 4, [-1, 0, 1, 2]),
        (0.0805, 0.0835, 3, [0.081, 0.082, 0.083]),
        (980.0, 1610.0, 4, [1000, 1200, 1400, 1600]),
    ],
)
def test_ticks_are_round_numbers_inside_the_scale(low, high, n, ticks):
    assert Scale(low, high, 0.0, 100.0).ticks(n) == pytest.approx(ticks)


@pytest.mark.parametrize("high", [3e-13, 1e-300, 1e300])
def test_ticks_of_extreme_values_differ_and_have_short_labels(high):
    ticks = Scale(0.0, high, 0.0, 100.0).ticks(5)
    labels = [format_tick(t, ticks) for t in ticks]
    assert 3 <= len(set(labels)) == len(ticks)
    assert max(map(len, labels)) <= 10


def test_ticks_are_written_with_the_decimals_that_they_need():
    assert [format_tick(t, [0.0, 0.5, 1.0]) for t in (0.0, 0.5)] == ["0.0", "0.5"]
    assert format_tick(1200.0, [1000.0, 1200.0]) == "1,200"


def test_a_scale_of_one_value_has_a_width():
    scale = build_scale([5.0], 0.0, 100.0)
    assert scale.low < 5.0 < scale.high


def test_the_forest_scale_holds_zero_and_every_margin():
    scale = build_forest_scale([make_rule(observed=5.0, ci_low=4.8, ci_high=5.2, margin=1.0)])
    assert all(scale.holds(v) for v in (0.0, 1.0, 5.0))


def test_one_change_many_margins_away_does_not_squeeze_the_forest():
    rules = [make_rule(observed=v, ci_low=v - 0.2, ci_high=v + 0.2) for v in (0.1, -0.3, 0.2, 140)]
    scale = build_forest_scale(rules)
    assert scale.high == pytest.approx(5.0, rel=0.2)
    svg = draw_forest_row(rules[-1], scale)
    assert markers(svg, "right")
    assert not markers(svg, "estimate")


def test_a_forest_without_figures_has_no_scale():
    assert build_forest_scale([make_rule(observed=None, ci_low=None, ci_high=None)]) is None


def test_the_passing_side_of_a_latency_lies_below_its_margin():
    rule = make_rule(margin=1.0)
    scale = build_forest_scale([rule])
    svg = draw_forest_row(rule, scale)
    start, width = (
        re.search(r'class="passing"', svg)
        and re.search(r'<rect x="([\d.]+)%" y="0" width="([\d.]+)%"', svg).groups()
    )
    assert float(start) == pytest.approx(3.0)
    assert float(start) + float(width) == pytest.approx(scale(1.0), abs=0.01)


def test_thinning_keeps_order_and_both_extremes():
    values = [5.0] * 500 + [99.0] + [5.0] * 500 + [-1.0] + [5.0] * 500
    kept = thin(list(enumerate(values)), 50, lambda item: item[1])
    assert len(kept) <= 50
    assert kept == sorted(kept)
    assert {v for _, v in kept} == {5.0, 99.0, -1.0}


def test_a_stray_value_is_an_arrow_and_is_counted_in_words():
    points = [Point(0, 1.0 + i / 1000, f"p{i}") for i in range(40)] + [Point(0, 30.0, "stray")]
    figure = draw_distribution({"baseline": points, "candidate": points[:40]}, "TTFT")
    assert len(markers(figure.svg, "right")) == 1
    assert figure.note == "1 beyond the axis, drawn as arrows at its edge."


def test_a_second_mode_is_no_stray():
    values = [1.0 + i / 1000 for i in range(40)] + [30.0 + i for i in range(8)]
    points = [Point(0, v, "p") for v in values]
    figure = draw_distribution({"baseline": points, "candidate": []}, "TTFT")
    assert len(markers(figure.svg, "baseline")) == 48
    assert "candidate: nothing measured" in figure.svg


def test_launches_stand_in_rows_of_their_own():
    points = [Point(block, 1.0 + block, "p") for block in (0, 3)]
    figure = draw_distribution({"baseline": points, "candidate": []}, "TTFT")
    assert len({y for _, y in markers(figure.svg, "baseline")}) == 2


def test_nothing_measured_draws_nothing():
    assert draw_distribution({"baseline": [], "candidate": []}, "TTFT") is None
    assert draw_timeline([make_step(1, ttft_s=None, error="timeout")], "ttft") is None
    assert draw_lengths([]) is None


def test_the_time_line_is_relative_to_the_buckets_median():
    steps = [
        make_step(1, bucket="short", ttft_s=1.0),
        make_step(2, bucket="short", ttft_s=1.0),
        make_step(3, "candidate", bucket="long", ttft_s=9.0),
        make_step(4, "candidate", bucket="long", ttft_s=9.0),
    ]
    svg = draw_timeline(steps, "ttft").svg
    heights = {y for kind in ("baseline", "candidate") for _, y in markers(svg, kind)}
    assert len(heights) == 1
    assert "100.0 % of the median" in svg


def test_the_time_line_tells_warm_ups_failures_and_launches_apart():
    steps = [
        make_step(1, is_warmup=True),
        make_step(2),
        make_step(3, "candidate", ttft_s=None, tpot_s=None, error="timeout"),
        make_step(4, "candidate", block=1),
    ]
    svg = draw_timeline(steps, "tpot").svg
    kinds = ("baseline-warmup", "baseline", "failed", "candidate")
    assert [len(markers(svg, kind)) for kind in kinds] == [1, 1, 1, 1]
    assert svg.count('class="launch"') == 1


def test_pairs_of_one_length_lie_on_the_identity_line_and_have_another_shape():
    figure = draw_lengths([LengthPoint(95, 95, 3), LengthPoint(12, 1024, 1)])
    assert len(markers(figure.svg, "same")) == 1
    assert len(markers(figure.svg, "candidate")) == 1
    assert figure.note == (
        "3 of 4 pairs have the same number of output tokens; in all 297 (baseline) and 1,309 "
        "(candidate)."
    )
