"""The trend as text, JSON and a page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from report_cases import HOSTILE, make_night, make_noisy_nights

from evalgate.errors import EvidenceError, UsageError
from evalgate.report.trend import TREND_FORMATS, render_trend
from evalgate.trend import Night, build_trend


@pytest.fixture(scope="module")
def trend():
    return build_trend(make_noisy_nights(20, step_at=12, step=0.02))


@pytest.mark.parametrize("format_name", ["text", "html"])
def test_a_change_of_level_is_named_with_its_night_and_direction(trend, format_name):
    text = render_trend(format_name, trend)
    assert "✗ worse: TPOT 8K-16K by +" in text
    assert "from night-13 on" in text


def test_json_holds_every_night_and_series(trend):
    data = json.loads(render_trend("json", trend))
    assert len(data["nights"]) == 20
    series = next(s for s in data["series"] if s["name"] == "TPOT 8K-16K")
    assert len(series["values"]) == 20
    assert series["steps"][0]["night"] == "night-13"


def test_the_page_plots_each_series_and_loads_nothing(trend):
    text = render_trend("html", trend)
    assert text.count('class="plot"') == len(trend.series)
    assert "default-src 'none'" in text
    assert "<script" not in text


@pytest.mark.parametrize("format_name", TREND_FORMATS)
def test_whatever_is_left_out_is_named_in_every_format(format_name):
    nights = [make_night(1), make_night(2, status="invalid"), make_night(3)]
    other = replace(make_night(2), name="of-another-model", subject="another")
    text = render_trend(format_name, build_trend([*nights, other], skipped=["torn: is damaged"]))
    for name in ("night-02", "of-another-model", "torn: is damaged"):
        assert name in text


@pytest.mark.parametrize("format_name", TREND_FORMATS)
def test_a_single_night_with_a_hostile_name_renders(format_name):
    night = make_night(1)
    trend = build_trend([Night(HOSTILE, night.started_at, night.verdict)])
    text = render_trend(format_name, trend)
    assert "\x1b" not in text
    assert "<script>" not in text or format_name != "html"


def test_an_unknown_format_or_a_foreign_verdict_is_refused(trend):
    with pytest.raises(UsageError, match="'junit' is not one of text, json, html"):
        render_trend("junit", trend)
    night = make_night(1)
    foreign = build_trend([Night("n", night.started_at, {**night.verdict, "schema_version": 9})])
    with pytest.raises(EvidenceError, match="schema_version is 9"):
        render_trend("text", foreign)
