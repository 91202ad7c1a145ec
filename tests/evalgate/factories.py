"""Builders of stored runs in memory: every value has a plausible default, tests set what they test.

Times are given in seconds, as people think of them, and become the raw nanoseconds of the records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from evalgate.records import (
    Arm,
    Environment,
    FidelityRecord,
    Launch,
    RequestError,
    RequestRecord,
    Run,
    SampleRecord,
    StoredRun,
    TaskError,
    compute_canonical_json,
)

BUCKETS: tuple[tuple[str, int, int, float], ...] = (
    ("4K-8K", 4096, 8192, 0.20),
    ("8K-16K", 8192, 16384, 0.50),
    ("16K-32K", 16384, 32768, 0.30),
)
STARTED_AT = "2026-11-29T02:00:00.000000Z"
FINISHED_AT = "2026-11-29T02:30:00.000000Z"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_spec(
    *,
    buckets: Sequence[tuple[str, int, int, float]] = BUCKETS,
    arms: dict[str, dict[str, Any]] | None = None,
    prompts: int = 2,
    blocks: int = 1,
    repetitions: int = 1,
    output_tokens: int = 128,
    ignore_eos: bool = False,
    tasks: Iterable[str] = (),
    mode: str = "resident",
) -> dict[str, Any]:
    """A spec as it is stored, resolved, in run.json."""
    launch = {"python": "python", "args": ["--max-num-batched-tokens", "4096"], "env": {}}
    return {
        "name": "test",
        "arms": arms or {"baseline": launch, "candidate": launch},
        "model": {"name": "m", "path": "m"},
        "schedule": {
            "mode": mode,
            "blocks": blocks,
            "repetitions": repetitions,
            "warmup": 1,
            "seed": 0,
            "task_blocks": 1,
        },
        "load": {
            "output_tokens": output_tokens,
            "ignore_eos": ignore_eos,
            "buckets": [
                {"name": n, "min_tokens": lo, "max_tokens": hi, "weight": w, "prompts": prompts}
                for n, lo, hi, w in buckets
            ],
        },
        "tasks": {name: {"limit": 50} for name in tasks},
    }


def make_environment(**changes: Any) -> Environment:
    values: dict[str, Any] = {
        "gpu": None,
        "driver": None,
        "cpu": "a processor, 2 cores",
        "packages": {"torch": "2.13.0", "vllm": "0.32.0"},
        "git": {"commit": "c0ffee", "dirty": False},
    }
    return Environment(**{**values, **changes})


def make_arm(*, blocks: int = 1, environment: Environment | None = None, **changes: Any) -> Arm:
    values: dict[str, Any] = {
        "attached": False,
        "command": ["python", "-m", "vllm.entrypoints.openai.api_server", "--port", "8000"],
        "env": {},
        "environment": environment or make_environment(),
        "server_version": "0.32.0",
        "model": "m",
        "kv_cache_dtype": "auto",
        "attention_backend": "CPU_ATTN",
        "launches": [
            Launch(block=b, started_at=STARTED_AT, cold_start_s=40.0, log=None)
            for b in range(blocks)
        ],
        "routes": None,
    }
    return Arm(**{**values, **changes})


def make_run(
    *,
    run_id: str = "r1",
    arms: dict[str, Arm] | None = None,
    spec: dict[str, Any] | None = None,
    status: str = "complete",
    extra: dict[str, Any] | None = None,
) -> Run:
    spec = make_spec() if spec is None else spec
    return Run(
        schema_version=1,
        run_id=run_id,
        name="test",
        status=status,
        started_at=STARTED_AT,
        finished_at=FINISHED_AT if status != "started" else None,
        spec=spec,
        spec_sha256=digest(compute_canonical_json(spec)),
        evalgate_version="0.1.0",
        arms={"baseline": make_arm(), "candidate": make_arm()} if arms is None else arms,
        extra=extra,
    )


def make_request(
    arm: str = "baseline",
    *,
    block: int = 0,
    bucket: str = "8K-16K",
    prompt_id: str = "p0",
    repetition: int = 0,
    ttft_s: float = 0.5,
    tpot_s: float = 0.02,
    output_tokens: int | None = 11,
    prompt_tokens: int | None = 10_000,
    error: str | None = None,
    **changes: Any,
) -> RequestRecord:
    """A request whose tokens came one a chunk at an even pace. ``error``: its category."""
    first_ns = round(ttft_s * 1e9)
    gap_ns = tpot_s * 1e9
    chunk_ns = [first_ns + round(i * gap_ns) for i in range(output_tokens or 0)]
    text = f"the answer to {prompt_id}"
    values: dict[str, Any] = {
        "arm": arm,
        "block": block,
        "bucket": bucket,
        "prompt_id": prompt_id,
        "repetition": repetition,
        "phase": "measure",
        "started_at": STARTED_AT,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": 0,
        "chunk_ns": chunk_ns,
        "end_ns": chunk_ns[-1] + 1000 if chunk_ns else first_ns,
        "finish_reason": "stop",
        "output_sha256": digest(text),
        "output_text": text,
        "error": None,
    }
    if error is not None:
        values |= {
            "output_tokens": None,
            "chunk_ns": [],
            "end_ns": None,
            "finish_reason": None,
            "output_sha256": None,
            "output_text": None,
            "error": RequestError(category=error, message=f"planted {error}"),
        }
    return RequestRecord(**{**values, **changes})


def make_sample(
    arm: str = "baseline",
    *,
    block: int = 0,
    task: str = "retrieval",
    sample_id: str = "s0",
    score: float | None = 1.0,
    prompt_tokens: int | None = 10_000,
    error: str | None = None,
    **changes: Any,
) -> SampleRecord:
    text = f"the answer to {sample_id}"
    values: dict[str, Any] = {
        "arm": arm,
        "block": block,
        "task": task,
        "task_version": 1,
        "sample_id": sample_id,
        "prompt_sha256": digest(sample_id),
        "prompt_tokens": prompt_tokens,
        "output_text": text,
        "output_tokens": 8,
        "finish_reason": "stop",
        "prediction": text,
        "references": [text],
        "score": None if error else score,
        "flags": [],
        "error": TaskError(category=error, message=f"planted {error}") if error else None,
        "extra": {"scoring": "passage"},
    }
    return SampleRecord(**{**values, **changes})


def make_fidelity(
    arm: str = "candidate",
    *,
    block: int = 0,
    sample_id: str = "t0",
    route: str = "decode",
    mean_gap: float | None = 0.01,
    top1_agreement: float | None = 1.0,
    positions: int = 64,
    **changes: Any,
) -> FidelityRecord:
    values: dict[str, Any] = {
        "arm": arm,
        "block": block,
        "sample_id": sample_id,
        "route": route,
        "prompt_tokens": 10_000,
        "positions": positions,
        "mean_gap": mean_gap,
        "p99_gap": mean_gap,
        "worst_gap": mean_gap,
        "top1_agreement": top1_agreement,
        "first_divergence": None,
        "margin_at_divergence": None,
        "error": None,
    }
    return FidelityRecord(**{**values, **changes})


def make_stored(
    requests: Iterable[RequestRecord] = (),
    samples: Iterable[SampleRecord] = (),
    *,
    fidelity: Iterable[FidelityRecord] = (),
    label: str = "r1",
    **run: Any,
) -> StoredRun:
    """A run of these records; keywords as in ``make_run``."""
    return StoredRun(
        label, make_run(run_id=label, **run), list(requests), list(samples), list(fidelity)
    )


def simulate_requests(
    *,
    seed: int = 0,
    arms: Sequence[str] = ("baseline", "candidate"),
    buckets: Sequence[tuple[str, int, int, float]] = BUCKETS,
    blocks: int = 3,
    prompts: int = 4,
    repetitions: int = 1,
    ttft_change: float = 0.0,
    tpot_change: float = 0.0,
    launch_sd: float = 0.001,
    request_sd: float = 0.002,
) -> list[RequestRecord]:
    """Measured requests with noise of launches and of requests, changes planted in the candidate.

    Changes and noise are fractions: ``tpot_change=0.5`` makes each candidate TPOT half as long
    again.
    """
    rng = np.random.default_rng(seed)
    records = []
    for arm in arms:
        planted = arm == "candidate"
        for block in range(blocks):
            launch = 1 + rng.normal(0, launch_sd, 2)
            for bucket, low, high, _ in buckets:
                for prompt in range(prompts):
                    for repetition in range(repetitions):
                        noise = launch * (1 + rng.normal(0, request_sd, 2))
                        records.append(
                            make_request(
                                arm,
                                block=block,
                                bucket=bucket,
                                prompt_id=f"{bucket}/{prompt}",
                                repetition=repetition,
                                prompt_tokens=low + (high - low) * (prompt + 1) // (prompts + 2),
                                ttft_s=low * 1e-4 * noise[0] * (1 + planted * ttft_change),
                                tpot_s=0.02 * noise[1] * (1 + planted * tpot_change),
                                output_tokens=20 + prompt % 50,
                            )
                        )
    return records


def make_pair_of_samples(
    baseline: Sequence[float], candidate: Sequence[float], **changes: Any
) -> list[SampleRecord]:
    """The samples of both arms from two lists of scores; keywords as in ``make_sample``."""
    prefix = changes.pop("prefix", "s")
    return [
        make_sample(arm, sample_id=f"{prefix}{i}", score=score, **changes)
        for arm, scores in (("baseline", baseline), ("candidate", candidate))
        for i, score in enumerate(scores)
    ]
