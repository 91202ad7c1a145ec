"""From the records of two arms to what the page shows of them: plain values, already counted.

The page shows; it does not judge. Pairs are the records' own keys, derived times the records' own
properties. Lists that could grow without bound are cut here, and say of how many they show how
many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from evalgate.compare import ArmView, views_of_run
from evalgate.records import RequestRecord, Run, SampleRecord, StoredRun
from evalgate.report.words import ARMS, printable, shorten

MAX_POINTS = 400  # for each arm and plot: more only makes one grey band, and a heavy page
MAX_FAILURES = 200
MAX_DIFFERENCES = 12
SHARED_CONTEXT = 120  # characters shown of what two outputs share before they part
SHOWN_CHARACTERS = 600

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """What lies behind a verdict: both arms, wherever each of them was measured."""

    baseline: ArmView
    candidate: ArmView
    title: str = ""

    @classmethod
    def of_run(cls, stored: StoredRun) -> Context:
        """Baseline and candidate of one run. Raises UsageError when it lacks one of them."""
        return cls.of_views(*views_of_run(stored))

    @classmethod
    def of_views(cls, baseline: ArmView, candidate: ArmView) -> Context:
        names = dict.fromkeys((baseline.run.name, candidate.run.name))
        return cls(baseline, candidate, " against ".join(names))

    @property
    def arms(self) -> dict[str, ArmView]:
        return dict(zip(ARMS, (self.baseline, self.candidate), strict=True))


@dataclass(frozen=True)
class Cut(Generic[T]):
    """The part of a list that is shown, and how long the list is."""

    shown: list[T]
    total: int

    @property
    def is_cut(self) -> bool:
        return len(self.shown) < self.total


@dataclass(frozen=True)
class Point:
    """One measured value in seconds, in the launch ``block``; ``title`` names the request."""

    block: int
    value: float
    title: str


@dataclass(frozen=True)
class Step:
    """One request at its place in the order of execution. Times in seconds, None if absent."""

    order: int
    arm: str
    block: int
    bucket: str
    is_warmup: bool
    started_at: str
    ttft_s: float | None
    tpot_s: float | None
    error: str | None
    title: str


@dataclass(frozen=True)
class LengthPoint:
    """``count`` pairs in which the arms gave these numbers of output tokens."""

    baseline: int
    candidate: int
    count: int


@dataclass(frozen=True)
class Difference:
    """Two outputs to one prompt that part after ``n_shared`` characters of equal text."""

    title: str
    n_shared: int
    shared: str
    baseline: str
    candidate: str


@dataclass(frozen=True)
class Outputs:
    """``n_pairs`` pairs have text on both sides; in the ``differing`` ones it is not the same."""

    n_pairs: int
    differing: Cut[Difference]


@dataclass(frozen=True)
class Fact:
    """One field of both arms as text; None where an arm has nothing there."""

    field: str
    baseline: str | None
    candidate: str | None

    @property
    def differs(self) -> bool:
        return self.baseline != self.candidate


@dataclass(frozen=True)
class LaunchRow:
    """What one launch proved about itself, as text."""

    arm: str
    block: int
    cold_start: str
    routes: str
    steps: str
    layers: str
    kv_cache: str
    prefix_cache: str


@dataclass(frozen=True)
class Evidence:
    """Everything that the page shows beside the verdict."""

    latencies: dict[str, dict[str, dict[str, list[Point]]]]  # bucket -> metric -> arm
    steps: list[Step]
    lengths: list[LengthPoint]
    failures: Cut[tuple[str, ...]]
    outputs: list[tuple[str, Outputs]]
    routes: list[Fact]
    launches: list[LaunchRow]
    environment: list[Fact] = field(default_factory=list)


def collect_evidence(context: Context) -> Evidence:
    """Read both arms once and put together what the page shows."""
    return Evidence(
        latencies=_collect_latencies(context),
        steps=_collect_steps(context),
        lengths=_collect_lengths(context),
        failures=_cut(_collect_failures(context), MAX_FAILURES),
        outputs=_collect_outputs(context),
        routes=_collect_routes(context),
        launches=_collect_launches(context),
        environment=_collect_environment(context),
    )


def thin(items: Sequence[T], limit: int, value: Callable[[T], float]) -> list[T]:
    """At most ``limit`` items: the two extremes by ``value`` and an even choice of the rest."""
    if len(items) <= limit:
        return list(items)
    indices = {i * len(items) // (limit - 2) for i in range(limit - 2)}
    indices |= {f(range(len(items)), key=lambda i: value(items[i])) for f in (min, max)}
    return [items[i] for i in sorted(indices)]


def _collect_latencies(context: Context) -> dict[str, dict[str, dict[str, list[Point]]]]:
    found: dict[str, dict[str, dict[str, list[Point]]]] = {
        bucket: {metric: {arm: [] for arm in ARMS} for metric in ("ttft", "tpot")}
        for bucket in _bucket_names(context)
    }
    for arm, view in context.arms.items():
        for r in view.measured:
            for metric, value in (("ttft", r.ttft_s), ("tpot", r.tpot_s)):
                if value is not None:
                    found[r.bucket][metric][arm].append(Point(r.block, value, _name(r)))
    return found


def _collect_steps(context: Context) -> list[Step]:
    tagged = [(arm, r) for arm, view in context.arms.items() for r in view.requests]
    tagged.sort(key=lambda pair: pair[1].started_at)
    return [
        Step(
            order=i,
            arm=arm,
            block=r.block,
            bucket=r.bucket,
            is_warmup=r.phase == "warmup",
            started_at=r.started_at,
            ttft_s=r.ttft_s,
            tpot_s=r.tpot_s,
            error=r.error.category if r.error else None,
            title=f"{arm}, {_name(r)}, {r.phase}, started {r.started_at}",
        )
        for i, (arm, r) in enumerate(tagged, start=1)
    ]


def _collect_lengths(context: Context) -> list[LengthPoint]:
    counts: dict[tuple[int, int], int] = {}
    for base, cand in _request_pairs(context):
        if base.output_tokens is not None and cand.output_tokens is not None:
            key = (base.output_tokens, cand.output_tokens)
            counts[key] = counts.get(key, 0) + 1
    return [LengthPoint(b, c, n) for (b, c), n in sorted(counts.items())]


def _collect_failures(context: Context) -> Iterable[tuple[str, ...]]:
    for arm, view in context.arms.items():
        for r in view.requests:
            if r.error:
                where = f"{r.bucket}, {r.prompt_id}, repetition {r.repetition}, {r.phase}"
                yield _failure(arm, r.block, where, r.started_at, r.error)
        for s in view.samples:
            if s.error:
                yield _failure(arm, s.block, f"{s.task}, {s.sample_id}", "", s.error)


def _failure(arm: str, block: int, where: str, started_at: str, error: Any) -> tuple[str, ...]:
    message = shorten(printable(error.message), 500)
    return (arm, str(block), printable(where), printable(started_at), error.category, message)


def _collect_outputs(context: Context) -> list[tuple[str, Outputs]]:
    load = [
        (_name(base), base.output_text, cand.output_text) for base, cand in _request_pairs(context)
    ]
    candidates = {s.key: s for s in context.candidate.samples}
    tasks = [
        (_name_sample(base, cand), base.output_text, cand.output_text)
        for base in context.baseline.samples
        if (cand := candidates.get(base.key)) is not None
    ]
    named = (("Load", _compare_outputs(load)), ("Tasks", _compare_outputs(tasks)))
    return [(name, outputs) for name, outputs in named if outputs.n_pairs]


def _compare_outputs(pairs: list[tuple[str, str | None, str | None]]) -> Outputs:
    both = [(name, b, c) for name, b, c in pairs if b is not None and c is not None]
    differing = [(name, b, c) for name, b, c in both if b != c]
    shown = [_part(name, b, c) for name, b, c in differing[:MAX_DIFFERENCES]]
    return Outputs(len(both), Cut(shown, len(differing)))


def _part(title: str, base: str, cand: str) -> Difference:
    n = next((i for i, (b, c) in enumerate(zip(base, cand, strict=False)) if b != c), None)
    n = min(len(base), len(cand)) if n is None else n
    start = max(0, n - SHARED_CONTEXT)
    return Difference(
        title=title,
        n_shared=n,
        shared=("… " if start else "") + printable(base[start:n]),
        baseline=shorten(printable(base[n:]), SHOWN_CHARACTERS),
        candidate=shorten(printable(cand[n:]), SHOWN_CHARACTERS),
    )


def _collect_routes(context: Context) -> list[Fact]:
    counts = {arm: view.record.routes for arm, view in context.arms.items()}
    names = dict.fromkeys(name for routes in counts.values() for name in routes or {})
    return [
        Fact(
            printable(name),
            *(
                None if counts[arm] is None else f"{(counts[arm] or {}).get(name, 0):,}"
                for arm in ARMS
            ),
        )
        for name in names
    ]


def _collect_launches(context: Context) -> list[LaunchRow]:
    rows = []
    for arm, view in context.arms.items():
        proofs = {e.block: e for e in view.evidence}
        for launch in view.record.launches:
            if launch.block in view.excluded_blocks:
                continue
            proof = proofs.get(launch.block)
            cold = "–" if launch.cold_start_s is None else f"{launch.cold_start_s:.1f} s"
            rows.append(
                LaunchRow(
                    arm,
                    launch.block,
                    cold,
                    _show(proof and proof.routes),
                    _show(proof and proof.route_steps),
                    _show(proof and proof.layers),
                    _show(proof and proof.kv_cache),
                    _show(proof and proof.prefix_cache),
                )
            )
    return sorted(rows, key=lambda row: (row.block, ARMS.index(row.arm)))


def _collect_environment(context: Context) -> list[Fact]:
    """Every field of both arms, differing ones first; of equal packages only the count is kept."""
    flat = {arm: _flatten_arm(view) for arm, view in context.arms.items()}
    names = dict.fromkeys(name for fields in flat.values() for name in fields)
    facts = [Fact(name, *(flat[arm].get(name) for arm in ARMS)) for name in names]
    differing = [f for f in facts if f.differs]
    equal = [f for f in facts if not f.differs]
    packages = [f for f in equal if f.field.startswith("package ")]
    rest = [f for f in equal if f not in packages]
    if packages:
        shown = ", ".join(f"{f.field.removeprefix('package ')} {f.baseline}" for f in packages)
        rest.append(Fact(f"{len(packages)} equal packages", shown, shown))
    return differing + rest


def describe_other_load(run: Run) -> str | None:
    """What other processes took of the machine while the run was measured; None when unknown."""
    machine = (run.extra or {}).get("machine")
    if not isinstance(machine, dict):
        return None
    mean, most = (machine.get(f"other_cpu_cores_{key}") for key in ("mean", "max"))
    if not all(isinstance(value, int | float) for value in (mean, most)):
        return None
    return f"{mean:.2f} processor cores on average, {most:.2f} at most"


def _flatten_arm(view: ArmView) -> dict[str, str]:
    arm, run = view.record, view.run
    environment = arm.environment
    fields: dict[str, Any] = {
        "spec": run.spec_sha256[:12],
        "evalgate": run.evalgate_version,
        "model": arm.model,
        "server": "attached" if arm.attached else "launched",
        "server version": arm.server_version,
        "KV-cache dtype": arm.kv_cache_dtype,
        "attention backend": arm.attention_backend,
        "other load": describe_other_load(run),
        "command": " ".join(arm.command) if arm.command else None,
        "GPU": ", ".join(environment.gpu) if environment.gpu else None,
        "driver": environment.driver,
        "CPU": environment.cpu,
    }
    fields |= {f"git {k}": v for k, v in (environment.git or {}).items()}
    fields |= {f"env {k}": v for k, v in sorted(arm.env.items())}
    fields |= {f"package {k}": v for k, v in sorted(environment.packages.items())}
    return {
        printable(name): shorten(printable(value), 1000)
        for name, value in fields.items()
        if value is not None
    }


def _request_pairs(context: Context) -> list[tuple[RequestRecord, RequestRecord]]:
    candidates = {r.key: r for r in context.candidate.measured}
    return [
        (base, candidates[base.key]) for base in context.baseline.measured if base.key in candidates
    ]


def _bucket_names(context: Context) -> list[str]:
    """In the spec's order; buckets that only the records know come after."""
    names = {b.name: None for view in context.arms.values() for b in view.buckets}
    names |= {r.bucket: None for view in context.arms.values() for r in view.requests}
    return list(names)


def _name(r: RequestRecord) -> str:
    return printable(f"{r.bucket}, {r.prompt_id}, repetition {r.repetition}, launch {r.block}")


def _name_sample(base: SampleRecord, cand: SampleRecord) -> str:
    scores = " → ".join("no score" if s.score is None else f"{s.score:.2f}" for s in (base, cand))
    return printable(f"{base.task}, {base.sample_id}, launch {base.block}: score {scores}")


def _show(value: Any) -> str:
    if not value:
        return "–"
    if isinstance(value, dict):
        return printable(", ".join(f"{k} {_show_number(v)}" for k, v in value.items()))
    return printable(value)


def _show_number(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:,.0f}" if is_number and float(value).is_integer() else str(value)


def _cut(items: Iterable[T], limit: int) -> Cut[T]:
    everything = list(items)
    return Cut(everything[:limit], len(everything))
