import math

import numpy as np
import pytest
from scipy import stats as sps
from scipy.optimize import minimize_scalar

from evalgate.stats_scores import (
    PairedShareEstimate,
    compute_mcnemar_p,
    compute_tango_score,
    estimate_paired_share,
)

Z95 = 1.6448536


def test_no_loss_in_n_still_allows_the_exact_binomial_bound():
    for n in (5, 50, 300):
        low, high = PairedShareEstimate(0, 0, n).bounds()
        assert low == pytest.approx(-(1 - 0.05 ** (1 / n)))
        assert high == pytest.approx(1 - 0.05 ** (1 / n))


def test_a_one_sided_loss_is_judged_by_the_exact_binomial_and_beta():
    estimate = PairedShareEstimate(0, 3, 40)
    assert estimate.p_below(-0.2) == pytest.approx(sps.binom.sf(2, 40, 0.2))
    assert PairedShareEstimate(0, 0, 40).p_below(-0.02) == 1.0
    assert estimate.bounds()[0] == pytest.approx(-sps.beta.ppf(0.95, 4, 37))


def test_tango_score_without_changed_answers_has_its_closed_form():
    # Z^2 = n d / (1 - d), so the bound where Z = z is z^2 / (n + z^2).
    bound = Z95**2 / (50 + Z95**2)
    assert compute_tango_score(0, 0, 50, bound) == pytest.approx(-Z95)
    assert compute_tango_score(0, 0, 50, -bound) == pytest.approx(Z95)


@pytest.mark.parametrize(
    ("gains", "losses", "n", "difference"),
    [(5, 8, 100, -0.05), (3, 1, 40, 0.1), (0, 10, 50, -0.05)],
)
def test_tango_score_uses_the_likeliest_shares_under_the_hypothesis(gains, losses, n, difference):
    # Independent route: maximise the trinomial likelihood numerically, then take the variance.
    def loss(share):
        shares = np.array([share + difference, share, 1 - 2 * share - difference])
        if np.any(shares <= 0):
            return np.inf
        return -float(np.dot([gains, losses, n - gains - losses], np.log(shares)))

    least, most = max(0.0, -difference), (1 - difference) / 2
    share = minimize_scalar(
        loss, bounds=(least, most), method="bounded", options={"xatol": 1e-12}
    ).x
    variance = n * (2 * share + difference - difference**2)
    expected = (gains - losses - n * difference) / math.sqrt(variance)
    assert compute_tango_score(gains, losses, n, difference) == pytest.approx(expected, rel=1e-5)


def test_bounds_solve_the_score_equation():
    low, high = PairedShareEstimate(5, 8, 100).bounds()
    assert compute_tango_score(5, 8, 100, low) == pytest.approx(Z95, abs=1e-6)
    assert compute_tango_score(5, 8, 100, high) == pytest.approx(-Z95, abs=1e-6)


def test_swapping_the_arms_mirrors_everything():
    estimate, mirrored = PairedShareEstimate(2, 9, 60), PairedShareEstimate(9, 2, 60)
    low, high = estimate.bounds()
    assert mirrored.bounds() == pytest.approx((-high, -low))
    assert mirrored.p_above(0.05) == pytest.approx(estimate.p_below(-0.05))


def test_losses_only_are_bounded_at_least_as_widely_as_clopper_pearson():
    low, _ = PairedShareEstimate(0, 2, 50).bounds()
    assert low <= -float(sps.binomtest(2, 50).proportion_ci(0.90).high) + 1e-9


def test_every_loss_is_bounded_by_one():
    assert PairedShareEstimate(0, 10, 10).bounds()[0] == -1.0
    assert PairedShareEstimate(10, 0, 10).bounds()[1] == 1.0


def test_one_sided_bound_holds_where_answers_change_rarely():
    # Exact coverage by enumeration at n 60, true losses 4 %, gains 2 %: the true change is -0.02.
    n, p_gain, p_loss = 60, 0.02, 0.04
    missed = 0.0
    for gains in range(12):
        for losses in range(14):
            p = sps.multinomial.pmf(
                [gains, losses, n - gains - losses], n, [p_gain, p_loss, 1 - p_gain - p_loss]
            )
            if p > 1e-7 and PairedShareEstimate(gains, losses, n).bounds()[0] > p_gain - p_loss:
                missed += p
    assert missed <= 0.055


def test_pairs_to_settle_for_no_loss_follow_from_the_exact_bound():
    # 1 - 0.05^(1/n) < 0.05 first at n = 59.
    assert PairedShareEstimate(0, 0, 20).units_to_settle(-0.05) == 59


def test_counts_come_from_the_changed_answers():
    estimate = estimate_paired_share(np.array([1.0, 1, 0, 0]), np.array([1.0, 0, 1, 0]))
    assert (estimate.gains, estimate.losses, estimate.n, estimate.value) == (1, 1, 4, 0.0)


def test_mcnemar_is_the_exact_binomial_of_the_changed_answers():
    # 1 against 5 changed: 2 (C(6,0) + C(6,1)) / 2^6 = 14/64.
    assert compute_mcnemar_p(1, 5) == pytest.approx(14 / 64)
    assert compute_mcnemar_p(0, 0) == 1.0
