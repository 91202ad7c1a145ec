"""The stored records of a run, and how text becomes a record and back. No file is opened here.

Version history of the format (``SCHEMA_VERSION``):

1  2026-11  first: run.json, requests.jsonl, samples.jsonl, fidelity.jsonl
"""

from __future__ import annotations

import functools
import json
import math
from array import array
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from evalgate.errors import EvidenceError
from evalgate.metrics import compute_e2el_s, compute_tpot_s, compute_ttft_s
from evalgate.validation import STRICT, build_model, describe_validation_error

SCHEMA_VERSION = 1

# The arms of a verdict, and of every spec that names more than one.
BASELINE = "baseline"
CANDIDATE = "candidate"

RUN_FILE = "run.json"
REQUESTS_FILE = "requests.jsonl"
SAMPLES_FILE = "samples.jsonl"
FIDELITY_FILE = "fidelity.jsonl"

Extra = dict[str, Any]
# What both libraries must know stands twice: msgspec reads ``Meta``, pydantic the rest.
Count = Annotated[int, Field(ge=0), Meta(ge=0)]
Share = Annotated[float, Field(ge=0, le=1), Meta(ge=0, le=1)]


def _check_times(times: list[int]) -> list[int]:
    try:
        array("q", times)
    except OverflowError:
        raise ValueError("a time beyond 292 years is none: the file is damaged") from None
    return times


Times = Annotated[list[int], AfterValidator(_check_times)]
ErrorCategory = Literal[
    "timeout", "connect", "http", "context_overflow", "stream_error", "truncated", "server_died"
]


class Record(BaseModel):
    """A part of run.json. Keys are exact: an unknown one is refused by name. Every number is
    finite."""

    model_config = STRICT


class LineRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A record that is stored one a line, as strict as ``Record`` when it is read or written.

    A run holds a hundred thousand of them: as structs they are read five times faster than
    pydantic's models and take a third of the memory. (Made in memory, they are not checked until
    they are written.)
    """


class RequestError(LineRecord):
    category: ErrorCategory
    message: str


class TaskError(LineRecord):
    """Why a sample has no score: a request's category, or ``scoring`` (ours, never scored 0)."""

    category: ErrorCategory | Literal["scoring"]
    message: str


class RequestRecord(LineRecord):
    """One streamed request. ``chunk_ns`` and ``end_ns`` count from the sending of the request."""

    arm: str
    block: Count
    bucket: str
    prompt_id: str
    repetition: Count
    phase: Literal["warmup", "measure"]
    started_at: str
    prompt_tokens: Count | None
    output_tokens: Count | None
    cached_tokens: Count | None
    chunk_ns: Times
    end_ns: int | None
    finish_reason: str | None
    output_sha256: str | None
    output_text: str | None
    error: RequestError | None
    extra: Extra | None = None

    def __post_init__(self) -> None:
        # Eight bytes a time instead of forty: a long run holds millions of them.
        force_setattr(self, "chunk_ns", array("q", self.chunk_ns))

    @property
    def key(self) -> tuple[int, str, str, int]:
        return (self.block, self.bucket, self.prompt_id, self.repetition)

    @property
    def ttft_s(self) -> float | None:
        return None if self.error else compute_ttft_s(self.chunk_ns)

    @property
    def tpot_s(self) -> float | None:
        return None if self.error else compute_tpot_s(self.chunk_ns, self.output_tokens)

    @property
    def e2el_s(self) -> float | None:
        return None if self.error else compute_e2el_s(self.chunk_ns)


class SampleRecord(LineRecord):
    """One task item answered by one arm. ``score`` is 0 to 1, None when it could not be scored."""

    arm: str
    block: Count
    task: str
    task_version: int
    sample_id: str
    prompt_sha256: str
    prompt_tokens: Count | None
    output_text: str | None
    output_tokens: Count | None
    finish_reason: str | None
    prediction: str | None
    references: list[str]
    score: Share | None
    flags: list[str]
    error: TaskError | None
    extra: Extra | None = None

    @property
    def key(self) -> tuple[int, str, str]:
        return (self.block, self.task, self.sample_id)


