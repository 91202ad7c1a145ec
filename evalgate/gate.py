"""The verdict: rules judged on valid evidence, accuracy before speed. Pure; nothing is read here.

What decides one rule is ``ruling``'s. A verdict needs every rule (an intersection-union test, so
passing needs no correction, and failing takes Holm's); invalid comes before fail, fail before
inconclusive, inconclusive before pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from evalgate.accuracy import estimate_fidelity, estimate_score
from evalgate.compare import (
    ArmView,
    RequestPairs,
    SamplePairs,
    compute_identical_share,
    find_common_baseline,
    pair_requests,
    pair_samples,
    views_of_run,
)
from evalgate.effects import Effect
from evalgate.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_PASS
from evalgate.looks import Look, read_looks
from evalgate.policy import Policy, Rule, Validity, expand
from evalgate.records import (
    BASELINE,
    CANDIDATE,
    SCHEMA_VERSION,
    FidelityRecord,
    StoredRun,
    is_finite,
)
from evalgate.ruling import RuleResult, Status, compute_threshold, judge_rule, to_shown
from evalgate.sequential import SequentialEstimate
from evalgate.speed import estimate_speed
from evalgate.stats import StudentEstimate, adjust_holm
from evalgate.summary import summarise
from evalgate.validity import check_validity

EXIT_CODES: dict[Status, int] = {
    "pass": EXIT_PASS,
    "fail": EXIT_FAIL,
    "inconclusive": EXIT_INCONCLUSIVE,
    "invalid": EXIT_INVALID,
}
PRECEDENCE: tuple[Status, ...] = ("invalid", "fail", "inconclusive", "pass")


@dataclass(frozen=True)
class Verdict:
    status: Status
    invalid_reasons: list[str]
    warnings: list[str]
    differing_fields: list[str]
    rules: list[RuleResult]
    summary: dict[str, Any]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """The JSON verdict; its keys are fixed."""
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "exit_code": self.exit_code,
            "invalid_reasons": self.invalid_reasons,
            "warnings": self.warnings,
            "differing_fields": self.differing_fields,
            "rules": [rule.to_json() for rule in self.rules],
            "summary": self.summary,
        }


@dataclass(frozen=True)
class Evidence:
    """Two arms, paired; what every rule is estimated from.

    ``looks``: when the results were looked at, of a run that was stopped by them.
    """

    baseline: ArmView
    candidate: ArmView
    requests: RequestPairs
    samples: SamplePairs
    apart: bool
    yardsticks: list[tuple[str, list[FidelityRecord]]] = field(default_factory=list)
    looks: tuple[Look, ...] = ()

    @classmethod
    def build(cls, baseline: ArmView, candidate: ArmView, *, apart: bool) -> Evidence:
        references = find_common_baseline(baseline, candidate) if apart else None
        return cls(
            baseline,
            candidate,
            pair_requests(baseline, candidate, references),
            pair_samples(baseline, candidate),
            apart,
            looks=() if apart else read_looks(baseline.run),
        )

    def estimate(self, rule: Rule, limits: Validity) -> Effect:
        """The effect that ``rule`` is about."""
        source = rule.definition.source
        if source == "samples":
            return estimate_score(
                self.samples,
                self.baseline,
                task=rule.task,
                bucket=rule.bucket,
                min_samples=limits.min_samples,
            )
        if source == "fidelity":
            return estimate_fidelity(self.candidate, self.yardsticks, rule.metric)
        effect = estimate_speed(
            self.requests,
            rule.metric,
            self.baseline.buckets,
            bucket=rule.bucket,
            statistic=rule.statistic,
            apart=self.apart,
        )
        effect = self._allow_for_looks(effect)
        if effect.problem is None and effect.n_blocks < limits.min_blocks:
            more = limits.min_blocks - effect.n_blocks
            return replace(
                effect,
                problem=f"{effect.n_blocks} launches of each arm, min_blocks {limits.min_blocks}",
                more={"unit": "launches", "more": more},
            )
        return effect

    def _allow_for_looks(self, effect: Effect) -> Effect:
        """Bounds that hold over all looks, where launches came in look by look."""
        inner = effect.estimate
        if not self.looks or not isinstance(inner, StudentEstimate):
            return effect
        estimate = SequentialEstimate(inner, self.looks)
        details = {**effect.details, "sequential": estimate.describe()}
        return replace(effect, estimate=estimate, details=details)

    def get_identical(self, rule: Rule) -> float | None:
        """`identical_outputs`: share of the rule's pairs with the same output text."""
        if rule.definition.source == "samples":
            return self._identical_samples.get(rule.task)
        return self._identical_requests.get(rule.bucket)

    @cached_property
    def _identical_requests(self) -> dict[str | None, float | None]:
        names = np.array([*self.requests.bucket_names, None])[self.requests.bucket]
        return _share_by(self.requests.same_text, names)

    @cached_property
    def _identical_samples(self) -> dict[str | None, float | None]:
        names = [sample.task for sample, _ in self.samples.pairs]
        return _share_by(self.samples.same_text, np.array(names, dtype=object))


