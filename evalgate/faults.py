"""What `evalgate selftest` plants: faults of a run, faults of a stream, and the right answers.

Each stands for a kind that has misled somebody. A fault changes a sound run's files; nothing is
judged here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evalgate.records import BASELINE, CANDIDATE
from evalgate.sound_run import LAYERS, TPOT_S, TTFT_S, Files, make_times


@dataclass(frozen=True)
class Fault:
    """Something planted in a sound run, the answer that is right, and words of its reason."""

    name: str
    plant: Callable[[Files], None]
    status: str
    reason: str = ""


@dataclass(frozen=True)
class StreamFault:
    """A stream that must not become an answer, and its category."""

    name: str
    stream: bytes
    category: str


def _slow_down(metric: str, factor: float) -> Callable[[Files], None]:
    """The candidate's TTFT or TPOT times ``factor``, its wandering kept."""

    def plant(files: Files) -> None:
        for record in files.of(CANDIDATE):
            times = record["chunk_ns"]
            ttft, tpot = times[0] / 1e9, (times[-1] - times[0]) / 1e9 / (len(times) - 1)
            ttft, tpot = (ttft * factor, tpot) if metric == "ttft" else (ttft, tpot * factor)
            record.update(make_times(ttft, tpot, len(times)))

    return plant


def _run_away(files: Files) -> None:
    for record in files.of(CANDIDATE):
        record.update(output_tokens=64, finish_reason="length", output_text="the " * 64)
        record.update(make_times(TTFT_S[record["bucket"]], TPOT_S, 64))


def _forget_long_ones(files: Files) -> None:
    for sample in files.samples:
        if sample["arm"] == CANDIDATE and sample["sample_id"] in {f"long-{i}" for i in range(16)}:
            sample.update(score=0.0, prediction="", output_text="no", flags=[])


def _fail_request(category: str) -> Callable[[Files], None]:
    def plant(files: Files) -> None:
        files.of(CANDIDATE)[5].update(
            output_tokens=None,
            cached_tokens=None,
            chunk_ns=[],
            end_ns=None,
            finish_reason=None,
            output_sha256=None,
            output_text=None,
            error={"category": category, "message": "planted"},
        )

    return plant


def _set_request(**values: Any) -> Callable[[Files], None]:
    return lambda files: files.of(CANDIDATE)[0].update(values)


def _set_samples(**values: Any) -> Callable[[Files], None]:
    def plant(files: Files) -> None:
        for sample in files.samples:
            if sample["arm"] == CANDIDATE:
                sample.update(values)

    return plant


def _set_run(**values: Any) -> Callable[[Files], None]:
    return lambda files: files.run.update(values)


def _set_arm(arm: str, **values: Any) -> Callable[[Files], None]:
    return lambda files: files.run["arms"][arm].update(values)


def _set_evidence(arm: str, **values: Any) -> Callable[[Files], None]:
    """In the evidence of every launch; a table is changed in its keys."""

    def plant(files: Files) -> None:
        for evidence in files.run["arms"][arm]["extra"]["evidence"]:
            for key, value in values.items():
                old = evidence.get(key)
                evidence[key] = {**old, **value} if isinstance(old, dict) else value

    return plant


def _rename_buckets(files: Files) -> None:
    for record in files.of(CANDIDATE):
        record["bucket"] = {"short": "long", "long": "short"}[record["bucket"]]
        record["prompt_id"] = f"other/{record['prompt_id']}"
    files.samples = [s for s in files.samples if s["arm"] == BASELINE]


def _cut_last(files: Files) -> None:
    """As of a file that ends too early, though at a line's end: what was slow last is gone."""
    for arm in (BASELINE, CANDIDATE):
        files.requests.remove(files.of(arm)[-1])


def _run_backwards(files: Files) -> None:
    files.of(CANDIDATE)[0]["chunk_ns"].reverse()


def _append(text: str) -> Callable[[Files], None]:
    def plant(files: Files) -> None:
        files.raw = text

    return plant


def _misspell(files: Files) -> None:
    record = files.requests[0]
    record["promt_tokens"] = record.pop("prompt_tokens")


def _change_package(files: Files) -> None:
    files.run["arms"][CANDIDATE]["environment"]["packages"]["torch"] = "2.12.0"


