"""How much an attention kernel can gain end to end: its share of kernel time, and Amdahl's bound.

Reads the text of a profile (a torch-profiler/Kineto trace as JSON, or kernel times of rocprof or
hipprof as CSV) and gives numbers; opens no file. A measured gain above the bound is no proof of a
fast kernel but of something else that changed.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evalgate.errors import EvidenceError, UsageError

# Names that attention kernels carry in vLLM's backends. Writing the cache (reshape_and_cache) and
# the projections around attention are not attention.
ATTENTION = (
    r"attention|attn|fmha|flash_?(fwd|infer|mla)|paged_?kv|prefix_prefill|"
    r"batch(prefill|decode)with|kernels_patch"
)
NOT_ATTENTION = r"reshape_and_cache|concat_and_cache|copy_blocks|_proj"

# Columns of the CSV forms, in lower case without "_": name, duration (with its unit in ns), or
# start and end.
NAME_COLUMNS = ("name", "kernelname")
TOTAL_COLUMNS = {"totaldurationns": 1.0, "totalduration(ns)": 1.0, "durationns": 1.0}
SPAN_COLUMNS = (("starttimestamp", "endtimestamp"), ("beginns", "endns"))
CALL_COLUMNS = ("calls", "count")


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel: time in microseconds, number of launches."""

    name: str
    total_us: float
    calls: int


@dataclass(frozen=True)
class AttentionShare:
    """Attention's part of the time in kernels, 0 to 1, and the kernels that were counted as it."""

    attention_us: float
    total_us: float
    kernels: tuple[KernelTime, ...]

    @property
    def share(self) -> float:
        return self.attention_us / self.total_us


@dataclass(frozen=True)
class Bound:
    """Measured gain beside the largest possible one, both in percent of throughput.

    ``is_suspicious``: even the measured gain's lower 95 % bound lies above what is possible.
    """

    share: float
    possible_percent: float
    measured_percent: float | None
    is_suspicious: bool

    def describe(self) -> str:
        text = (
            f"attention is {100 * self.share:.3f} % of kernel time, so at most "
            f"{self.possible_percent:+.2f} % end to end"
        )
        if self.measured_percent is None:
            return text
        text += f"; measured {self.measured_percent:+.2f} %"
        if self.is_suspicious:
            text += (
                ", more than attention can give: look for what else differs between the arms "
                "(output lengths, flags, other kernels) or profile the load that was measured"
            )
        return text


def compute_gain_percent(parts: Iterable[tuple[float, float]]) -> float:
    """Amdahl's law: throughput gained, in percent, when parts of the time get faster.

    ``parts``: (share of the time, 0 to 1; speed-up, infinite for a part that vanishes). The gain is
    1 / (1 - sum(share * (1 - 1/speedup))) - 1. Raises ValueError for shares that are no shares.
    """
    known = list(parts)
    if any(not 0 <= share <= 1 for share, _ in known) or sum(s for s, _ in known) > 1:
        raise ValueError(f"shares {[s for s, _ in known]} are not parts of one whole")
    if any(not speedup > 0 for _, speedup in known):
        raise ValueError(f"speed-ups {[s for _, s in known]} must be above 0")
    saved = sum(share * (1 - 1 / speedup) for share, speedup in known)
    return math.inf if saved >= 1 else 100 * (1 / (1 - saved) - 1)


def compute_bound(
    share: AttentionShare,
    *,
    speedup: float = math.inf,
    measured_percent: float | None = None,
    measured_low: float | None = None,
) -> Bound:
    """The bound for a profile beside a measured gain in percent and its lower 95 % bound."""
    possible = compute_gain_percent([(share.share, speedup)])
    low = measured_percent if measured_low is None else measured_low
    return Bound(share.share, possible, measured_percent, low is not None and low > possible)


def compute_attention_share(
    kernels: Sequence[KernelTime], pattern: str = ATTENTION, where: str = "profile"
) -> AttentionShare:
    """Attention's share of all kernel time, by the kernels' names.

    Raises EvidenceError when no time was spent or no kernel looks like attention (a share of zero
    would make every gain suspicious), UsageError for a pattern that is no regular expression.
    """
    try:
        wanted, unwanted = re.compile(pattern, re.I), re.compile(NOT_ATTENTION, re.I)
    except re.error as exc:
        raise UsageError(f"pattern {pattern!r} is no regular expression: {exc}") from None
    total = sum(k.total_us for k in kernels)
    chosen = [k for k in kernels if wanted.search(k.name) and not unwanted.search(k.name)]
    if total <= 0 or not chosen:
        raise EvidenceError(
            f"{where}: none of {len(kernels)} kernels looks like attention ({pattern}): profile "
            "the server's worker while it serves, or give a pattern for the kernel's name"
        )
    chosen.sort(key=lambda k: -k.total_us)
    return AttentionShare(sum(k.total_us for k in chosen), total, tuple(chosen))


