"""How far the client's TTFT and TPOT are from when a server says that it sent.

A stub server in a process of its own notes the time at which it read each request and at which it
sent each chunk; the clock (CLOCK_MONOTONIC) is one for the whole machine. The error of a request is
what the client measured less what the server noted: the network, the kernel and the client.

    python benchmarks/timing_truth.py --requests 40
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path

import httpx

from evalgate.client import Client
from evalgate.metrics import compute_tpot_s, compute_ttft_s
from evalgate.server import LaunchPlan, Server

STUB_FOLDER = Path(__file__).resolve().parent.parent / "tests" / "evalgate"
TTFT_S = 0.05
TPOTS_S = (0.001, 0.005, 0.02)
PIECES = 63  # and the stop token


def measure(tpot_s: float, requests: int, folder: str) -> dict[str, float]:
    """Median TTFT and TPOT by the server's notes, and the client's median errors, in ms."""
    timing = {"pieces": PIECES, "ttft_s": TTFT_S, "tpot_s": tpot_s}
    plan = LaunchPlan(
        arm="stub",
        block=0,
        python=sys.executable,
        args=[],
        env={
            "PYTHONPATH": str(STUB_FOLDER),
            "STUB_MODE": "timed",
            "STUB_TIMING": json.dumps(timing),
        },
        model_path="m",
        model_name="m",
        log_path=Path(folder, f"{tpot_s}.log"),
        start_timeout_s=60,
        module="stub_server",
    )
    with Server.launch(plan) as server, Client(server.base_url, "m") as client:
        answers = [client.generate([1], 64) for _ in range(requests)]
        noted = httpx.get(f"{server.base_url}/stub/times", trust_env=False).json()
    # Of the last two pieces one is the usage and one is [DONE].
    truth = [[t - read for t in chunks[:-2]] for read, *chunks in noted]
    ttft = [compute_ttft_s(t) for t in truth]
    tpot = [compute_tpot_s(t, PIECES + 1) for t in truth]
    ttft_seen = [compute_ttft_s(a.chunk_ns) for a in answers]
    tpot_seen = [compute_tpot_s(a.chunk_ns, a.output_tokens) for a in answers]
    return {
        "ttft_ms": to_ms(ttft),
        "ttft_error_ms": to_ms([s - t for s, t in zip(ttft_seen, ttft, strict=True)]),
        "tpot_ms": to_ms(tpot),
        "tpot_error_ms": to_ms([s - t for s, t in zip(tpot_seen, tpot, strict=True)]),
    }


def to_ms(values: list[float]) -> float:
    return round(statistics.median(values) * 1000, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=40)
    args = parser.parse_args()
    columns = ("ttft_ms", "ttft_error_ms", "tpot_ms", "tpot_error_ms")
    print(f"{'asked TPOT':12s}" + "".join(f"{name:>15s}" for name in columns))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for tpot_s in TPOTS_S:
            row = results[f"{tpot_s * 1000:g}"] = measure(tpot_s, args.requests, folder)
            values = "".join(f"{row[name]:15.4f}" for name in columns)
            print(f"{tpot_s * 1000:>9g} ms{values}")
    summary = {
        "benchmark": "timing_truth",
        "requests": args.requests,
        "by_tpot_ms": results,
        "python": platform.python_version(),
        "httpx": httpx.__version__,
        "machine": platform.platform(),
    }
    print(json.dumps(summary, separators=(",", ":")))


if __name__ == "__main__":
    main()
