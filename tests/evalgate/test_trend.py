"""The nights: steps are found where they were planted, noise is left alone, the pin holds."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from report_cases import make_night, make_noisy_nights

from evalgate.errors import UsageError
from evalgate.trend import build_trend, compute_noise, find_steps


def test_a_planted_regression_is_found_at_its_night_and_called_worse():
    trend = build_trend(make_noisy_nights(20, step_at=12, step=0.02))
    tpot = next(s for s in trend.series if s.name == "TPOT 8K-16K")
    (step,) = tpot.steps
    assert (step.index, step.night, step.is_worse) == (12, "night-13", True)
    assert step.change == pytest.approx(2.0, abs=0.3)


def test_more_throughput_is_an_improvement():
    trend = build_trend(make_noisy_nights(20, step_at=10, step=-0.03))
    series = next(s for s in trend.series if s.name == "normalised output throughput")
    assert [step.is_worse for step in series.steps] == [False]


def test_noise_alone_shows_a_step_in_few_series():
    rng = np.random.default_rng(1)
    alarms = sum(bool(find_steps(rng.normal(0, 1, 14))) for _ in range(100))
    assert alarms <= 9


def test_equal_nights_have_no_step():
    trend = build_trend([make_night(day) for day in range(1, 11)])
    assert all(series.steps == () for series in trend.series)


def test_a_step_between_levels_without_noise_is_found():
    assert find_steps([0.0] * 6 + [5.0] * 6) == [6]


def test_a_slow_decline_shows_against_the_pinned_night_not_against_the_last():
    nights = [make_night(day, 1 + 0.001 * day) for day in range(1, 11)]
    series = next(s for s in build_trend(nights, "night-02").series if s.name == "TPOT 8K-16K")
    assert series.against_pinned == pytest.approx(100 * (1.010 - 1.002))


def test_nights_are_put_in_order_and_invalid_ones_are_named_and_left_out():
    nights = [make_night(3), make_night(1), make_night(2, 9.0, "invalid")]
    trend = build_trend(nights)
    assert [n.name for n in trend.nights] == ["night-01", "night-03"]
    assert (trend.pinned, trend.left_out) == ("night-01", ("night-02",))
    assert "2 nights: change points are looked for from 8 up" in {s.note for s in trend.series}


def test_a_figure_that_one_night_lacks_is_absent_there_and_steps_keep_their_night():
    nights = make_noisy_nights(20, step_at=12, step=0.05)
    del nights[2].verdict["summary"]["candidate"]["buckets"]["8K-16K"]
    series = next(s for s in build_trend(nights).series if s.name == "TPOT 8K-16K")
    assert series.values[2] is None
    assert [step.night for step in series.steps] == ["night-13"]


def test_nights_that_measured_something_else_are_named_and_left_out():
    """Two models in one folder are two trends, not a step."""
    small = [replace(make_night(day), subject="small") for day in (1, 3, 5)]
    large = [replace(make_night(day, 1.5), subject="large") for day in (2, 4)]
    trend = build_trend([*small, *large])
    assert [n.name for n in trend.nights] == ["night-01", "night-03", "night-05"]
    assert (trend.pinned, trend.others) == ("night-01", ("night-02", "night-04"))
    assert build_trend([*small, *large], "night-04").others == ("night-01", "night-03", "night-05")


def test_a_figure_that_the_last_night_lacks_is_not_held_against_the_pinned_one():
    nights = [make_night(1), make_night(2, 1.5), make_night(3)]
    del nights[2].verdict["summary"]["candidate"]["buckets"]["8K-16K"]
    series = {s.name: s for s in build_trend(nights).series}
    assert series["TPOT 8K-16K"].values[1] is not None
    assert series["TPOT 8K-16K"].against_pinned is None


def test_a_pin_that_does_not_exist_and_a_folder_without_nights_are_usage_errors():
    with pytest.raises(UsageError, match="pinned night 'x' is not among the valid ones: night-01"):
        build_trend([make_night(1)], "x")
    with pytest.raises(UsageError, match="no night with a valid verdict among 1"):
        build_trend([make_night(1, status="invalid")])


def test_noise_comes_from_neighbours_and_a_step_hardly_touches_it():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 1, 500), rng.normal(50, 1, 500)])
    assert compute_noise(values) == pytest.approx(1.0, abs=0.1)
    assert compute_noise([1.0, 2.0]) is None


def test_without_ruptures_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ruptures", None)
    with pytest.raises(UsageError, match=r"pip install 'evalgate\[trend\]'"):
        find_steps([0.0] * 10)
