"""Bounds and p-values that hold over all looks: exact at few launches, and monotone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as sps

from evalgate.looks import Look, compute_spent
from evalgate.sequential import RATES, SequentialEstimate, compute_nominal, compute_overall_p
from evalgate.stats import ALPHA, estimate_paired

THREE_TO_SEVEN = tuple(Look(n, compute_spent(n, 7)) for n in range(3, 8))


@pytest.mark.parametrize("spent", [1.0, 0.125])
def test_a_first_look_has_the_share_that_it_spends(spent):
    assert compute_nominal((Look(4, spent),)) == pytest.approx(RATES * spent, rel=1e-3)


def test_a_single_look_that_spends_all_changes_nothing():
    plain = estimate_paired([0.01, 0.02, 0.015, 0.03], "t")
    once = SequentialEstimate(plain, (Look(4, 1.0),))
    assert once.bounds() == pytest.approx(plain.bounds())
    assert once.p_below(0.05) == pytest.approx(plain.p_below(0.05), rel=0.02)
    assert once.units_to_settle(0.0) == plain.units_to_settle(0.0)


def test_a_second_look_that_spends_nothing_more_never_rejects():
    looks = (Look(3, 0.5), Look(4, 0.5))
    estimate = SequentialEstimate(estimate_paired([1.0, 1.1, 0.9, 1.05], "t"), looks)
    low, high = estimate.bounds()
    assert low < -1
    assert high > 3


@pytest.mark.parametrize("rate", [ALPHA, 0.005])
def test_the_chance_to_cross_at_any_look_is_the_error_rate(rate):
    trials = 60_000
    values = np.random.default_rng(4).normal(size=(trials, 7))
    crossed = np.zeros(trials, dtype=bool)
    for k, look in enumerate(THREE_TO_SEVEN):
        seen = values[:, : look.blocks]
        t = seen.mean(axis=1) / seen.std(axis=1, ddof=1) * math.sqrt(look.blocks)
        nominal = np.interp(rate, RATES, compute_nominal(THREE_TO_SEVEN[: k + 1]))
        crossed |= t > sps.t.isf(nominal, look.blocks - 1)
    error = math.sqrt(rate * (1 - rate) / trials)
    assert crossed.mean() == pytest.approx(rate, abs=4 * error)


def test_launches_between_two_looks_count_in_the_later_one():
    # The fewer looks, the less there is to allow for: the last level lies between that of all looks
    # and that of a single one.
    every = np.interp(ALPHA, RATES, compute_nominal(THREE_TO_SEVEN))
    ends = np.interp(ALPHA, RATES, compute_nominal((THREE_TO_SEVEN[0], THREE_TO_SEVEN[-1])))
    assert every < ends < ALPHA


def test_overall_p_values_rise_with_the_p_value_and_agree_with_the_bounds():
    nominal = compute_nominal(THREE_TO_SEVEN)
    found = [compute_overall_p(p, THREE_TO_SEVEN) for p in np.geomspace(1e-9, 1, 50)]
    assert found == sorted(found)
    assert found[-1] == 1.0
    level = float(np.interp(ALPHA, RATES, nominal))
    assert compute_overall_p(level, THREE_TO_SEVEN) == pytest.approx(ALPHA, rel=1e-6)
    assert math.isnan(compute_overall_p(math.nan, THREE_TO_SEVEN))


def test_bounds_are_wider_than_those_of_a_fixed_number_of_launches():
    plain = estimate_paired([0.01, 0.02, 0.015, 0.03, 0.01, 0.012, 0.02], "t")
    looked = SequentialEstimate(plain, THREE_TO_SEVEN)
    assert looked.bounds()[0] < plain.bounds()[0]
    assert looked.bounds()[1] > plain.bounds()[1]
    assert looked.minimum_detectable() > plain.minimum_detectable()
    assert looked.p_above(0.0) > plain.p_above(0.0)
    described = looked.describe()
    assert (described["look"], described["blocks"], described["error_rate_spent"]) == (5, 7, 1.0)
    assert 0.95 < described["nominal_level"] < 1
