import math

import numpy as np
import pytest
from scipy import stats as sps
from statsmodels.stats.multitest import multipletests

from evalgate.stats import (
    adjust_holm,
    estimate_bootstrap_mean,
    estimate_bootstrap_strata,
    estimate_paired,
    estimate_welch,
    find_t,
)


def test_paired_bounds_are_students_t_over_the_launches():
    # Mean 0.02, sd 0.01, n 4: se 0.005, t(0.95; 3) = 2.353363.
    estimate = estimate_paired(
        [0.02 - 0.01 * math.sqrt(1.5), 0.02, 0.02, 0.02 + 0.01 * math.sqrt(1.5)], "t"
    )
    low, high = estimate.bounds()
    assert estimate.value == pytest.approx(0.02)
    assert low == pytest.approx(0.02 - 2.353363 * 0.005, abs=1e-8)
    assert high == pytest.approx(0.02 + 2.353363 * 0.005, abs=1e-8)


def test_paired_p_value_agrees_with_scipys_one_sample_test():
    values = [0.011, 0.018, 0.009, 0.02, 0.015]
    expected = sps.ttest_1samp(values, 0.01, alternative="greater").pvalue
    assert estimate_paired(values, "t").p_above(0.01) == pytest.approx(expected)


def test_a_bound_and_its_p_value_tell_the_same_story():
    estimate = estimate_paired([0.011, 0.018, 0.009, 0.02, 0.015], "t")
    low, high = estimate.bounds()
    assert estimate.p_above(low) == pytest.approx(0.05)
    assert estimate.p_below(high) == pytest.approx(0.05)


def test_launches_without_any_spread_have_bounds_at_their_value():
    estimate = estimate_paired([0.1, 0.1, 0.1], "t")
    assert estimate.bounds() == pytest.approx((0.1, 0.1))
    assert estimate.p_above(0.05) < 1e-9
    assert estimate_paired([0.0, 0.0], "t").p_above(0.0) == 0.5


def test_welch_agrees_with_scipy_for_unequal_variances():
    baseline, candidate = [1.0, 1.2, 0.9, 1.1], [1.5, 1.1, 1.9, 1.3, 1.6]
    estimate = estimate_welch(baseline, candidate, "welch")
    expected = sps.ttest_ind(candidate, baseline, equal_var=False)
    interval = expected.confidence_interval(0.90)
    assert estimate.bounds() == pytest.approx((interval.low, interval.high))
    assert estimate.p_above(0.0) == pytest.approx(expected.pvalue / 2)


def test_welch_with_a_constant_side_has_the_other_sides_degrees_of_freedom():
    # What a ratio of ratios gives when the baseline is its own reference.
    estimate = estimate_welch([0.0, 0.0, 0.0], [0.01, 0.02, 0.03], "welch")
    assert estimate.bounds() == pytest.approx(estimate_paired([0.01, 0.02, 0.03], "t").bounds())


def test_bootstrap_bounds_are_widened_to_students_t_for_few_units():
    values = np.random.default_rng(3).normal(0.0, 1.0, 12)
    boot = estimate_bootstrap_mean(values, "bootstrap", "samples").bounds()
    student = estimate_paired(values, "t").bounds()
    assert boot == pytest.approx(student, abs=0.08)


def test_bootstrap_covers_as_often_as_it_says():
    # 300 draws of 10 values: a one-sided 95 % bound may miss by two standard errors, 2.6 %.
    rng = np.random.default_rng(11)
    missed = 0
    for _ in range(300):
        low, _ = estimate_bootstrap_mean(rng.normal(1.0, 0.5, 10), "b", "samples").bounds()
        missed += low > 1.0
    assert missed / 300 == pytest.approx(0.05, abs=0.026)


def test_bootstrap_is_the_same_each_time_that_a_run_is_judged():
    values = [0.1, 0.4, 0.2, 0.9]
    first = estimate_bootstrap_mean(values, "b", "samples").bounds()
    assert estimate_bootstrap_mean(values, "b", "samples").bounds() == first


def test_bootstrap_p_value_goes_beyond_what_the_resamples_resolve():
    estimate = estimate_bootstrap_mean([0.40, 0.41, 0.42, 0.40], "b", "samples")
    assert 0 < estimate.p_above(0.02) < 1e-4
    assert estimate.p_below(0.02) > 1 - 1e-4


def test_strata_are_resampled_apart():
    # Between the strata lies all the spread; within them there is none.
    values = np.array([1.0, 1.0, 1.0, 5.0, 5.0])

    def mean(drawn):
        return np.concatenate([values[d] for d in drawn], axis=1).mean(axis=1)

    estimate = estimate_bootstrap_strata(mean, [np.arange(3), np.arange(3, 5)], "b", "prompts")
    assert estimate.bounds() == pytest.approx((2.6, 2.6))


def test_one_unit_in_each_stratum_gives_no_estimate():
    assert estimate_bootstrap_strata(lambda d: d[0].mean(axis=1), [np.array([0])], "b", "p") is None


def test_units_to_settle_is_the_first_number_whose_bound_clears():
    estimate = estimate_paired([0.0, 0.02, 0.01, 0.03], "t")  # mean 0.015, sd 0.0129099
    n = estimate.units_to_settle(0.01)
    sd = 0.0129099
    assert sps.t.ppf(0.95, n - 1) * sd / math.sqrt(n) < 0.005
    assert sps.t.ppf(0.95, n - 2) * sd / math.sqrt(n - 1) >= 0.005


def test_no_number_of_units_settles_a_value_on_the_threshold():
    assert estimate_paired([0.0, 0.02], "t").units_to_settle(0.01) is None


def test_minimum_detectable_effect_is_found_with_80_percent_power():
    # 5 launches, sd 1: effect (t95 + t80) / sqrt(5) with 4 degrees of freedom.
    values = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    sd = values.std(ddof=1)
    expected = (2.131847 + 0.940965) * sd / math.sqrt(5)
    assert estimate_paired(values, "t").minimum_detectable() == pytest.approx(expected, rel=1e-5)


def test_holm_multiplies_the_smallest_by_all_and_never_reorders():
    # 0.01 x 3 = 0.03; 0.03 x 2 = 0.06; 0.04 x 1 raised to 0.06.
    assert adjust_holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert adjust_holm([]) == []


def test_holm_agrees_with_statsmodels():
    values = [0.2, 1e-9, 0.04, 0.01, 0.01, 0.9, 0.03]
    expected = multipletests(values, method="holm")[1]
    assert adjust_holm(values) == expected.tolist()


def test_quantiles_of_t_are_scipys():
    for df in (1, 2.7, 9, 400):
        assert find_t(0.95, df) == sps.t.ppf(0.95, df)
        assert -find_t(0.05, df) == sps.t.isf(0.05, df)
