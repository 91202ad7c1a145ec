"""Looking at a run's launches while more are added, with the error rate kept over all looks.

A test that is repeated after every launch at its ordinary level says "decided" too often; here each
look spends its share of the error rate (``looks``). The nominal level of a look follows from the
exact joint distribution of Student's t at few launches, not from its normal limit (C. Jennison and
B. W. Turnbull, "Exact calculations for sequential t, chi-squared and F tests", Biometrika 78, 1991,
133-141).

Bounds at these levels are repeated confidence intervals: they hold together at all looks, so they
hold whatever made the run stop. Pure numbers: neither run nor metric nor policy is known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import special

from evalgate.looks import Look
from evalgate.stats import ALPHA, StudentEstimate

CELLS = np.linspace(-4.0, 6.0, 251)  # edges on the normal scale of each look's t; finer moves < 1 %
# Error rates whose nominal levels are computed; between them log-linear. Holm's smallest among a
# few hundred rules lies inside.
RATES = np.unique(np.append(np.geomspace(1e-5, 0.5, 40), ALPHA))


@dataclass(frozen=True)
class SequentialEstimate:
    """Student's t over launches at the last of ``looks``: bounds and p-values hold over them all.

    Where a rule could not use every launch, the level is that of the run's look.
    """

    inner: StudentEstimate
    looks: tuple[Look, ...]

    @property
    def value(self) -> float:
        return self.inner.value

    @property
    def method(self) -> str:
        return self.inner.method

    @property
    def unit(self) -> str:
        return self.inner.unit

    @property
    def n(self) -> int:
        return self.inner.n

    @property
    def nominal(self) -> float:
        """The level of each one-sided bound at this look."""
        return float(np.interp(ALPHA, RATES, compute_nominal(self.looks)))

    def bounds(self) -> tuple[float, float]:
        return self.inner.bounds(self.nominal)

    def p_below(self, threshold: float) -> float:
        return compute_overall_p(self.inner.p_below(threshold), self.looks)

    def p_above(self, threshold: float) -> float:
        return compute_overall_p(self.inner.p_above(threshold), self.looks)

    def units_to_settle(self, threshold: float) -> int | None:
        return self.inner.units_to_settle(threshold, self.nominal)

    def minimum_detectable(self) -> float:
        return self.inner.minimum_detectable(self.nominal)

    def describe(self) -> dict[str, Any]:
        """For a rule's details: which look it is, and the level that each bound has there."""
        last = self.looks[-1]
        return {
            "look": len(self.looks),
            "blocks": last.blocks,
            "error_rate_spent": last.spent,
            "nominal_level": 1 - self.nominal,
        }


def compute_overall_p(p: float, looks: tuple[Look, ...]) -> float:
    """The least error rate over all looks at which a p-value of the last look would reject.

    (The sequential p-value of Q. Liu and K. M. Anderson, "On adaptive extensions of group
    sequential trials for clinical investigations", JASA 103, 2008, 1621-1630: fit for Holm.)
    """
    nominal = compute_nominal(looks)
    if not np.isfinite(p):
        return p
    if p >= nominal[-1]:
        return 1.0
    logs = np.interp(np.log(max(p, 1e-300)), np.log(nominal), np.log(RATES))
    return float(np.exp(logs))


@lru_cache(maxsize=64)
def compute_nominal(looks: tuple[Look, ...]) -> np.ndarray:
    """The one-sided nominal level of the last look for each of ``RATES``, as an array like it.

    Under "the true change is the threshold" the t of one launch count is a Markov chain in the next
    (``_compute_step``). ``mass[rate, cell]`` is the chance to be in a cell of the normal scale of
    the present t without having crossed at an earlier look; at each look the upper part that is due
    is cut off.
    """
    normal_tail = special.ndtr(-CELLS)
    mass = np.repeat(-np.diff(normal_tail)[None, :], len(RATES), axis=0)
    by_blocks = {look.blocks: look.spent for look in looks}
    spent, nominal = 0.0, np.zeros(len(RATES))
    for n in range(looks[0].blocks, looks[-1].blocks + 1):
        if n > looks[0].blocks:
            mass = mass @ _compute_step(n - 1)
        if n in by_blocks:
            nominal = _cut(mass, RATES * (by_blocks[n] - spent), normal_tail)
            spent = by_blocks[n]
    return nominal


def _cut(mass: np.ndarray, due: np.ndarray, normal_tail: np.ndarray) -> np.ndarray:
    """Take ``due[rate]`` off the upper end of ``mass``, in place; the tail above each cut."""
    levels = np.zeros(len(mass))
    from_top = np.cumsum(mass[:, ::-1], axis=1)
    for i, row in enumerate(mass):
        k = min(int(np.searchsorted(from_top[i], due[i])), len(row) - 1)
        cell = len(row) - 1 - k
        above = from_top[i, k - 1] if k else 0.0
        part = min((due[i] - above) / row[cell], 1.0) if row[cell] > 0 else 0.0
        low, high = normal_tail[cell], normal_tail[cell + 1]
        levels[i] = high + part * (low - high)
        row[cell + 1 :] = 0.0
        row[cell] *= 1 - part
    return levels


@lru_cache(maxsize=64)
def _compute_step(n: int) -> np.ndarray:
    """Chances [cell of t after n launches, cell of t after n + 1] under the threshold.

    With S the sum and Q the sum of squares, A = S/sqrt(Q) is t in another form. The share of the
    next launch, x/sqrt(Q + x^2) = sin(phi), is independent of all A before, tan(phi) sqrt(n) is
    Student's t with n degrees of freedom, and the next A is A cos(phi) + sin(phi).
    """
    middle = (CELLS[1:] + CELLS[:-1]) / 2
    a = _to_a(special.stdtrit(n - 1, special.ndtr(middle)), n)[:, None]
    edge = _to_a(special.stdtrit(n, special.ndtr(CELLS[1:-1])), n + 1)[None, :]
    # A cos(phi) + sin(phi) > edge between two angles; beyond the second, Q outgrows S again.
    ratio = edge / np.sqrt(1 + a * a)
    rise, turn = np.arcsin(np.clip(ratio, -1, 1)), np.arctan(a)
    first = np.clip(rise - turn, -np.pi / 2, np.pi / 2)
    second = np.clip(np.pi - rise - turn, -np.pi / 2, np.pi / 2)
    above = _angle_cdf(second, n) - _angle_cdf(first, n)
    above = np.where(ratio >= 1, 0.0, np.where(ratio <= -1, 1.0, above))
    ends = np.ones((len(middle), 1))
    return -np.diff(np.hstack([ends, above, 0 * ends]), axis=1)


def _to_a(t: np.ndarray, n: int) -> np.ndarray:
    return t * np.sqrt(n) / np.sqrt(n - 1 + t * t)


def _angle_cdf(phi: np.ndarray, n: int) -> np.ndarray:
    return special.stdtr(n, np.sqrt(n) * np.tan(phi))
