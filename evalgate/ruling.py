"""One rule's outcome, from the effect that was estimated for it. Pure.

A rule passes when its one-sided 95 % bound clears the margin and fails when the other bound does
not reach it, Holm's correction over all rules included; else it is inconclusive, and says what
would settle it. Knows neither records nor the other rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from evalgate.effects import Effect
from evalgate.metrics import Metric
from evalgate.policy import Rule
from evalgate.records import is_finite
from evalgate.stats import ALPHA, Estimate

Status = Literal["pass", "fail", "inconclusive", "invalid"]

SIGNS = {"percent": "%", "points": "points"}


@dataclass(frozen=True)
class RuleResult:
    """One rule's outcome; observed and bounds are candidate minus baseline, percent or points."""

    rule: Rule
    status: Status
    observed: float | None
    ci_low: float | None
    ci_high: float | None
    n_pairs: int
    n_dropped: int
    n_blocks: int
    reason: str
    details: dict[str, Any]

    @property
    def wants_launches(self) -> bool:
        """Whether it is open, and on evidence of which each further launch brings more.

        An estimate over launches may settle even where the change lies at the margin now. (A pass
        that is held back was decided, and so needs nothing.)
        """
        if self.status != "inconclusive" or "needed_more" not in self.details:
            return False
        needed = self.details["needed_more"]
        return (needed["unit"] if needed else self.details.get("unit_sampled")) == "launches"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.rule.name,
            "metric": self.rule.metric,
            "kind": self.rule.kind,
            "bucket": self.rule.bucket,
            "task": self.rule.task,
            "status": self.status,
            "observed": self.observed,
            "ci_low": self.ci_low,
            "ci_high": self.ci_high,
            "margin": self.rule.margin,
            "unit": self.rule.definition.delta_unit,
            "n_pairs": self.n_pairs,
            "n_dropped": self.n_dropped,
            "n_blocks": self.n_blocks,
            "reason": self.reason,
            "details": self.details,
        }


def compute_threshold(rule: Rule) -> float:
    """The change, on the estimate's scale, that must be cleared (log-ratio, or difference)."""
    gain = rule.margin if rule.kind == "superiority" else -rule.margin
    raw = gain if rule.definition.higher_is_better else -gain
    if rule.definition.delta_unit == "points":
        return raw / 100
    return -math.inf if raw <= -100 else math.log1p(raw / 100)


def to_shown(metric: Metric, value: float | None) -> float | None:
    """A change in percent or points from the estimate's scale; None when it is no number."""
    if not is_finite(value):
        return None
    assert value is not None
    if metric.delta_unit == "points":
        return 100 * value
    return 100 * math.expm1(value) if value < 700 else None


def judge_rule(
    rule: Rule, effect: Effect, p_fail: tuple[float, float] | None, context: dict[str, Any]
) -> RuleResult:
    """One rule's outcome from its effect and the p-value of its margin, raw and after Holm.

    ``context`` is shown in ``details`` and decides nothing.
    """
    metric, threshold = rule.definition, compute_threshold(rule)
    observed = to_shown(metric, effect.value)
    low = high = None
    details = {**effect.details, **context}
    estimate = effect.estimate
    if estimate is not None:
        low, high = (to_shown(metric, bound) for bound in estimate.bounds())
        details |= {
            "unit_sampled": estimate.unit,
            "n_units": estimate.n,
            f"mde_{metric.delta_unit}": to_shown(metric, estimate.minimum_detectable()),
        }
    if p_fail is not None:
        details["p_fail"], details["p_fail_holm"] = p_fail
    status, reason = _decide(rule, effect, observed, low, high, p_fail)
    if status == "inconclusive":
        needed = effect.more
        if needed is None and effect.problem is None and estimate is not None and low is not None:
            needed = _count_needed(estimate, threshold)
        details["needed_more"] = needed
        reason += _describe_needed(needed, estimate)
    return RuleResult(
        rule,
        status,
        observed,
        low,
        high,
        effect.n_pairs,
        effect.n_dropped,
        effect.n_blocks,
        reason,
        details,
    )


def _decide(
    rule: Rule,
    effect: Effect,
    observed: float | None,
    low: float | None,
    high: float | None,
    p_fail: tuple[float, float] | None,
) -> tuple[Status, str]:
    if effect.problem is not None:
        return "inconclusive", effect.problem
    if observed is None or low is None or high is None or p_fail is None:
        return "inconclusive", "the change is not a number that can be judged"
    metric, sign = rule.definition, SIGNS[rule.definition.delta_unit]
    upwards = metric.higher_is_better
    gain = rule.margin if rule.kind == "superiority" else -rule.margin
    limit = gain if upwards else -gain
    pessimistic, optimistic = (low, high) if upwards else (high, low)
    shown = (
        f"{metric.label} {observed:+.2f} {sign}, one-sided 95 % bounds {low:+.2f} and {high:+.2f}"
    )
    wanted = f"{'above' if upwards else 'below'} {limit + 0.0:+.2f} {sign}"
    if (pessimistic > limit) if upwards else (pessimistic < limit):
        return "pass", f"{shown}: the {'lower' if upwards else 'upper'} bound is {wanted}"
    if p_fail[1] <= ALPHA:
        return "fail", (
            f"{shown}: even the {'upper' if upwards else 'lower'} bound {optimistic:+.2f} is not "
            f"{wanted} (p {p_fail[1]:.2g} after Holm)"
        )
    if p_fail[0] <= ALPHA:
        return "inconclusive", (
            f"{shown}: not {wanted}, but among all rules this may be chance (p {p_fail[0]:.2g}, "
            f"{p_fail[1]:.2g} after Holm)"
        )
    return "inconclusive", f"{shown}: wanted {wanted}, which lies between the bounds"


def _count_needed(estimate: Estimate, threshold: float) -> dict[str, Any] | None:
    total = estimate.units_to_settle(threshold)
    if total is None:
        return None
    return {"unit": estimate.unit, "more": max(total - estimate.n, 1)}


def _describe_needed(needed: dict[str, Any] | None, estimate: Estimate | None) -> str:
    if needed is not None:
        return f"; about {needed['more']} more {needed['unit']} would settle it"
    if estimate is None:
        return ""
    return f"; no number of {estimate.unit} settles it while the change stays at the margin"
