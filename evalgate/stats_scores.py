"""Paired 0/1 scores: the change in the share of right answers, never with a bound of zero width.

The bounds are Tango's score bounds for the difference of two paired proportions (T. Tango,
"Equivalence test and confidence interval for the difference in proportions for the paired-sample
design", Statistics in Medicine 17, 1998, 891-908). Where all changed answers changed one way the
difference is one single proportion, the exact (Clopper-Pearson) bound of which is known: then the
wider of the two is taken, so that no loss in n still allows a loss of 1 - 0.05^(1/n).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from evalgate.stats import ALPHA, CONFIDENCE, POWER, find_least

EDGE = 1e-12  # the score is not defined at a difference of exactly -1 and 1


@dataclass(frozen=True)
class PairedShareEstimate:
    """``gains`` of ``n`` pairs are right in the candidate only, ``losses`` in the baseline only.

    The counts may be fractions: ``units_to_settle`` scales them.
    """

    gains: float
    losses: float
    n: int
    method: str = "Tango score bound, exact where all changes go one way"
    unit: str = "samples"

    @property
    def value(self) -> float:
        return (self.gains - self.losses) / self.n

    def bounds(self) -> tuple[float, float]:
        low, high = self._solve(CONFIDENCE), self._solve(ALPHA)
        if self.gains == 0:
            low = min(low, -_upper_share(self.losses, self.n))
            high = max(high, -_lower_share(self.losses, self.n))
        if self.losses == 0:
            low = min(low, _lower_share(self.gains, self.n))
            high = max(high, _upper_share(self.gains, self.n))
        return low, high

    def _solve(self, level: float) -> float:
        """The difference at which the score statistic equals the normal quantile of ``level``."""
        # This import takes long: only where there are 0/1 scores.
        from scipy.optimize import brentq

        quantile = float(special.ndtri(level))

        def excess(difference: float) -> float:
            return compute_tango_score(self.gains, self.losses, self.n, difference) - quantile

        if excess(-1 + EDGE) <= 0:
            return -1.0
        if excess(1 - EDGE) >= 0:
            return 1.0
        return float(brentq(excess, -1 + EDGE, 1 - EDGE))

    def p_below(self, threshold: float) -> float:
        score = compute_tango_score(self.gains, self.losses, self.n, threshold)
        p = float(special.ndtr(score))
        if self.gains == 0 and threshold < 0:
            # At least so many losses when they happen at the rate of the threshold.
            # (A binomial's upper tail is an incomplete beta function.)
            many = special.betainc(self.losses, self.n - self.losses + 1, -threshold)
            p = max(p, float(many) if self.losses else 1.0)
        return p

    def p_above(self, threshold: float) -> float:
        mirrored = PairedShareEstimate(self.losses, self.gains, self.n)
        return mirrored.p_below(-threshold)

    def units_to_settle(self, threshold: float) -> int | None:
        def is_clear(n: int) -> bool:
            factor = n / self.n
            low, high = PairedShareEstimate(self.gains * factor, self.losses * factor, n).bounds()
            return not low <= threshold <= high

        return find_least(is_clear, self.n)

    def minimum_detectable(self) -> float:
        variance = self.gains + self.losses - (self.gains - self.losses) ** 2 / self.n
        reach = float(special.ndtri(CONFIDENCE) + special.ndtri(POWER))
        # With no spread seen, what n pairs can still hide is the least that can be told.
        return max(reach * math.sqrt(variance) / self.n, _upper_share(0, self.n))


def compute_tango_score(gains: float, losses: float, n: int, difference: float) -> float:
    """Tango's score statistic of "gain share - loss share = ``difference``", normal under it.

    The loss share is estimated under that hypothesis by the larger root of the likelihood
    equation 2n q^2 + B q + C = 0. A difference that the data cannot contradict (0 with no changed
    answer) scores 0.
    """
    a = 2 * n
    b = -gains - losses + (2 * n - gains + losses) * difference
    c = -losses * difference * (1 - difference)
    share = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = n * (2 * share + difference * (1 - difference))
    numerator = gains - losses - n * difference
    if variance <= 0:
        return 0.0 if numerator == 0 else math.copysign(math.inf, numerator)
    return numerator / math.sqrt(variance)


def estimate_paired_share(baseline: np.ndarray, candidate: np.ndarray) -> PairedShareEstimate:
    """The estimate from two arrays of scores that are all 0 or 1."""
    gains = int(np.sum((candidate == 1) & (baseline == 0)))
    losses = int(np.sum((candidate == 0) & (baseline == 1)))
    return PairedShareEstimate(gains, losses, len(baseline))


def compute_mcnemar_p(gains: int, losses: int) -> float:
    """Exact two-sided McNemar test of "no change": the binomial of the changed answers."""
    # statsmodels takes half a second to import: only where there are 0/1 scores.
    from statsmodels.stats.contingency_tables import mcnemar

    return float(mcnemar([[0, losses], [gains, 0]], exact=True).pvalue)


def _upper_share(count: float, n: int) -> float:
    return float(special.betaincinv(count + 1, n - count, CONFIDENCE)) if count < n else 1.0


def _lower_share(count: float, n: int) -> float:
    return float(special.betaincinv(count, n - count + 1, ALPHA)) if count > 0 else 0.0
