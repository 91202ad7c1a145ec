"""The two sides of a comparison: views of an arm, and records put into pairs.

Pairs are formed by key, whatever the order in the file; what has no partner is counted, never
guessed. The module knows records but neither statistics nor policy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from evalgate.columns import (
    Columns,
    Facts,
    Numbered,
    number_by_appearance,
    number_fields,
    number_keys,
    tabulate,
)
from evalgate.errors import EvidenceError, UsageError
from evalgate.records import (
    BASELINE,
    CANDIDATE,
    Arm,
    FidelityRecord,
    LaunchEvidence,
    RequestRecord,
    Run,
    SampleRecord,
    StoredRun,
)

ONE_ARM = ": one arm has no verdict, compare it with another run by `evalgate compare`"
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
        """What the launches that count proved. Raises EvidenceError when it is damaged."""
        try:
            return [e for e in self.record.evidence if e.block not in self.excluded_blocks]
        except EvidenceError as exc:
            raise EvidenceError(f"{self.title}: run.json: {exc}") from None

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The buckets of the spec, in its order. Raises EvidenceError when one is damaged."""
        try:
            return [_parse_bucket(b) for b in self.load_spec.get("buckets") or []]
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise EvidenceError(
                f"run {self.label}: run.json: spec.load.buckets is damaged ({exc!r}): each bucket "
                "needs name, min_tokens, max_tokens and weight"
            ) from None

    @cached_property
    def measured(self) -> list[RequestRecord]:
        return [r for r in self.requests if r.phase == "measure"]

    @cached_property
    def _table(self) -> tuple[Columns, Facts]:
        return tabulate(self.measured)

    @property
    def columns(self) -> Columns:
        """What speed is computed from, a row for each of ``measured``."""
        return self._table[0]

    @property
    def facts(self) -> Facts:
        """What validity is judged by, a row for each of ``measured``."""
        return self._table[1]

    @cached_property
    def key_fields(self) -> dict[str, Numbered]:
        """The fields of the keys of ``measured`` (``number_fields``)."""
        return number_fields(self.measured)

    @property
    def patch(self) -> str | None:
        return self.arm_spec.get("patch")

    def find_bucket(self, prompt_tokens: int | None) -> str | None:
        """The bucket that a prompt's length falls into, None outside all of them."""
        if prompt_tokens is None:
            return None
        return next((b.name for b in self.buckets if b.holds(prompt_tokens)), None)


def _parse_bucket(bucket: dict[str, Any]) -> Bucket:
    """A bucket of a stored spec. Raises ValueError and others for what is none."""
    weight = float(bucket.get("weight", DEFAULT_WEIGHTS.get(bucket["name"], 1.0)))
    found = Bucket(
        str(bucket["name"]), int(bucket["min_tokens"]), int(bucket["max_tokens"]), weight
    )
    if not (0 < found.min_tokens < found.max_tokens and 0 < weight < math.inf):
        raise ValueError(f"{found}")
    return found


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
            f"{ONE_ARM if len(names) == 1 else ''}"
        )
    if arm not in stored.run.arms:
        raise EvidenceError(
            f"run {stored.label} (status {stored.run.status}) ended before it stored anything of "
            f"arm {arm!r}: run it again, or resume it"
        )
    own = view(stored, BASELINE) if arm != BASELINE and BASELINE in stored.run.arms else None
    excluded = _read_excluded(stored)

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


def _read_excluded(stored: StoredRun) -> frozenset[int]:
    blocks = (stored.run.extra or {}).get("excluded_blocks") or []
    if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
        raise EvidenceError(
            f"run {stored.label}: run.json: extra.excluded_blocks is {blocks!r}, not a list of "
            "blocks: restore run.json, or run again"
        )
    return frozenset(blocks)


def views_of_run(stored: StoredRun) -> tuple[ArmView, ArmView]:
    """Baseline and candidate of one run. Raises UsageError when it lacks one of them."""
    return view(stored, BASELINE), view(stored, CANDIDATE)


@dataclass(frozen=True)
class RequestPairs:
    """Measured requests in pairs. ``bucket`` and ``prompt`` number the pairs' buckets and prompts.

    ``rows`` says where each pair's two requests stand among the measured of ``sides``.
    ``references`` are the two arms' own baselines, request by request, when a ratio of ratios is
    asked for. ``unpaired`` counts, for each arm, requests of blocks that both have without a
    partner; ``dropped_blocks`` are blocks of one arm only.
    """

    sides: tuple[ArmView, ArmView]
    rows: tuple[np.ndarray, np.ndarray]
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
        return len(self.block)

    @property
    def blocks(self) -> list[int]:
        return [int(b) for b in np.unique(self.block)]

    def select(self, wanted: np.ndarray) -> list[tuple[RequestRecord, RequestRecord]]:
        """The records of the pairs where ``wanted`` is true."""
        left, right = (side.measured for side in self.sides)
        rows = (found[wanted].tolist() for found in self.rows)
        return [(left[i], right[j]) for i, j in zip(*rows, strict=True)]

    @cached_property
    def facts(self) -> tuple[Facts, Facts]:
        """What validity is judged by, a row for each pair, of either side."""
        found = [side.facts.take(rows) for side, rows in zip(self.sides, self.rows, strict=True)]
        return found[0], found[1]

    @cached_property
    def same_text(self) -> np.ndarray:
        """1 where both outputs have the same text, 0 where not, NaN where one is unknown."""
        order = np.argsort(self.rows[0])  # as in the file: records lie in memory as they came
        texts = (
            [side.measured[i].output_text for i in rows[order].tolist()]
            for side, rows in zip(self.sides, self.rows, strict=True)
        )
        same = np.empty(len(self))
        same[order] = _find_same_text(*texts)
        return same


