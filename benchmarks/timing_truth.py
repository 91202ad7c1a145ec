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
TOKENS = 64  # of each answer, a chunk each
MODEL = "m"


def launch_stub(tpot_s: float, folder: str) -> Server:
    timing = {"pieces": TOKENS, "ttft_s": TTFT_S, "tpot_s": tpot_s}
    return Server.launch(
        LaunchPlan(
            arm="stub",
            block=0,
            python=sys.executable,
            args=[],
            env={
                "PYTHONPATH": str(STUB_FOLDER),
                "STUB_MODE": "timed",
                "STUB_TIMING": json.dumps(timing),
            },
            model_path=MODEL,
            model_name=MODEL,
            log_path=Path(folder, f"{tpot_s}.log"),
            start_timeout_s=60,
            module="stub_server",
        )
    )


def read_truth(base_url: str, requests: int) -> tuple[list[float], list[float]]:
    """TTFT and TPOT in s of the last ``requests`` answers, as the server noted them."""
    noted = httpx.get(f"{base_url}/stub/times", trust_env=False).json()[-requests:]
    # Of the last two pieces one is the usage and one is [DONE].
    truth = [[t - read for t in chunks[:-2]] for read, *chunks in noted]
    return [compute_ttft_s(t) for t in truth], [compute_tpot_s(t, TOKENS) for t in truth]


def measure(base_url: str, requests: int) -> tuple[list[float], list[float]]:
    """TTFT and TPOT in s of ``requests`` answers, as evalgate's client sees them."""
    with Client(base_url, MODEL) as client:
        answers = [client.generate([1], TOKENS) for _ in range(requests)]
    return (
        [compute_ttft_s(a.chunk_ns) for a in answers],
        [compute_tpot_s(a.chunk_ns, a.output_tokens) for a in answers],
    )


def compare(tpot_s: float, requests: int, folder: str) -> dict[str, float]:
    """Median TTFT and TPOT by the server's notes, and the client's median errors, in ms."""
    with launch_stub(tpot_s, folder) as server:
        seen = measure(server.base_url, requests)
        truth = read_truth(server.base_url, requests)
    row = {}
    for name, seen_s, true_s in zip(("ttft", "tpot"), seen, truth, strict=True):
        row[f"{name}_ms"] = to_ms(true_s)
        row[f"{name}_error_ms"] = to_ms([s - t for s, t in zip(seen_s, true_s, strict=True)])
    return row


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
            row = results[f"{tpot_s * 1000:g}"] = compare(tpot_s, args.requests, folder)
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
