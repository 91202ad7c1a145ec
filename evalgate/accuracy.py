"""From paired samples and fidelity records to the change of a score, an agreement or a gap.

A sample is one piece of evidence however often it was repeated: its scores are averaged over
blocks before anything else. No policy is known here but the least number of samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from evalgate.compare import ArmView, SamplePairs
from evalgate.effects import Effect
from evalgate.metrics import METRICS
from evalgate.records import FidelityRecord
from evalgate.stats import (
    ALPHA,
    StudentEstimate,
    estimate_bootstrap_mean,
    estimate_paired,
    find_t,
)
from evalgate.stats_scores import compute_mcnemar_p, estimate_paired_share


def estimate_score(
    samples: SamplePairs,
    baseline: ArmView,
    *,
    task: str | None = None,
    bucket: str | None = None,
    min_samples: int = 0,
) -> Effect:
    """The change of the mean score over distinct samples, of one task or of all together.

    ``bucket`` keeps the samples whose prompt, as ``baseline`` counted it, falls into that bucket.
    0/1 scores get Tango's bounds; others a bootstrap, not judged below ``min_samples``.
    """
    chosen = [
        (a, b)
        for a, b in samples.pairs
        if task in (None, a.task)
        and (bucket is None or bucket == baseline.find_bucket(_known(a.prompt_tokens, b)))
    ]
    scored = defaultdict(list)
    for a, b in chosen:
        if a.score is not None and b.score is not None:
            scored[a.task, a.sample_id].append((a.score, b.score))
    n_dropped = len(chosen) - sum(len(v) for v in scored.values())
    n_blocks = len({a.block for a, b in chosen if a.score is not None and b.score is not None})
    means = np.array([np.mean(v, axis=0) for v in scored.values()]).reshape(-1, 2)
    difference = means[:, 1] - means[:, 0]
    n = len(means)
    details: dict[str, Any] = {"method": None}
    if n:
        details |= {"baseline": float(means[:, 0].mean()), "candidate": float(means[:, 1].mean())}

    def build(estimate: Any, problem: str | None = None, more: int | None = None) -> Effect:
        value = float(difference.mean()) if n else None
        needed = {"unit": "samples", "more": more} if more else None
        return Effect(value, estimate, n, n_dropped, n_blocks, problem, needed, details)

    if n == 0:
        return build(None, f"no sample has a score in both arms ({n_dropped} left out)")
    if np.all((means == 0) | (means == 1)):
        estimate = estimate_paired_share(means[:, 0], means[:, 1])
        gains, losses = int(estimate.gains), int(estimate.losses)
        details |= {
            "method": estimate.method,
            "gains": gains,
            "losses": losses,
            "mcnemar_p": compute_mcnemar_p(gains, losses),
        }
        if n < 2:
            return build(None, "one sample says nothing of others", 1)
        return build(estimate)
    details["method"] = "paired bootstrap over samples, expanded percentile bounds"
    if n < 2:
        return build(None, "one sample says nothing of others", max(1, min_samples - n))
    estimate = estimate_bootstrap_mean(difference, details["method"], "samples")
    if n < min_samples:
        problem = f"{n} samples, and scores other than 0/1 are judged from {min_samples} up"
        return build(estimate, problem, min_samples - n)
    return build(estimate)


def _known(prompt_tokens: int | None, other: Any) -> int | None:
    return prompt_tokens if prompt_tokens is not None else other.prompt_tokens


def estimate_fidelity(
    candidate: ArmView, yardsticks: Iterable[tuple[str, list[FidelityRecord]]], metric_name: str
) -> Effect:
    """A fidelity metric of the candidate against base-against-base, texts being the units.

    ``yardsticks`` are named lists of records of the baseline measured against its own output
    (a second pass of it, a calibration run); the first that is not empty counts. Student's t over
    texts: each is a mean over many positions.
    """
    field = "mean_gap" if metric_name == "logprob_gap" else metric_name
    name, records = next(((n, r) for n, r in yardsticks if r), ("none", []))
    details: dict[str, Any] = {"method": "Student's t over texts, paired", "yardstick": name}

    def without(problem: str, n_dropped: int = 0) -> Effect:
        return Effect(None, None, 0, n_dropped, 0, problem, details=details)

    if not candidate.fidelity:
        return without(
            f"no fidelity records of the candidate, so {METRICS[metric_name].label} is not known: "
            "run the task fidelity"
        )
    if not records:
        return without(
            "no base-against-base fidelity records to judge by: measure the baseline against its "
            "own output too, or link a calibration run that did"
        )
    own, theirs = _average(candidate.fidelity, field), _average(records, field)
    routes = sorted(own.keys() & theirs.keys())
    n_dropped = len(own.keys() | theirs.keys()) - len(routes)
    by_text = defaultdict(list)
    for text, route in routes:
        by_text[text].append((theirs[text, route], own[text, route]))
    means = np.array([np.mean(v, axis=0) for v in by_text.values()]).reshape(-1, 2)
    if not len(means):
        return without(
            "no text has fidelity records in both, so there is nothing to pair", n_dropped
        )
    difference = means[:, 1] - means[:, 0]
    details |= {"yardstick_value": float(means[:, 0].mean()), "value": float(means[:, 1].mean())}
    details["routes"] = sorted({route for _, route in routes})
    details["buckets"] = _average_by_bucket(candidate, by_text)
    used = [r for r in candidate.fidelity if (r.sample_id, r.route) in set(routes)]
    effect: dict[str, Any] = {
        "value": float(difference.mean()),
        "n_pairs": len(means),
        "n_dropped": n_dropped,
        "n_blocks": len({r.block for r in used}),
        "details": details,
    }
    if len(means) < 2:
        more = {"unit": "texts", "more": 1}
        return Effect(estimate=None, problem="one text says nothing of others", more=more, **effect)
    estimate = estimate_paired(difference, details["method"], "texts")
    if metric_name == "top1_agreement":
        estimate = _widen_agreement(estimate, sum(r.positions for r in used))
    return Effect(estimate=estimate, **effect)


def _average_by_bucket(
    candidate: ArmView, by_text: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, dict[str, float]]:
    """Number of texts and mean of yardstick and candidate, for each bucket that holds a prompt."""
    lengths = {r.sample_id: r.prompt_tokens for r in candidate.fidelity}
    found = defaultdict(list)
    for text, values in by_text.items():
        bucket = candidate.find_bucket(lengths[text])
        if bucket is not None:
            found[bucket].append(np.mean(values, axis=0))
    means = {b.name: np.mean(found[b.name], axis=0) for b in candidate.buckets if b.name in found}
    return {
        name: {"n": len(found[name]), "yardstick_value": float(mean[0]), "value": float(mean[1])}
        for name, mean in means.items()
    }


def _widen_agreement(estimate: StudentEstimate, positions: int) -> StudentEstimate:
    """Little spread between texts is no proof: n like positions still allow 1 - 0.05^(1/n)."""
    reach = 1 - ALPHA ** (1 / max(positions, 1))
    se = max(estimate.se, reach / find_t(1 - ALPHA, estimate.df))
    return StudentEstimate(
        estimate.value, se, estimate.df, estimate.n, estimate.method, estimate.unit
    )


def _average(records: Iterable[FidelityRecord], field: str) -> dict[tuple[str, str], float]:
    """The mean over blocks of each (text, route) that was measured."""
    values = defaultdict(list)
    for record in records:
        value = getattr(record, field)
        if record.error is None and value is not None:
            values[record.sample_id, record.route].append(value)
    return {key: float(np.mean(found)) for key, found in values.items()}
