"""What must hold for a verdict: rules with margins, and the limits of validity.

A policy is written once for any set of buckets and tasks: ``bucket = "*"`` and ``task = "*"``
stand for each one that a run has, and ``expand`` turns such a rule into one for each. Tables come
in, a model goes out; no file is opened here and nothing is judged.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evalgate.compare import ArmView
from evalgate.errors import PolicyError
from evalgate.metrics import METRICS, Metric
from evalgate.validation import describe_validation_error

EACH = "*"
FIDELITY_TASK = "fidelity"  # measured beside the tasks, gated by its own metrics

Kind = Literal["non_inferiority", "superiority"]
Share = Annotated[float, Field(ge=0, le=1)]


class PolicyModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Rule(PolicyModel):
    """One condition. The margin is a magnitude; its direction comes from metric and kind.

    Non-inferiority passes when a loss of the margin or more is excluded, superiority when a gain
    above the margin is shown.
    """

    name: Annotated[str, Field(min_length=1)]
    metric: str
    kind: Kind
    margin_percent: Annotated[float, Field(ge=0)] | None = None
    margin_points: Annotated[float, Field(ge=0, le=100)] | None = None
    bucket: str | None = None
    task: str | None = None
    statistic: Literal["mean", "p50", "p99"] = "mean"

    @property
    def definition(self) -> Metric:
        return METRICS[self.metric]

    @property
    def margin(self) -> float:
        """The margin in the unit of the metric's delta: percent or points."""
        found = self.margin_percent if self.margin_points is None else self.margin_points
        assert found is not None, "checked when the rule was built"
        return found

    @model_validator(mode="after")
    def _check(self) -> Rule:
        if self.metric not in METRICS:
            raise ValueError(_name_unknown(f"rule {self.name!r}: metric", self.metric, METRICS))
        metric = METRICS[self.metric]
        self._check_margin(metric)
        if metric.weighted and self.bucket is not None:
            raise ValueError(
                f"rule {self.name!r}: {self.metric} is over all buckets, so bucket "
                f"{self.bucket!r} has no meaning: remove it"
            )
        if self.task is not None and metric.source != "samples":
            raise ValueError(
                f"rule {self.name!r}: task {self.task!r} goes with the metric score, not with "
                f"{self.metric}: remove it"
            )
        if self.bucket is not None and metric.source == "fidelity":
            raise ValueError(f"rule {self.name!r}: {self.metric} has no buckets: remove bucket")
        has_statistics = metric.source == "requests" and not metric.is_throughput
        if self.statistic != "mean" and not has_statistics:
            raise ValueError(
                f"rule {self.name!r}: statistic {self.statistic!r} goes with ttft, tpot and e2el, "
                f"not with {self.metric}: remove it"
            )
        return self

    def _check_margin(self, metric: Metric) -> None:
        right, wrong = "margin_percent", "margin_points"
        if metric.delta_unit == "points":
            right, wrong = wrong, right
        if getattr(self, wrong) is not None or getattr(self, right) is None:
            raise ValueError(
                f"rule {self.name!r}: {self.metric} is judged in {metric.delta_unit}: set {right}, "
                f"and not {wrong}"
            )
        if self.margin_percent is not None and self.margin_percent >= 100:
            raise ValueError(
                f"rule {self.name!r}: margin_percent {self.margin_percent:g} is 100 or more, which "
                "nothing could fail: give percent, such as 1.0"
            )


class Validity(PolicyModel):
    """When evidence can carry a verdict at all."""

    allow_differences: list[str] = []
    min_success: Share = 1.0
    min_blocks: Annotated[int, Field(ge=1)] = 1
    min_samples: Annotated[int, Field(ge=1)] = 30
    require_routes: list[str] = []
    max_length_ratio: Annotated[float, Field(ge=0)] = 1.2
    max_length_finish_increase: Share = 0.10
    max_repetition_increase: Share = 0.05

    @model_validator(mode="after")
    def _check(self) -> Validity:
        if 0 < self.max_length_ratio < 1:
            raise ValueError(
                f"max_length_ratio {self.max_length_ratio:g} is larger over smaller, so at least "
                "1, or 0 for not judged"
            )
        return self


class Policy(PolicyModel):
    rules: Annotated[list[Rule], Field(min_length=1)]
    validity: Validity = Validity()

    @model_validator(mode="after")
    def _check(self) -> Policy:
        names = [rule.name for rule in self.rules]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rule {name!r} is named twice: names must differ")
        return self

    def without_required_routes(self) -> Policy:
        """The same policy for arms of which none is meant to be patched, as in a calibration."""
        return self.model_copy(
            update={"validity": self.validity.model_copy(update={"require_routes": []})}
        )


