"""Requests by the hundred thousand as arrays: one pass over the records, the rest is NumPy.

Values as they were measured or counted, whether their times can be right, and which requests of two
arms belong together. NaN is absent, as None is in a record. No statistics and no sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import chain
from operator import attrgetter
from typing import Any, Self

import numpy as np

from evalgate.metrics import compute_latencies_s
from evalgate.records import RequestRecord

KEY_FIELDS = ("block", "bucket", "prompt_id", "repetition")
MAX_INT64 = 2**63 - 1


class TimeFault(IntEnum):
    """Why the times of a successful request cannot be right, in order of precedence."""

    NONE = 0
    NO_CHUNK = 1
    NOT_AFTER_SENDING = 2
    BACKWARDS = 3
    NO_TIME = 4
    ENDED_BEFORE = 5


@dataclass(frozen=True)
class Rows:
    """Arrays of one length, a row for each request."""

    def take(self, rows: np.ndarray) -> Self:
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True)
class Columns(Rows):
    """What speed is computed from, absent in failed requests (``compute_latencies_s``)."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2el_s: np.ndarray
    output_tokens: np.ndarray


@dataclass(frozen=True)
class Facts(Rows):
    """What validity is judged by. ``is_cut``: 1 where the output ended by finish_reason "length".

    ``output_tokens`` is the server's count, 0 included; ``time_fault`` a TimeFault.
    """

    failed: np.ndarray
    prompt_tokens: np.ndarray
    cached_tokens: np.ndarray
    output_tokens: np.ndarray
    is_cut: np.ndarray
    time_fault: np.ndarray


def tabulate(records: Sequence[RequestRecord]) -> tuple[Columns, Facts]:
    """The values of ``records``, in their order."""
    times = [r.chunk_ns for r in records]
    counts = np.fromiter(map(len, times), dtype=np.int64, count=len(times))
    chunk_ns = np.frombuffer(b"".join(times), dtype=np.int64)
    ends = np.cumsum(counts)
    some = np.flatnonzero(counts)
    first_ns, last_ns = np.zeros((2, len(counts)), dtype=np.int64)
    first_ns[some], last_ns[some] = chunk_ns[(ends - counts)[some]], chunk_ns[ends[some] - 1]
    facts = Facts(
        failed=np.array([r.error is not None for r in records], dtype=bool),
        prompt_tokens=np.array([r.prompt_tokens for r in records], dtype=float),
        cached_tokens=np.array([r.cached_tokens for r in records], dtype=float),
        output_tokens=np.array([r.output_tokens for r in records], dtype=float),
        is_cut=np.array([is_cut(r.finish_reason) for r in records], dtype=float),
        time_fault=np.zeros(len(counts), dtype=np.int8),
    )
    ends_ns = ((r.end_ns, last) for r, last in zip(records, last_ns.tolist(), strict=True))
    ends_before = np.array([end is not None and end < last for end, last in ends_ns], dtype=bool)
    faults = {
        TimeFault.NO_CHUNK: (counts == 0) & (facts.output_tokens > 0),
        TimeFault.NOT_AFTER_SENDING: (counts > 0) & (first_ns <= 0),
        TimeFault.BACKWARDS: _run_backwards(chunk_ns, ends),
        TimeFault.NO_TIME: (counts > 1) & (first_ns == last_ns),
        TimeFault.ENDED_BEFORE: (counts > 0) & ends_before,
    }
    for fault, where in reversed(faults.items()):
        facts.time_fault[where & ~facts.failed] = fault
    exists = (counts > 0) & ~facts.failed
    tokens = np.where(exists & (facts.output_tokens > 0), facts.output_tokens, np.nan)
    latencies = compute_latencies_s(
        np.where(exists, first_ns, np.nan), np.where(exists, last_ns, np.nan), tokens
    )
    return Columns(*latencies, tokens), facts


def is_cut(finish_reason: str | None) -> bool | None:
    """True of an output that ended at its token limit; None when nobody said why it ended."""
    return None if finish_reason is None else finish_reason == "length"


def _run_backwards(chunk_ns: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Requests in which a chunk is earlier than the one before; ``ends``: where each stops."""
    before = np.flatnonzero(chunk_ns[1:] < chunk_ns[:-1])
    row = np.searchsorted(ends, before, side="right")
    found = np.zeros(len(ends), dtype=bool)
    found[row[before + 1 < ends[row]]] = True  # else the next chunk is another request's
    return found


@dataclass(frozen=True)
class Numbered:
    """Values as numbers: the ``distinct`` ones in order, and each value's ``place`` among them."""

    distinct: list[Any]
    place: np.ndarray

    def find(self, value: Any) -> np.ndarray:
        """Where ``value`` stands, as a mask."""
        known = self.distinct.index(value) if value in self.distinct else -1
        return self.place == known


def number(values: Sequence[Any]) -> Numbered:
    distinct = sorted(set(values))
    places = {value: i for i, value in enumerate(distinct)}
    found = map(places.__getitem__, values)
    return Numbered(distinct, np.fromiter(found, dtype=np.int64, count=len(values)))


def number_together(parts: Sequence[Numbered]) -> list[Numbered]:
    """The same values with numbers that all parts share."""
    distinct = sorted(set(chain.from_iterable(part.distinct for part in parts)))
    places = {value: i for i, value in enumerate(distinct)}
    return [
        Numbered(distinct, np.array([places[v] for v in part.distinct], dtype=int)[part.place])
        for part in parts
    ]


def number_fields(records: Sequence[RequestRecord]) -> dict[str, Numbered]:
    """Each field of the keys of ``records``, numbered, by its name."""
    return {field: number(list(map(attrgetter(field), records))) for field in KEY_FIELDS}


def number_by_appearance(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes numbered anew in order of appearance: where each appears first, and the numbers."""
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    numbers = np.empty(len(order), dtype=int)
    numbers[order] = np.arange(len(order))
    return first[order], numbers[inverse]


@dataclass(frozen=True)
class Keys:
    """Whole keys of several arms' requests as numbers, in the order of the ``n`` keys themselves.

    ``code`` is each request's key, ``fields`` the fields of it, for each arm in turn.
    """

    n: int
    code: list[np.ndarray]
    fields: list[dict[str, Numbered]]


def number_keys(sides: Sequence[Mapping[str, Numbered]]) -> Keys:
    """Number the keys of all sides (``number_fields``) together: equal keys, equal numbers."""
    together = {field: number_together([side[field] for side in sides]) for field in KEY_FIELDS}
    code, size = np.zeros(1, dtype=np.int64), 1
    for parts in together.values():
        n = len(parts[0].distinct)
        if size * n > MAX_INT64:
            kept, code = np.unique(code, return_inverse=True)
            size = len(kept)
        code = code * n + np.concatenate([part.place for part in parts])
        size *= n
    kept, code = np.unique(code, return_inverse=True)
    bounds = np.cumsum([len(part.place) for part in together[KEY_FIELDS[0]]])[:-1]
    fields = [{field: together[field][i] for field in KEY_FIELDS} for i in range(len(sides))]
    return Keys(len(kept), np.split(code, bounds), fields)