def _share_by(same: np.ndarray, names: np.ndarray) -> dict[str | None, float | None]:
    """Shares of identical outputs by name, and under None over all pairs."""
    return {
        None: compute_identical_share(same),
        **{name: compute_identical_share(same[names == name]) for name in dict.fromkeys(names)},
    }


def judge(
    baseline: ArmView,
    candidate: ArmView,
    policy: Policy,
    *,
    calibration: StoredRun | None = None,
    allow: Sequence[str] = (),
    apart: bool,
) -> Verdict:
    """Judge a candidate against a baseline.

    ``apart``: the arms come from two runs that did not alternate. ``calibration``: a run of
    baseline against baseline, shown as the noise floor and used as the yardstick of fidelity.
    ``allow`` adds to the policy's allow_differences. Raises PolicyError for a policy that names
    what the runs do not have, EvidenceError for records that cannot be paired.
    """
    rules = expand(policy, baseline, candidate)
    evidence = Evidence.build(baseline, candidate, apart=apart)
    noise = Evidence.build(*views_of_run(calibration), apart=False) if calibration else None
    evidence.yardsticks.extend(_list_yardsticks(baseline, noise))
    found = check_validity(
        baseline,
        candidate,
        evidence.requests,
        evidence.samples,
        policy.validity,
        apart=apart,
        allow=allow,
    )
    effects = [evidence.estimate(rule, policy.validity) for rule in rules]
    p_values = _adjust_fail_p_values(rules, effects)
    results = [
        judge_rule(rule, effect, p_value, _describe_context(rule, evidence, noise))
        for rule, effect, p_value in zip(rules, effects, p_values, strict=True)
    ]
    results = _hold_back(results, valid=not found.reasons)
    status = _combine(results, found.reasons)
    return Verdict(
        status=status,
        invalid_reasons=found.reasons,
        warnings=found.warnings,
        differing_fields=found.differing_fields,
        rules=results,
        summary={
            BASELINE: summarise(baseline),
            CANDIDATE: summarise(candidate, evidence.requests),
        },
    )


def _list_yardsticks(
    baseline: ArmView, noise: Evidence | None
) -> list[tuple[str, list[FidelityRecord]]]:
    """Records of the baseline against its own output: its second pass, or a calibration's."""
    found = [("the baseline's second pass", baseline.fidelity)]
    if noise is not None:
        found.append(("the calibration run", noise.candidate.fidelity))
    return found


def _adjust_fail_p_values(
    rules: Sequence[Rule], effects: Sequence[Effect]
) -> list[tuple[float, float] | None]:
    """For each rule the p-value of "the margin is kept", raw and after Holm; None without one."""
    raw: list[float | None] = []
    for rule, effect in zip(rules, effects, strict=True):
        p = None
        if effect.estimate is not None and is_finite(effect.estimate.value):
            test = (
                effect.estimate.p_below
                if rule.definition.higher_is_better
                else effect.estimate.p_above
            )
            p = test(compute_threshold(rule))
        raw.append(p if is_finite(p) else None)
    adjusted = iter(adjust_holm([p for p in raw if p is not None]))
    return [None if p is None else (p, next(adjusted)) for p in raw]


def _describe_context(rule: Rule, own: Evidence, noise: Evidence | None) -> dict[str, Any]:
    """What stands beside a delta: the noise floor and the shares of identical outputs."""
    context: dict[str, Any] = {
        "identical_outputs": {
            "share": own.get_identical(rule),
            "base_against_base": noise.get_identical(rule) if noise else None,
        }
    }
    if noise is None or rule.definition.source == "fidelity":
        return context
    effect = noise.estimate(rule, Validity())
    metric = rule.definition
    low = high = None
    if effect.estimate is not None:
        low, high = (to_shown(metric, bound) for bound in effect.estimate.bounds())
    context["noise_floor"] = {
        "observed": to_shown(metric, effect.value),
        "ci_low": low,
        "ci_high": high,
        "smallest_effect": to_shown(metric, effect.estimate.minimum_detectable())
        if effect.estimate
        else None,
    }
    return context


def _hold_back(results: Sequence[RuleResult], *, valid: bool) -> list[RuleResult]:
    """No rule is reported as passed on invalid evidence, no speed-up on red correctness."""
    if not valid:
        return [
            replace(r, status="invalid", reason=f"the evidence is invalid; measured: {r.reason}")
            for r in results
        ]
    red = [
        r.rule.name
        for r in results
        if r.status == "fail" and r.rule.definition.source != "requests"
    ]
    if not red:
        return list(results)
    return [
        replace(
            r,
            status="inconclusive",
            reason=f"no speed-up is reported while accuracy fails ({', '.join(red)}); {r.reason}",
        )
        if r.status == "pass"
        and r.rule.kind == "superiority"
        and r.rule.definition.source == "requests"
        else r
        for r in results
    ]


def _combine(results: Sequence[RuleResult], reasons: Sequence[str]) -> Status:
    statuses = {r.status for r in results}
    if reasons:
        statuses.add("invalid")
    return next(status for status in PRECEDENCE if status in statuses)
