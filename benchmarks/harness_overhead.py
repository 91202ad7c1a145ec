"""What evalgate itself costs, over the time in which servers worked for it.

Of a stored run: between the first measured request of a block and the end of its last one, the time
in which no request was under way, over the time in which one was (requests are serial).

With ``--run``, of a whole run made now: what is neither a server's start, nor a request or another
call to a server, nor a server's end, over all of these; imports, prompts, records, verdict and
reports are in it.

    python benchmarks/harness_overhead.py results/example RUN...
    python benchmarks/harness_overhead.py --run spec.toml
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from evalgate import cli
from evalgate.client import Client
from evalgate.records import RequestRecord, StoredRun
from evalgate.server import Server
from evalgate.store import load_run


def read_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def compute_request_s(record: RequestRecord) -> float:
    if record.end_ns is None:
        raise SystemExit(f"{record.arm} {record.key} failed: its length is not known")
    return record.end_ns / 1e9


def compute_load_share(stored: StoredRun) -> tuple[float, float]:
    """(seconds between requests, seconds in requests) over the measured load of all blocks."""
    alternating = stored.run.spec["schedule"]["mode"] == "alternating"
    series: dict[tuple[int, str], list[RequestRecord]] = defaultdict(list)
    for record in stored.requests:
        if record.phase == "measure":
            series[record.block, record.arm if alternating else ""].append(record)
    idle = busy = 0.0
    for records in series.values():
        records.sort(key=lambda r: read_s(r.started_at))
        last = records[-1]
        wall = read_s(last.started_at) + compute_request_s(last) - read_s(records[0].started_at)
        in_requests = sum(map(compute_request_s, records))
        busy += in_requests
        idle += wall - in_requests
    return idle, busy


def time_calls(owner: Any, name: str, spent_s: dict[str, float]) -> None:
    """From now on ``owner.name`` adds its time to ``spent_s[name]``."""
    inner: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(inner)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        try:
            return inner(*args, **kwargs)
        finally:
            spent_s[name] += time.monotonic() - begun

    setattr(owner, name, timed)


def measure_run(spec: str) -> dict[str, Any]:
    """Seconds of a run of ``spec``, from the start of this process, by what they went to."""
    spent_s: dict[str, float] = defaultdict(float)
    # None of these calls another. A class method is bound already, so it keeps its class.
    for owner, name in (
        (Server, "launch"),
        (Server, "stop"),
        (Client, "_stream"),
        (Client, "_call"),
    ):
        time_calls(owner, name, spent_s)
    with tempfile.TemporaryDirectory() as folder:
        code = cli._run(["run", spec, "--out", f"{folder}/run"])
    whole_s = time.time() - psutil.Process().create_time()
    served_s = sum(spent_s.values())
    return {
        "spec": Path(spec).name,
        "exit_code": code,
        "starts_s": round(spent_s["launch"], 2),
        "requests_s": round(spent_s["_stream"] + spent_s["_call"], 2),
        "stops_s": round(spent_s["stop"], 2),
        "rest_s": round(whole_s - served_s, 2),
        "percent": round(100 * (whole_s - served_s) / served_s, 2),
    }


def measure_stored(name: str) -> dict[str, Any]:
    stored = load_run(Path(name))
    idle, busy = compute_load_share(stored)
    return {
        "run": Path(name).name,
        "requests": sum(r.phase == "measure" for r in stored.requests),
        "in_requests_s": round(busy, 2),
        "between_s": round(idle, 2),
        "percent": round(100 * idle / busy, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--run", metavar="SPEC")
    args = parser.parse_args()
    rows = [measure_stored(name) for name in args.runs]
    if args.run:
        rows.append(measure_run(args.run))
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(json.dumps({"benchmark": "harness_overhead", "rows": rows}, separators=(",", ":")))


if __name__ == "__main__":
    main()