class FidelityRecord(LineRecord):
    """One text teacher-forced through one route in one arm, against the baseline's own output.

    Gaps are |log p(arm) - log p(baseline)| of the forced token, in nats, over ``positions``
    positions; ``top1_agreement`` is the share of positions whose most likely token is the
    baseline's; ``first_divergence`` the first position where it is not, with the baseline's margin
    between its two best tokens there (small: a near tie).
    """

    arm: str
    block: Count
    sample_id: str
    route: str
    prompt_tokens: Count
    positions: Count
    mean_gap: float | None
    p99_gap: float | None
    worst_gap: float | None
    top1_agreement: float | None
    first_divergence: int | None
    margin_at_divergence: float | None
    error: TaskError | None
    extra: Extra | None = None

    @property
    def key(self) -> tuple[int, str, str]:
        return (self.block, self.sample_id, self.route)


class Launch(Record):
    block: Count
    started_at: str
    cold_start_s: float | None
    log: str | None


class Environment(Record):
    """Where an arm ran. ``gpu``, ``driver`` and ``git`` are None where there is none."""

    gpu: list[str] | None
    driver: str | None
    cpu: str | None
    packages: dict[str, str]
    git: dict[str, Any] | None


def compare_environments(a: Environment, b: Environment) -> dict[str, tuple[Any, Any]]:
    """The fields in which two environments differ, with both values: None is unknown or absent.

    Fields are ``gpu``, ``driver``, ``cpu``, ``packages.NAME`` and ``git``, in this order.
    """
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in ("gpu", "driver", "cpu")}
    for name in sorted(a.packages.keys() | b.packages.keys()):
        pairs[f"packages.{name}"] = (a.packages.get(name), b.packages.get(name))
    pairs["git"] = (a.git, b.git)
    return {field: (x, y) for field, (x, y) in pairs.items() if x != y}


class LaunchEvidence(Record):
    """What one launch proved about itself; kept as a list in ``arms.NAME.extra["evidence"]``.

    routes         kernel launches by route counted from readiness to the end of the launch
    route_steps    engine steps by route, counted apart from the launches
    per_layer      launches of each layer, by route; a route without any is left out
    layers         attention layers of all pipeline stages
    expected_steps steps that the client's own requests need, by route (None: cannot be known)
    kv_cache       what the live worker reports of its pages: dtype, bytes_per_token_per_layer, ...
    prefix_cache   {"queries", "hits"} over the measured load phase, from /metrics
    canary         {"prompt_sha256", "cold_text", "warm_text"}: first answer after start, and later
    """

    block: Count
    routes: dict[str, int] | None = None
    route_steps: dict[str, int] | None = None
    per_layer: dict[str, list[int]] | None = None
    layers: int | None = None
    expected_steps: dict[str, int] | None = None
    kv_cache: dict[str, Any] | None = None
    prefix_cache: dict[str, float] | None = None
    canary: dict[str, Any] | None = None
    patch: dict[str, Any] | None = None


class Arm(Record):
    attached: bool
    command: list[str] | None
    env: dict[str, str]
    environment: Environment
    server_version: str | None
    model: str | None
    kv_cache_dtype: str | None
    attention_backend: str | None
    launches: list[Launch]
    routes: dict[str, int] | None
    extra: Extra | None = None

    @property
    def evidence(self) -> list[LaunchEvidence]:
        """Launch evidence, oldest first; empty for a run that stored none."""
        items = (self.extra or {}).get("evidence", [])
        if not isinstance(items, list):
            raise EvidenceError(f"arms.*.extra.evidence is {items!r}, not a list of launches")
        return [parse_record(LaunchEvidence, item, "arms.*.extra.evidence") for item in items]


