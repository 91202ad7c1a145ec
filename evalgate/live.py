"""One arm while it serves: launch or attach, the evidence it gives, and its requests as records.

Stands between the server's edges (``server``, ``client``) and the order of a run (``run``). Knows
what one arm does, not which arm is asked next, and judges nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from evalgate.arguments import count_workers
from evalgate.client import Client, NotSupportedError
from evalgate.environment import read_environment
from evalgate.errors import EvidenceError, ServerAnswerError, ServerDiedError
from evalgate.generation import Generation
from evalgate.load import LoadPrompt, compute_cache_salt, compute_nonce
from evalgate.records import (
    Arm,
    Environment,
    Launch,
    LaunchEvidence,
    RequestError,
    RequestRecord,
    SampleRecord,
    TaskError,
)
from evalgate.replay import build_launch_additions
from evalgate.routes import compute_expected_steps
from evalgate.server import LaunchPlan, Server
from evalgate.sizing import UsageTokenizer
from evalgate.spec import PATCHES, ArmSpec, Spec, parse_batched_tokens
from evalgate.tasks import Item, Tokenizer, score_item
from evalgate.workers import merge_reports

CANARY_PROMPT = "Name the planets of the solar system in order, starting from the sun."
CANARY_TOKENS = 16
RPC_TIMEOUT_S = 60.0
Phase = Literal["warmup", "measure"]

# vLLM's word for a quantised cache whose checkpoint brings no scales: steps of 1.0 for any keys.
UNIT_SCALES_IN_LOG = "KV cache scaling factor 1.0"
BACKEND_IN_LOG = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend")


@dataclass
class LiveArm:
    """An arm of the run in progress; what it proved so far is in ``evidence`` and ``launches``."""

    name: str
    spec: Spec
    arm: ArmSpec
    model_path: str | None
    python: str
    log_path: Callable[[str, int], Path]
    run_id: str
    launches: list[Launch] = field(default_factory=list)
    evidence: list[LaunchEvidence] = field(default_factory=list)
    environment: Environment | None = None
    server_version: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    max_model_len: int | None = None
    command: list[str] | None = None
    env: dict[str, str] = field(default_factory=dict)
    as_messages: bool = False
    server: Server | None = None
    _client: Client | None = None
    _block: int = 0
    _expected: Counter[str] | None = None
    _reports: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    _prefix_cache: dict[str, Any] = field(default_factory=dict)
    _canary: dict[str, Any] | None = None
    _has_unit_scales: bool = False

    @property
    def client(self) -> Client:
        assert self._client is not None, "the arm is used outside serve()"
        return self._client

    @contextmanager
    def serve(self, block: int) -> Iterator[LiveArm]:
        """Have the arm answer for the length of the block; evidence is kept when it ends well."""
        self._block = block
        self._expected = Counter() if self._chunk_tokens is not None else None
        self._reports, self._prefix_cache, self._canary = {}, {}, None
        if self.arm.attached:
            key = os.environ.get(self.arm.api_key_env) if self.arm.api_key_env else None
            with self._connect(self.arm.base_url or "", key):
                yield self
                self._keep_evidence()
            return
        with self._launch(block) as self.server:
            try:
                with self._connect(self.server.base_url, self.server.api_key):
                    self.launches.append(
                        Launch(
                            block=block,
                            started_at=self.server.started_at,
                            cold_start_s=self.server.cold_start_s,
                            log=self.log_path(self.name, block).name,
                        )
                    )
                    yield self
                    self._keep_evidence()
            finally:
                self.server = None

    def _launch(self, block: int) -> Server:
        args, env = build_launch(self.arm, forcing=self.spec.fidelity is not None)
        return Server.launch(
            LaunchPlan(
                arm=self.name,
                block=block,
                python=self.python,
                args=args,
                env=env,
                model_path=self.model_path or "",
                model_name=self.spec.model.name,
                log_path=self.log_path(self.name, block),
                start_timeout_s=self.spec.timeouts.start_s,
            )
        )

    @contextmanager
    def _connect(self, base_url: str, key: str | None) -> Iterator[None]:
        with Client(
            base_url, self.spec.model.name, api_key=key, timeouts=self.spec.timeouts
        ) as self._client:
            try:
                self._identify()
                yield
            finally:
                self._client = None

    def _identify(self) -> None:
        self.client.probe()
        version = self.client.read_version()
        if None not in (self.server_version, version) and version != self.server_version:
            raise ServerAnswerError(
                f"the {self.name} server is version {version} now and was {self.server_version} in "
                "an earlier block: they cannot be one arm, so put it back, or start a new run"
            )
        self.server_version = version
        self.max_model_len = self.client.read_model().max_model_len
        if self.environment is None:
            self.environment = (
                Environment(gpu=None, driver=None, cpu=None, packages={}, git=None)
                if self.arm.attached
                else read_environment(self.python, self.arm.env)
            )
        if self.server is not None:
            self.command, self.env = self.server.command, self.server.env
            log = _read_text(self.log_path(self.name, self._block))
            self.attention_backend = find_backend(log)
            self._has_unit_scales = UNIT_SCALES_IN_LOG in log
        if not (self.arm.attached and self.spec.schedule.warmup == 0):
            self._canary = {"prompt": CANARY_PROMPT, "cold_text": self._ask_canary("cold")}
        self.mark("ready")

    def _ask_canary(self, when: str) -> str | None:
        """A short answer; a server that cannot give it is not ready, whatever its port says."""
        messages = [{"role": "user", "content": CANARY_PROMPT}]
        salt = compute_cache_salt(self.run_id, self.name, self._block, f"canary {when}")
        done = self.client.generate(messages, CANARY_TOKENS, cache_salt=salt)
        if done.error is not None:
            self.check_alive()
            raise ServerAnswerError(
                f"the {self.name} server failed a first short request "
                f"({done.error.category}: {done.error.message}): see its log"
            )
        return done.text

    def mark(self, point: str) -> None:
        """Read counters at ``point``: ready, warm, measured, end."""
        self._reports[point] = self._read_patch_report()
        self._prefix_cache[point] = self.client.read_prefix_cache()

    def _read_patch_report(self) -> dict[str, Any] | None:
        if self.arm.patch is None:
            return None
        reports = self.client.call_rpc(PATCHES[self.arm.patch].report_rpc, RPC_TIMEOUT_S)
        try:
            return merge_reports(reports, count_workers(self.arm.args))
        except EvidenceError as exc:
            raise EvidenceError(f"the {self.name} server: {exc}") from None

    def check_alive(self) -> None:
        """Raise ServerDiedError when the server that we launched is gone."""
        if self.server is not None:
            self.server.check_alive()

    def finish(self) -> None:
        """Read what only the end of a block can tell: the canary's warm answer, the counters."""
        self.mark("end")
        if self._canary is not None:
            self._canary["warm_text"] = self._ask_canary("warm")

    def send_load(
        self, prompt: LoadPrompt, repetition: int, *, phase: Phase, salt: str
    ) -> RequestRecord:
        """Send one load request and return its record, failed or not."""
        spec = self.spec.load
        done = self._generate(prompt.item, spec.output_tokens, spec.ignore_eos, salt)
        return RequestRecord(
            arm=self.name,
            block=self._block,
            bucket=prompt.bucket,
            prompt_id=prompt.prompt_id,
            repetition=repetition,
            phase=phase,
            started_at=done.started_at,
            prompt_tokens=done.prompt_tokens,
            output_tokens=done.output_tokens,
            cached_tokens=done.cached_tokens,
            chunk_ns=done.chunk_ns,
            end_ns=done.end_ns,
            finish_reason=done.finish_reason,
            output_sha256=None if done.error else _sha256(done.text),
            output_text=None if done.error else done.text,
            error=done.error,
            extra=_describe_reasoning(done),
        )

    def send_sample(self, item: Item, *, salt: str) -> SampleRecord:
        """Send one task item, score the answer and return the record, failed or not."""
        done = self._generate(item, item.max_tokens, False, salt)
        scored = None if done.error else score_item(item, done.text, done.finish_reason)
        failed = done.error
        error = TaskError(category=failed.category, message=failed.message) if failed else None
        return SampleRecord(
            arm=self.name,
            block=self._block,
            task=item.task,
            task_version=item.task_version,
            sample_id=item.sample_id,
            prompt_sha256=item.prompt_sha256,
            prompt_tokens=done.prompt_tokens,
            output_text=None if done.error else done.text,
            output_tokens=done.output_tokens,
            finish_reason=done.finish_reason,
            prediction=scored.prediction if scored else None,
            references=item.references,
            score=scored.score if scored else None,
            flags=scored.flags if scored else [],
            error=error or (scored.error if scored else None),
            extra={
                "scoring": item.scoring,
                **item.meta,
                **(scored.extra if scored else {}),
                **(_describe_reasoning(done) or {}),
            },
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """What sizes prompts here: the server's own /tokenize, else its usage counts."""
        try:
            self.client.tokenize("a")
        except NotSupportedError:
            self.as_messages = True
            asks = self.spec.schedule.warmup > 0
            return UsageTokenizer(self._count_prompt if asks else None)
        return self.client

    def _count_prompt(self, messages: list[dict[str, str]]) -> int | None:
        return self.client.generate(messages, 1).prompt_tokens

    def _generate(self, item: Item, max_tokens: int, ignore_eos: bool, salt: str) -> Generation:
        """Token ids and a cache salt where the server takes them, else chat messages with a nonce
        in front, so that no two requests share a prefix."""
        prompt: list[int] | list[dict[str, str]] = item.prompt_ids
        if self.as_messages or not self.client.extensions:
            text = f"{compute_nonce(salt)}\n{item.user_text}"
            prompt = [{"role": "user", "content": text}]
        done = self.client.generate(prompt, max_tokens, ignore_eos=ignore_eos, cache_salt=salt)
        if done.error is not None:
            done = self._name_death(done)
        self._expect(done)
        return done

    def _name_death(self, done: Generation) -> Generation:
        """A request that failed because the server died says so."""
        try:
            self.check_alive()
        except ServerDiedError as exc:
            error = RequestError(category="server_died", message=str(exc))
            return replace(done, error=error)
        return done

    def _expect(self, done: Generation) -> None:
        if self._expected is None:
            return
        if done.prompt_tokens is None or done.output_tokens is None or self._chunk_tokens is None:
            self._expected = None  # a failed request leaves no way to know what was run
            return
        self._expected += compute_expected_steps(
            done.prompt_tokens, done.output_tokens, self._chunk_tokens, done.cached_tokens or 0
        )

    @property
    def _chunk_tokens(self) -> int | None:
        return parse_batched_tokens(self.arm.args)

    def _keep_evidence(self) -> None:
        ready, end = self._reports.get("ready"), self._reports.get("end")
        kv_cache = (end or {}).get("kv_cache") or self._read_stock_kv_cache()
        if kv_cache and self._has_unit_scales:
            kv_cache = {**kv_cache, "unit_scales": True}
        if kv_cache:
            self.kv_cache_dtype = _name_dtype(kv_cache.get("dtype"))
        if end and end.get("backend"):
            self.attention_backend = end["backend"]
        self.evidence.append(
            LaunchEvidence(
                block=self._block,
                routes=_subtract(end, ready, "routes"),
                route_steps=_subtract(end, ready, "route_steps"),
                per_layer=_subtract_by_layer(end, ready),
                layers=end.get("layers") if end else None,
                expected_steps=None if self._expected is None else dict(self._expected),
                kv_cache=kv_cache,
                prefix_cache=self._measured_prefix_cache(),
                canary=self._canary,
                patch={
                    "points": {
                        point: report["routes"] for point, report in self._reports.items() if report
                    },
                    **{
                        key: end.get(key)
                        for key in ("version", "impl", "fault", "active")
                        if end.get(key) is not None
                    },
                }
                if end
                else None,
            )
        )

    def _read_stock_kv_cache(self) -> dict[str, Any] | None:
        labels = self.client.read_cache_config()
        if not labels:
            return None
        return {"dtype": labels.get("cache_dtype"), **_select_ints(labels)}

    def _measured_prefix_cache(self) -> dict[str, float] | None:
        before, after = self._prefix_cache.get("warm"), self._prefix_cache.get("measured")
        if before is None or after is None:
            return None
        if after.queries < before.queries or after.hits < before.hits:
            raise ServerAnswerError(
                f"the counters of the {self.name} server fell during block {self._block}: it was "
                "started again meanwhile, so the block is not of one launch; continue with --resume"
            )
        return {"queries": after.queries - before.queries, "hits": after.hits - before.hits}

    def build_record(self) -> Arm:
        """The arm as run.json holds it."""
        routes: Counter[str] = Counter()
        for item in self.evidence:
            routes.update(item.routes or {})
        proven = any(item.routes is not None for item in self.evidence)
        extra = {"evidence": [item.model_dump(mode="json") for item in self.evidence]}
        if self.max_model_len is not None:
            extra["max_model_len"] = self.max_model_len
        return Arm(
            attached=self.arm.attached,
            command=self.command,
            env=self.env,
            environment=self.environment
            or Environment(gpu=None, driver=None, cpu=None, packages={}, git=None),
            server_version=self.server_version,
            model=self.spec.model.name,
            kv_cache_dtype=self.kv_cache_dtype,
            attention_backend=self.attention_backend,
            launches=self.launches,
            routes=dict(routes) if proven else None,
            extra=extra,
        )


def build_launch(arm: ArmSpec, *, forcing: bool) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a launched arm: the spec's, its patch's, and with ``forcing``
    what token fidelity needs."""
    patch = PATCHES[arm.patch] if arm.patch else None
    args = [*arm.args, *(patch.args if patch else ())]
    env = {**arm.env, **(patch.env if patch else {})}
    if forcing:
        more_args, more_env = build_launch_additions({**os.environ, **env})
        args, env = [*args, *more_args], {**env, **more_env}
    return args, env


def find_backend(log: str) -> str | None:
    """The attention backend that a server's log names, None when it names none."""
    found = BACKEND_IN_LOG.search(log)
    return found.group(1) if found else None


def _read_text(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _describe_reasoning(done: Generation) -> dict[str, Any] | None:
    """What came before the answer: its text, and when the answer itself began."""
    if not done.reasoning_text:
        return None
    return {"reasoning_text": done.reasoning_text, "first_answer_ns": done.first_answer_ns}


def _subtract(
    end: dict[str, Any] | None, start: dict[str, Any] | None, key: str
) -> dict[str, int] | None:
    """Counts of ``key`` between two reports; None when either is missing."""
    if not end or not start or end.get(key) is None:
        return None
    before = start.get(key) or {}
    return {route: count - before.get(route, 0) for route, count in end[key].items()}


def _subtract_by_layer(
    end: dict[str, Any] | None, start: dict[str, Any] | None
) -> dict[str, list[int]] | None:
    """Launches of each layer between two reports, of routes that had any; None without counts."""
    if not end or not start or end.get("per_layer") is None or start.get("per_layer") is None:
        return None
    counts = {
        route: [now - then for now, then in zip(counts, start["per_layer"][route], strict=True)]
        for route, counts in end["per_layer"].items()
    }
    return {route: launches for route, launches in counts.items() if any(launches)}


def _name_dtype(dtype: Any) -> str | None:
    """A worker whose layers hold different pages lists their dtypes."""
    return " and ".join(map(str, dtype)) if isinstance(dtype, list) else dtype


def _select_ints(labels: dict[str, str]) -> dict[str, int]:
    wanted = ("block_size", "num_gpu_blocks", "num_cpu_blocks")
    return {key: int(labels[key]) for key in wanted if labels.get(key, "").isdecimal()}