def pair_requests(
    baseline: ArmView,
    candidate: ArmView,
    references: tuple[ArmView, ArmView] | None = None,
) -> RequestPairs:
    """Pair measured requests by (block, bucket, prompt_id, repetition).

    Raises EvidenceError when a key occurs twice in an arm: such evidence cannot be paired.
    """
    sides = [baseline, candidate, *(references or ())]
    keys = number_keys([side.key_fields for side in sides])
    places = np.full((len(sides), keys.n), -1)
    for side, place, codes in zip(sides, places, keys.code, strict=True):
        _refuse_twice(side, codes)
        place[codes] = np.arange(len(codes))
    matched = (places >= 0).all(axis=0)
    rows = places[:, matched]
    columns = [side.columns.take(found) for side, found in zip(sides, rows, strict=True)]
    block, bucket, prompt = (keys.fields[0][name] for name in ("block", "bucket", "prompt_id"))
    blocks = [block.place, keys.fields[1]["block"].place]
    common = np.intersect1d(*blocks)
    unpaired = [
        int(np.sum(np.isin(place, common) & ~matched[codes]))
        for place, codes in zip(blocks, keys.code[:2], strict=True)
    ]
    bucket_place, prompt_place = bucket.place[rows[0]], prompt.place[rows[0]]
    first, bucket_number = number_by_appearance(bucket_place)
    _, prompt_number = number_by_appearance(bucket_place * len(prompt.distinct) + prompt_place)
    return RequestPairs(
        sides=(baseline, candidate),
        rows=(rows[0], rows[1]),
        block=np.array([block.distinct[i] for i in block.place[rows[0]].tolist()], dtype=int),
        bucket=bucket_number,
        prompt=prompt_number,
        bucket_names=[bucket.distinct[i] for i in bucket_place[first]],
        baseline=columns[0],
        candidate=columns[1],
        references=(columns[2], columns[3]) if references else None,
        unpaired=(unpaired[0], unpaired[1]),
        dropped_blocks=tuple(block.distinct[i] for i in np.setxor1d(*blocks)),
    )


def _refuse_twice(side: ArmView, codes: np.ndarray) -> None:
    """Each key once in an arm, given by number."""
    twice = np.flatnonzero(np.bincount(codes)[codes] > 1)
    if len(twice):
        raise _two_records(side, "request", side.measured[twice[0]].key)


def _two_records(side: ArmView, noun: str, key: tuple[Any, ...]) -> EvidenceError:
    return EvidenceError(
        f"{side.title}: two {noun} records have the key {key}, so pairs are not defined: the run "
        "was appended to, run it again into a new folder"
    )


@dataclass(frozen=True)
class SamplePairs:
    """Samples in pairs by (block, task, sample_id), failed ones included."""

    pairs: list[tuple[SampleRecord, SampleRecord]]
    unpaired: tuple[int, int]

    def __len__(self) -> int:
        return len(self.pairs)

    @cached_property
    def same_text(self) -> np.ndarray:
        """As of requests."""
        return _find_same_text(
            [a.output_text for a, _ in self.pairs], [b.output_text for _, b in self.pairs]
        )


def pair_samples(baseline: ArmView, candidate: ArmView) -> SamplePairs:
    """Pair samples by (block, task, sample_id).

    Raises EvidenceError when a key occurs twice in an arm.
    """
    left = _index(baseline.samples, baseline)
    right = _index(candidate.samples, candidate)
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


def compute_identical_share(same: np.ndarray) -> float | None:
    """`identical_outputs`: share of pairs with the same output text, from 1, 0 and NaN (one text
    is unknown); None when none is known."""
    known = same[~np.isnan(same)]
    return float(np.mean(known)) if len(known) else None


def _find_same_text(baseline: Sequence[str | None], candidate: Sequence[str | None]) -> np.ndarray:
    same = np.fromiter(map(operator.eq, baseline, candidate), dtype=float, count=len(baseline))
    for texts in (baseline, candidate):
        same[[text is None for text in texts]] = np.nan
    return same


def _index(samples: Sequence[SampleRecord], side: ArmView) -> dict[tuple[int, str, str], int]:
    """Where in ``samples`` each key stands."""
    keys = [sample.key for sample in samples]
    index = {key: i for i, key in enumerate(keys)}
    if len(index) < len(keys):
        twice = next(key for i, key in enumerate(keys) if index[key] != i)
        raise _two_records(side, "sample", twice)
    return index
