"""Estimates of a paired change: a value, its one-sided bounds, its p-values, what would settle it.

Pure numbers: the module knows no record, no metric and no policy. Speed comes in as log-ratios,
scores as differences; which way is better is the caller's business. Bounds are one-sided at
``CONFIDENCE``; an estimate of fewer than two units cannot be built, as nothing says how far it
could be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import special

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
POWER = 0.80  # of the minimum detectable effect
RESAMPLES = 9999
MAX_DRAWS = 5_000_000  # resamples x units: keeps a bootstrap of many units within 0.2 s
MAX_UNITS = 1_000_000  # beyond this, "how many more" is answered with "no number"
SEED = 20261129  # resampling gives the same bounds each time that a run is judged


class Estimate(Protocol):
    """What a rule needs to know of a change. ``unit``: what was sampled ``n`` times."""

    value: float
    method: str
    unit: str
    n: int

    def bounds(self) -> tuple[float, float]:
        """The two one-sided 95 % bounds, lower and upper."""

    def p_below(self, threshold: float) -> float:
        """P-value of "the true value is at least ``threshold``": small says it lies below."""

    def p_above(self, threshold: float) -> float:
        """P-value of "the true value is at most ``threshold``": small says it lies above."""

    def units_to_settle(self, threshold: float) -> int | None:
        """Units in all until a bound clears ``threshold``, if value and spread stay as seen.

        None when no number up to ``MAX_UNITS`` would, as for a value that lies on the threshold.
        """

    def minimum_detectable(self) -> float:
        """The least true change that this design shows at 95 % with a power of 80 %."""


@dataclass(frozen=True)
class StudentEstimate:
    """Mean over units with Student's t; Welch's two-sample form differs only in se and df.

    ``alpha`` is the error rate of one bound, where it is not the usual one.
    """

    value: float
    se: float
    df: float
    n: int
    method: str
    unit: str = "launches"

    def bounds(self, alpha: float = ALPHA) -> tuple[float, float]:
        reach = -find_t(alpha, self.df) * self.se
        return self.value - reach, self.value + reach

    def p_below(self, threshold: float) -> float:
        return compute_t_p_below(self.value - threshold, self.se, self.df)

    def p_above(self, threshold: float) -> float:
        return compute_t_p_below(threshold - self.value, self.se, self.df)

    def units_to_settle(self, threshold: float, alpha: float = ALPHA) -> int | None:
        distance = abs(self.value - threshold)

        def is_clear(n: int) -> bool:
            df = self.df * (n - 1) / (self.n - 1)
            return -find_t(alpha, df) * self.se * math.sqrt(self.n / n) < distance

        return find_least(is_clear, self.n)

    def minimum_detectable(self, alpha: float = ALPHA) -> float:
        return (find_t(POWER, self.df) - find_t(alpha, self.df)) * self.se


@dataclass(frozen=True)
class BootstrapEstimate:
    """A resampled statistic. Percentile bounds, widened for few units.

    The plain percentile interval is too narrow by sqrt((n - k)/n) and by normal instead of t
    quantiles; its tail area is therefore expanded to Phi(-sqrt(n/(n - k)) t) for n units in k
    strata (Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician
    69(4), 2015: the expanded percentile interval).
    """

    value: float
    resampled: np.ndarray
    n: int
    n_strata: int
    method: str
    unit: str

    @property
    def df(self) -> int:
        return self.n - self.n_strata

    @property
    def se(self) -> float:
        return float(np.std(self.resampled)) * self._expansion

    @property
    def _expansion(self) -> float:
        return math.sqrt(self.n / self.df)

    def bounds(self) -> tuple[float, float]:
        tail = float(special.ndtr(-self._expansion * find_t(CONFIDENCE, self.df)))
        low, high = np.quantile(self.resampled, [tail, 1 - tail])
        return float(low), float(high)

    def p_below(self, threshold: float) -> float:
        return self._compute_p(np.mean(self.resampled >= threshold), self.value - threshold)

    def p_above(self, threshold: float) -> float:
        return self._compute_p(np.mean(self.resampled <= threshold), threshold - self.value)

    def _compute_p(self, far_share: float, distance: float) -> float:
        # Beyond what the resamples can resolve, the tail is Student's with the bootstrap's error.
        if far_share * len(self.resampled) < 10:
            return compute_t_p_below(distance, self.se, self.df)
        return float(special.stdtr(self.df, special.ndtri(far_share) / self._expansion))

    def units_to_settle(self, threshold: float) -> int | None:
        distance = abs(self.value - threshold)

        def is_clear(n: int) -> bool:
            quantile = find_t(CONFIDENCE, n - self.n_strata)
            return quantile * self.se * math.sqrt(self.n / n) < distance

        return find_least(is_clear, self.n)

    def minimum_detectable(self) -> float:
        return (find_t(CONFIDENCE, self.df) + find_t(POWER, self.df)) * self.se


def estimate_paired(values: Sequence[float], method: str, unit: str = "launches") -> Estimate:
    """Student's t over units, one value each; needs two or more values."""
    array = np.asarray(values, dtype=float)
    se = float(np.std(array, ddof=1)) / math.sqrt(len(array))
    return StudentEstimate(float(np.mean(array)), se, len(array) - 1, len(array), method, unit)