NEVER_RAN = {"prefix": 0}
FAULTS: tuple[Fault, ...] = (
    Fault("nothing: the sound run itself", lambda files: None, "pass"),
    Fault("TPOT longer by a half", _slow_down("tpot", 1.5), "fail", "TPOT short"),
    Fault("TPOT longer by 5 %", _slow_down("tpot", 1.05), "fail", "TPOT long"),
    Fault("TTFT longer by 5 %", _slow_down("ttft", 1.05), "fail", "TTFT long"),
    Fault("answers lost at long prompts alone", _forget_long_ones, "fail", "score retrieval long"),
    Fault("outputs that run away", _run_away, "invalid", "max_length_ratio"),
    Fault("a failed request", _fail_request("stream_error"), "invalid", "min_success"),
    Fault("a server that died", _fail_request("server_died"), "invalid", "the server died"),
    Fault("tokens found in the prefix cache", _set_request(cached_tokens=4000), "invalid",
          "found 4000 tokens in the prefix cache"),
    Fault("hits counted by the server", _set_evidence(BASELINE, prefix_cache={"hits": 9.0}),
          "invalid", "the prefix cache had 9 hits"),
    Fault("another prompt length in one arm", _set_request(prompt_tokens=5000), "invalid",
          "prompt token counts differ"),
    Fault("task prompts that differ", _set_samples(prompt_sha256="0" * 64), "invalid",
          "the prompts differ"),
    Fault("another version of a task", _set_samples(task_version=2), "invalid", "task_version"),
    Fault("a route that never ran",
          _set_evidence(CANDIDATE, routes=NEVER_RAN, route_steps=NEVER_RAN), "invalid",
          "route prefix is required and was never counted"),
    Fault("a layer that left the route", _set_evidence(CANDIDATE, routes={"decode": 3 * 152}),
          "invalid", "some layers did not take the route"),
    Fault("launches of the fallback", _set_evidence(CANDIDATE, routes={"fallback": LAYERS}),
          "invalid", "fallback"),
    Fault("layers that the patch does not serve",
          _set_evidence(CANDIDATE, patch={"active": False}), "invalid", "every attention layer"),
    Fault("INT8 asked for, another cache served", _set_arm(CANDIDATE, kv_cache_dtype="auto"),
          "invalid", "asked for an INT8 KV cache and serves 'auto'"),
    Fault("a corrupt first batch", _set_evidence(CANDIDATE, canary={"cold_text": "\u2603"}),
          "invalid", "the first answer after the start differs"),
    Fault("a package that the spec does not set", _change_package, "invalid", "packages.torch"),
    Fault("a run that did not end", _set_run(status="failed"), "invalid", "not 'complete'"),
    Fault("requests cut from both arms", _cut_last, "invalid", "of completed blocks are missing"),
    Fault("nothing in common", _rename_buckets, "invalid", "nothing in common"),
    Fault("chunk times that run backwards", _run_backwards, "invalid", "run backwards"),
    Fault("an unknown schema version", _set_run(schema_version=99), "refused", "99"),
    Fault("a misspelt key", _misspell, "refused", "promt_tokens"),
    Fault("not a number", _append('{"arm": NaN}\n'), "refused", "NaN"),
    Fault("a torn line in a complete run", _append('{"arm": "base'), "refused", "not JSON"),
)  # fmt: skip

_CHUNK = b'data: {"choices":[{"index":0,"text":"a","token_ids":[1],"finish_reason":null}]}\n\n'
_END = b'data: {"choices":[{"index":0,"text":"b","token_ids":[2],"finish_reason":"stop"}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
_DONE = b"data: [DONE]\n\n"
STREAM_FAULTS: tuple[StreamFault, ...] = (
    StreamFault("an error object inside a 200", _CHUNK + b'data: {"error":{"message":"x"}}\n\n',
                "stream_error"),
    StreamFault("an end without a finish_reason", _CHUNK + _DONE, "truncated"),
    StreamFault("a lost token", _END + _USAGE + _DONE, "stream_error"),
    StreamFault("an event that is cut", _CHUNK + b'data: {"choi\n\n' + _END, "stream_error"),
    StreamFault("text after the end", _END + _CHUNK + _USAGE, "stream_error"),
)  # fmt: skip