class Run(Record):
    """run.json. ``spec`` is the spec as resolved; ``spec_sha256`` is of its canonical JSON."""

    schema_version: Literal[1]
    run_id: str
    name: str
    status: Literal["started", "complete", "failed"]
    started_at: str
    finished_at: str | None
    spec: dict[str, Any]
    spec_sha256: str
    evalgate_version: str
    arms: dict[str, Arm]
    extra: Extra | None = None


@dataclass(frozen=True)
class StoredRun:
    """One run as it lies on disk, records in file order. ``label`` is how messages name it."""

    label: str
    run: Run
    requests: list[RequestRecord] = field(default_factory=list)
    samples: list[SampleRecord] = field(default_factory=list)
    fidelity: list[FidelityRecord] = field(default_factory=list)


R = TypeVar("R", bound=Record | LineRecord)
L = TypeVar("L", bound=LineRecord)

# What a decoder raises of a line: not JSON or not ours, not UTF-8 (before msgspec 0.20), nested too
# deeply, a time beyond all times.
REFUSALS = (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError)


def parse_record(kind: type[R], data: Any, where: str) -> R:
    """Turn decoded JSON into a record.

    Raises EvidenceError naming ``where``, the key and the value; a misspelt key is named with the
    nearest right one, and a foreign schema version by its number.
    """
    if kind is Run and isinstance(data, dict):
        _check_schema_version(data, where)
    model = kind if issubclass(kind, Record) else build_model(kind)
    try:
        checked = model.model_validate(data)
    except ValidationError as exc:
        raise EvidenceError(f"{where}: {describe_validation_error(exc, model)}") from None
    if isinstance(checked, kind):
        return checked
    return msgspec.convert(checked.model_dump(), kind)


@functools.cache
def find_decoder(kind: type[L]) -> msgspec.json.Decoder[L]:
    """Reads sound lines in one step, and raises one of REFUSALS of others.

    What it refuses goes the long way round, by ``parse_line``: that finds the words for it, or
    takes the line after all.
    """
    return msgspec.json.Decoder(kind)


def parse_line(kind: type[L], line: bytes, where: str) -> L:
    """One stored line as a record. Raises EvidenceError: place, key and value."""
    return parse_record(kind, parse_bytes(line, where), where)


def parse_bytes(raw: bytes, where: str) -> Any:
    """Decode JSON in UTF-8, as ``parse_json`` does."""
    try:
        return parse_json(raw.decode("utf-8"), where)
    except UnicodeDecodeError as exc:
        raise EvidenceError(f"{where}: not UTF-8 ({exc.reason} at byte {exc.start})") from None
    except RecursionError:
        raise EvidenceError(f"{where}: nested too deeply to be ours") from None


def parse_json(text: str, where: str) -> Any:
    """Decode JSON; NaN and infinity are refused, as they may never enter a record."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as exc:
        raise EvidenceError(f"{where}: not JSON ({exc}); the file is damaged or not ours") from None


def render_record(record: Record | LineRecord) -> str:
    """One line of JSON without the line end; ``extra`` is left out when there is none.

    A record that could not be read back is not written: msgspec.ValidationError, a fault of ours.
    """
    if isinstance(record, LineRecord):
        data = msgspec.to_builtins(record, enc_hook=list)  # packed times
        msgspec.convert(data, type(record))
    else:
        data = record.model_dump(mode="json")
    if data.get("extra") is None:
        data.pop("extra", None)
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def compute_canonical_json(data: Any) -> str:
    """JSON with sorted keys and no spaces, what digests are taken of."""
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def _check_schema_version(data: dict[str, Any], where: str) -> None:
    version = data.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise EvidenceError(
            f"{where}: schema_version is {version!r}; this evalgate reads version "
            f"{SCHEMA_VERSION}: use the evalgate that wrote it, or run again"
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed in a record")


def is_finite(value: float | None) -> bool:
    """True for a number that can be judged: present, not NaN, not infinite."""
    return value is not None and math.isfinite(value)