def parse_policy(table: dict[str, Any], where: str) -> Policy:
    """Check a decoded policy table (of a file, or of a spec's [policy]).

    Raises PolicyError: which key or value, and what to do.
    """
    try:
        return Policy.model_validate(table)
    except ValidationError as exc:
        raise PolicyError(f"{where}: {describe_validation_error(exc, Policy)}") from None


DEFAULT = parse_policy(
    {
        "rules": [
            {"name": name, "metric": metric, "kind": "non_inferiority", **rest}
            for name, metric, rest in (
                ("TTFT", "ttft", {"bucket": EACH, "margin_percent": 2.0}),
                ("TPOT", "tpot", {"bucket": EACH, "margin_percent": 2.0}),
                (
                    "throughput",
                    "normalised_output_throughput",
                    {"bucket": EACH, "margin_percent": 2.0},
                ),
                ("score", "score", {"task": EACH, "margin_points": 2.0}),
            )
        ]
    },
    "the policy used when none is named",
)


def expand(policy: Policy, baseline: ArmView, candidate: ArmView) -> list[Rule]:
    """The rules for these runs, each ``*`` replaced; names get the bucket or task appended.

    ``bucket = "*"`` beside a task means each bucket in which that task has samples. A bucket or a
    task that neither run has is a PolicyError, as is a policy that leaves no rule.
    """
    sides = (baseline, candidate)
    buckets, tasks = list_buckets(*sides), list_tasks(*sides)
    check_names(policy, buckets, tasks)
    sampled = {(s.task, v.find_bucket(s.prompt_tokens)) for v in sides for s in v.samples}
    rules: list[Rule] = []
    for rule in policy.rules:
        for task in tasks if rule.task == EACH else [rule.task]:
            places = [
                b
                for b in buckets
                if rule.definition.source != "samples"
                or any(place == b and task in (None, name) for name, place in sampled)
            ]
            for bucket in places if rule.bucket == EACH else [rule.bucket]:
                rules.append(_specialise(rule, task, bucket))
    if not rules:
        raise PolicyError(
            "the policy leaves no rule for these runs: they have neither load buckets nor tasks "
            "that its rules with '*' could stand for"
        )
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PolicyError(f"two rules are called {twice!r} once '*' is replaced: rename one")
    return rules


def check_names(policy: Policy, buckets: Sequence[str], tasks: Sequence[str]) -> None:
    """Raise PolicyError for the first rule about a bucket or a task that is not there."""
    for rule in policy.rules:
        _check_known(rule, "bucket", rule.bucket, buckets)
        _check_known(rule, "task", rule.task, tasks)


def list_buckets(*sides: ArmView) -> list[str]:
    """Buckets of the specs in their order, then those that only records name."""
    named = [b.name for v in sides for b in v.buckets]
    return list(dict.fromkeys([*named, *sorted({r.bucket for v in sides for r in v.requests})]))


def list_tasks(*sides: ArmView) -> list[str]:
    """Tasks of the specs in their order, then those that only records name."""
    named = [t for v in sides for t in v.task_specs if t != FIDELITY_TASK]
    return list(dict.fromkeys([*named, *sorted({s.task for v in sides for s in v.samples})]))


def _specialise(rule: Rule, task: str | None, bucket: str | None) -> Rule:
    parts = [rule.name]
    if rule.task == EACH:
        parts.append(str(task))
    if rule.bucket == EACH:
        parts.append(str(bucket))
    return rule.model_copy(update={"name": " ".join(parts), "task": task, "bucket": bucket})


def _check_known(rule: Rule, noun: str, value: str | None, known: Sequence[str]) -> None:
    if value not in (None, EACH, *known):
        raise PolicyError(_name_unknown(f"rule {rule.name!r}: {noun}", value, known, "of the runs"))


def _name_unknown(what: str, value: str | None, known: Any, whose: str = "") -> str:
    near = difflib.get_close_matches(str(value), list(known), n=1)
    guess = f", did you mean {near[0]!r}?" if near else ""
    return (
        f"{what} {value!r} is unknown{guess}{'' if guess else ';'} known{' ' if whose else ''}"
        f"{whose}: {', '.join(known) or 'none'}"
    )
