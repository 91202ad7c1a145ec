"""The two sides of a comparison: views of an arm, and records put into pairs.

Pairs are formed by key, whatever the order in the file; what has no partner is counted, never
guessed. The module knows records but neither statistics nor policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from evalgate.errors import EvidenceError, UsageError
from evalgate.metrics import compute_latencies_s
from evalgate.records import (
    Arm,
    FidelityRecord,
    LaunchEvidence,
    RequestRecord,
    Run,
    SampleRecord,
    StoredRun,
)

BASELINE = "baseline"
CANDIDATE = "candidate"
DEFAULT_WEIGHTS = {"4K-8K": 0.20, "8K-16K": 0.50, "16K-32K": 0.30}  # where a spec names none


@dataclass(frozen=True)
class Bucket:
    """Prompts of min_tokens <= length < max_tokens, and their weight in weighted figures."""

    name: str
    min_tokens: int
    max_tokens: int
    weight: float

    def holds(self, prompt_tokens: int) -> bool:
        return self.min_tokens <= prompt_tokens < self.max_tokens


@dataclass(frozen=True)
class ArmView:
    """The records of one arm of one run, without the blocks that the run itself excluded.

    ``own_baseline`` is the baseline arm of the same run, where there is one; for that arm it is
    None.
    """

    label: str
    arm: str
    run: Run
    requests: list[RequestRecord]
    samples: list[SampleRecord]
    fidelity: list[FidelityRecord]
    excluded_blocks: frozenset[int]
    own_baseline: ArmView | None = None

    @property
    def title(self) -> str:
        return f"run {self.label}, arm {self.arm}"

    @property
    def record(self) -> Arm:
        return self.run.arms[self.arm]

    @property
    def arm_spec(self) -> dict[str, Any]:
        """What the stored spec says of this arm; empty when it says nothing."""
        return (self.run.spec.get("arms") or {}).get(self.arm) or {}

    @property
    def load_spec(self) -> dict[str, Any]:
        return self.run.spec.get("load") or {}

    @property
    def task_specs(self) -> dict[str, Any]:
        return self.run.spec.get("tasks") or {}

    @cached_property
    def evidence(self) -> list[LaunchEvidence]:
        return [e for e in self.record.evidence if e.block not in self.excluded_blocks]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The buckets of the spec, in its order. Raises EvidenceError when one is damaged."""
        try:
            return [
                Bucket(
                    str(b["name"]),
                    int(b["min_tokens"]),
                    int(b["max_tokens"]),
                    float(b.get("weight", DEFAULT_WEIGHTS.get(b["name"], 1.0))),
                )
                for b in self.load_spec.get("buckets") or []
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise EvidenceError(
                f"run {self.label}: run.json: spec.load.buckets is damaged ({exc!r}): each bucket "
                "needs name, min_tokens, max_tokens and weight"
            ) from None

    @cached_property
    def measured(self) -> list[RequestRecord]:
        return [r for r in self.requests if r.phase == "measure"]

    @cached_property
    def columns(self) -> Columns:
        """The values of ``measured``, in its order."""
        return _build_columns(self.measured)

    @property
    def patch(self) -> str | None:
        return self.arm_spec.get("patch")

    def find_bucket(self, prompt_tokens: int | None) -> str | None:
        """The bucket that a prompt's length falls into, None outside all of them."""
        if prompt_tokens is None:
            return None
        return next((b.name for b in self.buckets if b.holds(prompt_tokens)), None)


def view(stored: StoredRun, arm: str | None = None) -> ArmView:
    """One arm of a stored run; without a name, the only one that the run has.

    Raises UsageError when the run has no such arm, or several and none was named.
    """
    names = sorted(set(stored.run.arms) | set(stored.run.spec.get("arms") or {}))
    if arm is None:
        if len(names) != 1:
            raise UsageError(
                f"run {stored.label} has the arms {', '.join(names) or 'none'}: name one, as in "
                f"DIR:{names[0] if names else BASELINE}"
            )
        arm = names[0]
    if arm not in names:
        raise UsageError(
            f"run {stored.label} has no arm {arm!r}; it has {', '.join(names) or 'none'}"
        )
    if arm not in stored.run.arms:
        raise EvidenceError(
            f"run {stored.label} (status {stored.run.status}) ended before it stored anything of "
            f"arm {arm!r}: run it again, or resume it"
        )
    own = view(stored, BASELINE) if arm != BASELINE and BASELINE in stored.run.arms else None
    excluded = frozenset((stored.run.extra or {}).get("excluded_blocks") or ())

    def select(records: Iterable[AnyRecord]) -> list[AnyRecord]:
        return [r for r in records if r.arm == arm and r.block not in excluded]

    return ArmView(
        label=stored.label,
        arm=arm,
        run=stored.run,
        requests=select(stored.requests),
        samples=select(stored.samples),
        fidelity=select(stored.fidelity),
        excluded_blocks=excluded,
        own_baseline=own,
    )


AnyRecord = TypeVar("AnyRecord", RequestRecord, SampleRecord, FidelityRecord)


def views_of_run(stored: StoredRun) -> tuple[ArmView, ArmView]:
    """Baseline and candidate of one run. Raises UsageError when it lacks one of them."""
    return view(stored, BASELINE), view(stored, CANDIDATE)


@dataclass(frozen=True)
class Columns:
    """Values of requests as arrays; NaN where a value does not exist (``compute_latencies_s``)."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2el_s: np.ndarray
    output_tokens: np.ndarray

    def take(self, rows: np.ndarray) -> Columns:
        return Columns(
            self.ttft_s[rows], self.tpot_s[rows], self.e2el_s[rows], self.output_tokens[rows]
        )


@dataclass(frozen=True)
class RequestPairs:
    """Measured requests in pairs. ``bucket`` and ``prompt`` number the pairs' buckets and prompts.

    ``references`` are the two arms' own baselines, request by request, when a ratio of ratios is
    asked for. ``unpaired`` counts, for each arm, requests of blocks that both have without a
    partner; ``dropped_blocks`` are blocks of one arm only.
    """

    pairs: list[tuple[RequestRecord, RequestRecord]]
    block: np.ndarray
    bucket: np.ndarray
    prompt: np.ndarray
    bucket_names: list[str]
    baseline: Columns
    candidate: Columns
    references: tuple[Columns, Columns] | None
    unpaired: tuple[int, int]
    dropped_blocks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def blocks(self) -> list[int]:
        return [int(b) for b in np.unique(self.block)]


def pair_requests(
    baseline: ArmView,
    candidate: ArmView,
    references: tuple[ArmView, ArmView] | None = None,
) -> RequestPairs:
    """Pair measured requests by (block, bucket, prompt_id, repetition).

    Raises EvidenceError when a key occurs twice in an arm: such evidence cannot be paired.
    """
    sides = [baseline, candidate, *(references or ())]
    indexes = [_index(side.measured, side, "request") for side in sides]
    keys = sorted(indexes[0].keys() & indexes[1].keys())
    for index in indexes[2:]:
        keys = [k for k in keys if k in index]
    common = {k[0] for k in indexes[0]} & {k[0] for k in indexes[1]}
    every = {k[0] for k in indexes[0]} | {k[0] for k in indexes[1]}
    matched = set(keys)
    unpaired = [sum(k[0] in common and k not in matched for k in index) for index in indexes[:2]]
    rows = [np.array([index[k] for k in keys], dtype=int) for index in indexes]
    columns = [side.columns.take(found) for side, found in zip(sides, rows, strict=True)]
    bucket_names, bucket = _number([k[1] for k in keys])
    _, prompt = _number([(k[1], k[2]) for k in keys])
    left, right = baseline.measured, candidate.measured
    return RequestPairs(
        pairs=[(left[i], right[j]) for i, j in zip(*rows[:2], strict=True)],
        block=np.array([k[0] for k in keys], dtype=int),
        bucket=bucket,
        prompt=prompt,
        bucket_names=bucket_names,
        baseline=columns[0],
        candidate=columns[1],
        references=(columns[2], columns[3]) if references else None,
        unpaired=(unpaired[0], unpaired[1]),
        dropped_blocks=tuple(sorted(every - common)),
    )


@dataclass(frozen=True)
class SamplePairs:
    """Samples in pairs by (block, task, sample_id), failed ones included."""

    pairs: list[tuple[SampleRecord, SampleRecord]]
    unpaired: tuple[int, int]

    def __len__(self) -> int:
        return len(self.pairs)


def pair_samples(baseline: ArmView, candidate: ArmView) -> SamplePairs:
    """Pair samples by (block, task, sample_id).

    Raises EvidenceError when a key occurs twice in an arm.
    """
    left = _index(baseline.samples, baseline, "sample")
    right = _index(candidate.samples, candidate, "sample")
    common = {k[0] for k in left} & {k[0] for k in right}
    keys = sorted(left.keys() & right.keys())
    unpaired = [
        sum(k[0] in common and k not in other for k in side)
        for side, other in ((left, right), (right, left))
    ]
    pairs = [(baseline.samples[left[k]], candidate.samples[right[k]]) for k in keys]
    return SamplePairs(pairs, (unpaired[0], unpaired[1]))


def find_common_baseline(baseline: ArmView, candidate: ArmView) -> tuple[ArmView, ArmView] | None:
    """The two runs' own baseline arms when both hold the same build there, else None.

    The side that is itself its run's baseline arm stands for its own reference.
    """
    if baseline.run.run_id == candidate.run.run_id:
        return None
    own = tuple(v if v.arm == BASELINE else v.own_baseline for v in (baseline, candidate))
    if own[0] is None or own[1] is None or own[1] is candidate:
        return None
    return (own[0], own[1]) if _identify_build(own[0]) == _identify_build(own[1]) else None


def _identify_build(side: ArmView) -> tuple[Any, ...]:
    record = side.record
    # The project's own version and commit make no difference to an arm that runs without the patch.
    own = () if side.patch else ("evalgate", "kernels_patch", "kernels-patch")
    packages = {k: v for k, v in record.environment.packages.items() if k not in own}
    return (
        record.model,
        record.server_version,
        record.kv_cache_dtype,
        record.attention_backend,
        record.env,
        packages,
        side.arm_spec.get("args"),
        side.patch,
        record.environment.git if side.patch else None,
    )


def compute_identical_share(
    pairs: Iterable[tuple[RequestRecord | SampleRecord, RequestRecord | SampleRecord]],
) -> float | None:
    """`identical_outputs`: share of pairs with the same output text; None when none is known."""
    same = [
        a.output_text == b.output_text
        for a, b in pairs
        if a.output_text is not None and b.output_text is not None
    ]
    return sum(same) / len(same) if same else None


def _index(records: Sequence[Any], side: ArmView, noun: str) -> dict[Any, int]:
    """Where in ``records`` each key stands."""
    keys = [record.key for record in records]
    index = {key: i for i, key in enumerate(keys)}
    if len(index) < len(keys):
        twice = next(key for i, key in enumerate(keys) if index[key] != i)
        raise EvidenceError(
            f"{side.title}: two {noun} records have the key {twice}, so pairs are not "
            "defined: the run was appended to, run it again into a new folder"
        )
    return index


def _build_columns(records: Sequence[RequestRecord]) -> Columns:
    absent = (np.nan, np.nan, np.nan)
    raw = [
        (r.chunk_ns[0], r.chunk_ns[-1], r.output_tokens) if r.chunk_ns and not r.error else absent
        for r in records
    ]
    first_ns, last_ns, tokens = np.array(raw, dtype=float).reshape(-1, 3).T
    tokens = np.where(tokens > 0, tokens, np.nan)
    return Columns(*compute_latencies_s(first_ns, last_ns, tokens), tokens)


def _number(values: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """Distinct values in order of appearance, and each value's number."""
    numbers: dict[Any, int] = {}
    codes = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(codes, dtype=int)