def estimate_welch(baseline: Sequence[float], candidate: Sequence[float], method: str) -> Estimate:
    """Candidate minus baseline of units measured apart (Welch); two or more values on each side.

    ``n`` is the smaller side's number of units.
    """
    sides = [np.asarray(baseline, dtype=float), np.asarray(candidate, dtype=float)]
    variances = [float(np.var(side, ddof=1)) / len(side) for side in sides]
    total = sum(variances)
    spread = sum(v**2 / (len(side) - 1) for v, side in zip(variances, sides, strict=True))
    n = min(len(side) for side in sides)
    # Without any spread the Welch-Satterthwaite df is 0/0; the smaller side's is the safe limit.
    df = total**2 / spread if spread > 0 else float(n - 1)
    return StudentEstimate(
        float(np.mean(sides[1]) - np.mean(sides[0])), math.sqrt(total), df, n, method
    )


def estimate_bootstrap_mean(values: Sequence[float], method: str, unit: str) -> Estimate:
    """The mean of paired differences by bootstrap; needs two or more values."""
    # SciPy's stats take half a second to import: only where there are scores other than 0/1.
    from scipy.stats import bootstrap

    array = np.asarray(values, dtype=float)
    found = bootstrap(
        (array,),
        np.mean,
        n_resamples=count_resamples(len(array)),
        method="percentile",
        vectorized=True,
        batch=max(1, 1_000_000 // len(array)),
        random_state=np.random.default_rng(SEED),
    )
    return BootstrapEstimate(
        float(np.mean(array)), found.bootstrap_distribution, len(array), 1, method, unit
    )


def estimate_bootstrap_strata(
    statistic: Callable[[list[np.ndarray]], np.ndarray],
    strata: Sequence[np.ndarray],
    method: str,
    unit: str,
) -> Estimate | None:
    """A statistic of units resampled within strata; None without a stratum of two or more.

    ``strata`` holds the unit numbers of each stratum; ``statistic`` takes one array [resamples,
    units of the stratum] for each stratum and gives [resamples]. (SciPy's bootstrap refuses a
    stratum of one unit, which here just stays as it is.)
    """
    n = sum(len(units) for units in strata)
    if n - len(strata) < 1:
        return None
    rng = np.random.default_rng(SEED)
    resamples = count_resamples(n)
    batch = max(1, 1_000_000 // n)
    parts = []
    for start in range(0, resamples, batch):
        rows = min(batch, resamples - start)
        parts.append(
            statistic([units[rng.integers(0, len(units), (rows, len(units)))] for units in strata])
        )
    value = float(statistic([units[None, :] for units in strata])[0])
    return BootstrapEstimate(value, np.concatenate(parts), n, len(strata), method, unit)


def count_resamples(n: int) -> int:
    """Resamples for ``n`` units: ``RESAMPLES``, fewer where the tails of many units need less."""
    return int(min(RESAMPLES, max(499, MAX_DRAWS // n)))


def find_t(level: float, df: float) -> float:
    """The quantile of Student's t at ``level``, as scipy.stats.t.ppf gives it."""
    return float(special.stdtrit(df, level))


def compute_t_p_below(distance: float, se: float, df: float) -> float:
    """P(T <= distance/se); without any spread 0, 1/2 or 1 by the sign of the distance."""
    if se > 0:
        return float(special.stdtr(df, distance / se))
    return 0.5 * (1 + float(np.sign(distance)))


def find_least(is_clear: Callable[[int], bool], start: int) -> int | None:
    """The least n > ``start`` that is clear, by doubling and halving; None above ``MAX_UNITS``."""
    low, high = start, start + 1
    while not is_clear(high):
        low, high = high, 2 * high
        if high > MAX_UNITS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_clear(middle) else (middle, high)
    return high


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given.

    (S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
    Statistics 6, 1979, 65-70. statsmodels has it too, behind half a second of imports.)
    """
    order = np.argsort(p_values)
    raw = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(raw), 1.0)
    return adjusted.tolist()
