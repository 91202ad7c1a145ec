"""Time and memory of ``evalgate compare`` on two large stored runs.

    python benchmarks/compare_large.py [--requests N] [--tokens N] [--keep DIR]

Writes two runs of one arm each with N measured requests (default 100,000, of 32 output tokens, in
ten launches and three buckets), then compares them as a user would, in a process of its own, and
reads its time and peak memory from the system. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from evalgate.records import (
    Arm,
    Environment,
    Launch,
    RequestRecord,
    Run,
    render_record,
)
from evalgate.spec import compute_spec_sha256

BUCKETS = (("4K-8K", 4096, 8192), ("8K-16K", 8192, 16384), ("16K-32K", 16384, 32768))
LAUNCHES = 10
REPETITIONS = 10
STARTED_AT = "2026-11-29T02:00:00.000000+00:00"
POLICY = "nightly"


def write_run(folder: Path, arm: str, requests: int, tokens: int, rng: np.random.Generator) -> int:
    """One run with one arm in ``folder``; returns the bytes of its requests."""
    folder.mkdir(parents=True)
    spec = {
        "name": arm,
        "arms": {arm: {"args": ["--max-num-batched-tokens", "4096"], "env": {}}},
        "model": {"name": "m", "path": "m"},
        "load": {
            "output_tokens": tokens,
            "buckets": [
                {"name": n, "min_tokens": low, "max_tokens": high, "weight": 1.0, "prompts": 1}
                for n, low, high in BUCKETS
            ],
        },
        "tasks": {},
    }
    launches = [
        Launch(block=b, started_at=STARTED_AT, cold_start_s=40.0, log=None) for b in range(LAUNCHES)
    ]
    record = Arm(
        attached=False,
        command=["python", "-m", "vllm.entrypoints.openai.api_server"],
        env={},
        environment=Environment(gpu=None, driver=None, cpu="a processor", packages={}, git=None),
        server_version="0.32.0",
        model="m",
        kv_cache_dtype="auto",
        attention_backend="CPU_ATTN",
        launches=launches,
        routes=None,
    )
    run = Run(
        schema_version=1,
        run_id=arm,
        name=arm,
        status="complete",
        started_at=STARTED_AT,
        finished_at=STARTED_AT,
        spec=spec,
        spec_sha256=compute_spec_sha256(spec),
        evalgate_version=version("evalgate"),
        arms={arm: record},
    )
    (folder / "run.json").write_text(render_record(run), encoding="utf-8")
    path = folder / "requests.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(requests):
            file.write(render_record(build_request(arm, i, tokens, rng)) + "\n")
    return path.stat().st_size


def build_request(arm: str, i: int, tokens: int, rng: np.random.Generator) -> RequestRecord:
    """Request ``i``: its launch, bucket, prompt and repetition are the digits of ``i``."""
    rest, block = divmod(i, LAUNCHES)
    rest, place = divmod(rest, len(BUCKETS))
    prompt, repetition = divmod(rest, REPETITIONS)
    bucket, low, _ = BUCKETS[place]
    gaps_ns = rng.normal(20e6, 2e5, tokens)
    gaps_ns[0] = low * 1e5
    chunk_ns = np.cumsum(gaps_ns).astype(int).tolist()
    text = f"The report names {prompt} causes and says of each what was done about it since then."
    return RequestRecord(
        arm=arm,
        block=block,
        bucket=bucket,
        prompt_id=f"{bucket}/{prompt}",
        repetition=repetition,
        phase="measure",
        started_at=STARTED_AT,
        prompt_tokens=low + prompt % low,
        output_tokens=tokens,
        cached_tokens=0,
        chunk_ns=chunk_ns,
        end_ns=chunk_ns[-1] + 1000,
        finish_reason="stop",
        output_sha256="0" * 64,
        output_text=text,
        error=None,
    )


def run_measured(command: list[str], answer: Path) -> tuple[int, float, float, int]:
    """Run to the end, stdout into ``answer``: exit code, wall s, CPU s and peak resident bytes."""
    started = time.perf_counter()
    with answer.open("wb") as file:
        pid = os.posix_spawn(
            command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, file.fileno(), 1)]
        )
        _, status, usage = os.wait4(pid, 0)
    wall_s = time.perf_counter() - started
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return os.waitstatus_to_exitcode(status), wall_s, usage.ru_utime + usage.ru_stime, peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="write the runs here and leave them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        base = options.keep or Path(temporary)
        folders = [base / "a", base / "b"]
        for seed, folder in enumerate(folders):
            if not folder.exists():
                rng = np.random.default_rng(seed)
                write_run(folder, folder.name, options.requests, options.tokens, rng)
        size = sum((folder / "requests.jsonl").stat().st_size for folder in folders)
        command = [sys.executable, "-m", "evalgate.cli", "compare", *map(str, folders)]
        command += ["--policy", POLICY, "--format", "json"]
        answer = Path(temporary) / "answer.json"
        measured = [run_measured(command, answer) for _ in range(options.times)]
        verdict = json.loads(answer.read_text(encoding="utf-8"))
    code, wall_s, cpu_s, peak_bytes = min(measured, key=lambda found: found[1])
    rules = [rule["n_pairs"] for rule in verdict["rules"]]
    print(
        f"two runs of {options.requests} requests of {options.tokens} tokens, {size / 1e6:.0f} MB"
    )
    print(f"verdict {verdict['status']} (exit {code}), rules over {max(rules)} pairs at most")
    print(
        f"best of {options.times}: {wall_s:.2f} s ({cpu_s:.2f} s CPU), {peak_bytes / 2**20:.0f} MiB"
    )
    print(
        json.dumps(
            {
                "benchmark": "compare_large",
                "command": " ".join(["python", *sys.argv]),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "msgspec": version("msgspec"),
                "requests": options.requests,
                "tokens": options.tokens,
                "bytes": size,
                "wall_s": round(wall_s, 2),
                "cpu_s": round(cpu_s, 2),
                "peak_mib": round(peak_bytes / 2**20),
            },
            separators=(",", ":"),
        )
    )


if __name__ == "__main__":
    main()