def parse_profile(text: str, where: str) -> list[KernelTime]:
    """Kernel times from a Kineto trace (JSON) or a rocprof/hipprof table (CSV), longest first.

    Raises EvidenceError: not a profile, a column that is missing, a duration that is no number.
    """
    start = text.lstrip("\ufeff \t\r\n")[:1]
    times = _parse_trace(text, where) if start in ("{", "[") else _parse_csv(text, where)
    merged: dict[str, tuple[float, int]] = {}
    try:
        for name, us, calls in times:
            total, n = merged.get(name, (0.0, 0))
            merged[name] = (total + us, n + calls)
    except csv.Error as exc:
        raise EvidenceError(f"{where}: not a table ({exc}): name the profiler's own file") from None
    if not merged:
        raise EvidenceError(
            f"{where}: no kernel times inside: record a trace of the worker with kernels in it"
        )
    kernels = [KernelTime(name, us, n) for name, (us, n) in merged.items()]
    return sorted(kernels, key=lambda k: -k.total_us)


def _parse_trace(text: str, where: str) -> Iterator[tuple[str, float, int]]:
    """GPU kernels; in a trace of a CPU run, which has none, operators by their own time."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise EvidenceError(f"{where}: not JSON ({exc}): is the trace cut off?") from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise EvidenceError(f"{where}: no list traceEvents, so this is no profiler trace")
    spans = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e]
    kernels = [e for e in spans if e.get("cat") == "kernel"]
    if kernels:
        for event in kernels:
            yield str(event.get("name")), _read_number(event["dur"], where, "dur"), 1
        return
    yield from _compute_own_times([e for e in spans if e.get("cat") == "cpu_op"], where)


def _compute_own_times(
    operators: list[dict[str, Any]], where: str
) -> Iterator[tuple[str, float, int]]:
    """Operators nest within a thread: each counts only the time that none inside it counts."""
    threads: dict[Any, list[tuple[float, float, str]]] = {}
    for event in operators:
        start = _read_number(event.get("ts"), where, "ts")
        end = start + _read_number(event["dur"], where, "dur")
        key = (event.get("pid"), event.get("tid"))
        threads.setdefault(key, []).append((start, end, str(event.get("name"))))
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        own = [end - start for start, end, _ in spans]
        outer: list[int] = []
        for i, (start, end, _) in enumerate(spans):
            while outer and spans[outer[-1]][1] <= start:
                outer.pop()
            if outer:
                own[outer[-1]] -= min(end, spans[outer[-1]][1]) - start
            outer.append(i)
        for (_, _, name), us in zip(spans, own, strict=True):
            yield name, max(us, 0.0), 1


def _parse_csv(text: str, where: str) -> Iterator[tuple[str, float, int]]:
    rows = csv.DictReader(io.StringIO(text.lstrip("\ufeff")), skipinitialspace=True)
    heads = {_plain(head): head for head in rows.fieldnames or []}
    name = next((heads[c] for c in NAME_COLUMNS if c in heads), None)
    total = next(((heads[c], f) for c, f in TOTAL_COLUMNS.items() if c in heads), None)
    span = next(((heads[a], heads[b]) for a, b in SPAN_COLUMNS if {a, b} <= heads.keys()), None)
    calls = next((heads[c] for c in CALL_COLUMNS if c in heads), None)
    if name is None or (total is None and span is None):
        raise EvidenceError(
            f"{where}: columns are {', '.join(rows.fieldnames or []) or 'none'}: wanted a kernel "
            "name and TotalDurationNs, DurationNs, or start and end (rocprof --stats, hipprof)"
        )
    for row in rows:
        if total is not None:
            ns = _read_cell(row, total[0], where) * total[1]
        else:
            assert span is not None
            ns = _read_cell(row, span[1], where) - _read_cell(row, span[0], where)
        n = int(_read_cell(row, calls, where)) if calls and total else 1
        yield str(row[name]), ns / 1e3, n


def _read_cell(row: Mapping[str, Any], column: str, where: str) -> float:
    return _read_number(row[column], where, column)


def _read_number(value: Any, where: str, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise EvidenceError(f"{where}: {what} is {value!r}, not a time: the profile is damaged")
    return number


def _plain(head: str) -> str:
    return head.strip().lower().replace("_", "").replace(" ", "")
