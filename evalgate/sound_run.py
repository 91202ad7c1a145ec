"""A made run in which nothing is wrong: what a run directory would hold, as plain values.

``selftest`` plants faults in copies of it. Two builds of equal speed, three launches of each, two
buckets, one task; the candidate is patched and proves it. Every value is computed: no clock, no
random numbers. Knows the stored format, not how it is read or judged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalgate import __version__
from evalgate.records import (
    BASELINE,
    CANDIDATE,
    REQUESTS_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    SCHEMA_VERSION,
    compute_canonical_json,
)

BLOCKS = 3
PROMPTS = 4  # of each bucket
SAMPLES = 40  # of each bucket: no loss among them still allows one of 7.2 points
LAYERS = 4
OUTPUT_TOKENS = 20
TTFT_S = {"short": 0.4, "long": 1.6}
TPOT_S = 0.02
BUCKETS = {"short": (4096, 8192), "long": (8192, 16384)}
STARTED_AT = "2026-01-01T02:00:00Z"
STEPS = {"first_chunk": 8, "prefix": 16, "decode": 8 * (OUTPUT_TOKENS - 1)}


@dataclass
class Files:
    """run.json and the lines beside it; ``raw`` lines are appended to the requests as they are."""

    run: dict[str, Any]
    requests: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    raw: str = ""

    def of(self, arm: str) -> list[dict[str, Any]]:
        return [record for record in self.requests if record["arm"] == arm]

    def save(self, folder: Path) -> None:
        (folder / RUN_FILE).write_text(json.dumps(self.run), encoding="utf-8")
        lines = "".join(json.dumps(record) + "\n" for record in self.requests)
        (folder / REQUESTS_FILE).write_text(lines + self.raw, encoding="utf-8")
        lines = "".join(json.dumps(record) + "\n" for record in self.samples)
        (folder / SAMPLES_FILE).write_text(lines, encoding="utf-8")


def build_sound_run() -> Files:
    arms = (BASELINE, CANDIDATE)
    return Files(
        run=_build_run(),
        requests=[record for arm in arms for record in _build_requests(arm)],
        samples=[record for arm in arms for record in _build_samples(arm)],
    )


def make_times(ttft_s: float, tpot_s: float, tokens: int) -> dict[str, Any]:
    """The times (ns) of a request with ``tokens`` tokens at an even pace."""
    times = [round(1e9 * (ttft_s + i * tpot_s)) for i in range(tokens)]
    return {"chunk_ns": times, "end_ns": times[-1] + 1000}


def _build_run() -> dict[str, Any]:
    launch = {"args": ["--max-num-batched-tokens", "4096"], "env": {}}
    spec = {
        "name": "selftest",
        "arms": {BASELINE: launch, CANDIDATE: {**launch, "patch": "int8_kv"}},
        "model": {"name": "m", "path": "m"},
        "schedule": {"mode": "resident", "blocks": BLOCKS, "repetitions": 1, "warmup": 0},
        "load": {
            "output_tokens": 64,
            "ignore_eos": False,
            "buckets": [
                {"name": n, "min_tokens": lo, "max_tokens": hi, "weight": 0.5, "prompts": PROMPTS}
                for n, (lo, hi) in BUCKETS.items()
            ],
        },
        "tasks": {"retrieval": {"limit": 2 * SAMPLES}},
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": "0" * 16,
        "name": "selftest",
        "status": "complete",
        "started_at": STARTED_AT,
        "finished_at": STARTED_AT,
        "spec": spec,
        "spec_sha256": _digest(compute_canonical_json(spec)),
        "evalgate_version": __version__,
        "arms": {arm: _build_arm(arm) for arm in (BASELINE, CANDIDATE)},
        "extra": {"completed_blocks": list(range(BLOCKS)), "excluded_blocks": []},
    }


def _build_arm(arm: str) -> dict[str, Any]:
    patched = arm == CANDIDATE
    proof = {
        "routes": {route: LAYERS * steps for route, steps in STEPS.items()} | {"fallback": 0},
        "route_steps": dict(STEPS),
        "layers": LAYERS,
        "expected_steps": dict(STEPS),
        "kv_cache": {"dtype": "int8", "bytes_per_token_per_layer": 2080},
        "patch": {"active": True},
    }
    evidence = [
        {
            "block": block,
            "prefix_cache": {"queries": 0.0, "hits": 0.0},
            "canary": {"cold_text": "Mercury", "warm_text": "Mercury"},
            **(json.loads(json.dumps(proof)) if patched else {}),
        }
        for block in range(BLOCKS)
    ]
    return {
        "attached": False,
        "command": ["python", "-m", "vllm.entrypoints.openai.api_server"],
        "env": {"KERNELS_PATCH": "int8_kv"} if patched else {},
        "environment": {
            "gpu": None,
            "driver": None,
            "cpu": "a processor",
            "packages": {"vllm": "0.32.0", "torch": "2.13.0"},
            "git": None,
        },
        "server_version": "0.32.0",
        "model": "m",
        "kv_cache_dtype": "int8" if patched else "auto",
        "attention_backend": "CPU_ATTN",
        "launches": [
            {"block": block, "started_at": STARTED_AT, "cold_start_s": 30.0, "log": None}
            for block in range(BLOCKS)
        ],
        "routes": None,
        "extra": {"evidence": evidence},
    }


def _build_requests(arm: str) -> Iterator[dict[str, Any]]:
    for block in range(BLOCKS):
        for bucket, (low, high) in BUCKETS.items():
            for prompt in range(PROMPTS):
                # Launches and requests wander by tenths of a percent, as on a quiet machine.
                wobble = 1 + 0.001 * ((7 * block + 5 * prompt + 3 * (arm == CANDIDATE)) % 5 - 2)
                text = f"the answer to {bucket}/{prompt}"
                yield {
                    "arm": arm,
                    "block": block,
                    "bucket": bucket,
                    "prompt_id": f"{bucket}/{prompt}",
                    "repetition": 0,
                    "phase": "measure",
                    "started_at": STARTED_AT,
                    "prompt_tokens": low + (high - low) * (prompt + 1) // (PROMPTS + 1),
                    "output_tokens": OUTPUT_TOKENS,
                    "cached_tokens": 0,
                    **make_times(TTFT_S[bucket] * wobble, TPOT_S * wobble, OUTPUT_TOKENS),
                    "finish_reason": "stop",
                    "output_sha256": _digest(text),
                    "output_text": text,
                    "error": None,
                }


def _build_samples(arm: str) -> Iterator[dict[str, Any]]:
    for bucket, (low, high) in BUCKETS.items():
        for number in range(SAMPLES):
            name = f"{bucket}-{number}"
            yield {
                "arm": arm,
                "block": 0,
                "task": "retrieval",
                "task_version": 1,
                "sample_id": name,
                "prompt_sha256": _digest(name),
                "prompt_tokens": (low + high) // 2,
                "output_text": name,
                "output_tokens": 8,
                "finish_reason": "stop",
                "prediction": name,
                "references": [name],
                "score": 1.0,
                "flags": [],
                "error": None,
                "extra": {"scoring": "passage"},
            }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
