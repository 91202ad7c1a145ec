"""Start and stop a launched server many times: nothing of it may stay behind.

The server is the tests' stub, so that what is measured is evalgate's own part of a start and a
stop. After the cycles it counts processes below this one, listening sockets, open files of this
process and folders in the temporary directory, against before.

    python benchmarks/server_cycles.py --cycles 200
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from evalgate.server import LaunchPlan, Server

STUB_FOLDER = Path(__file__).resolve().parent.parent / "tests" / "evalgate"


def count_all(folder: str) -> dict[str, int]:
    me = psutil.Process()
    return {
        "processes": len(me.children(recursive=True)),
        "sockets": sum(c.status == psutil.CONN_LISTEN for c in me.net_connections("tcp")),
        "files": me.num_fds(),
        "folders": len(list(Path(folder).glob("evalgate-server-*"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--cycles", type=int, default=200)
    args = parser.parse_args()
    starts_s, stops_s, ports = [], [], set()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # apart from the folders of other servers on this machine
        before = count_all(folder)
        for cycle in range(args.cycles):
            plan = LaunchPlan(
                arm="stub",
                block=cycle,
                python=sys.executable,
                args=[],
                env={
                    "PYTHONPATH": str(STUB_FOLDER),
                    "STUB_MODE": "children" if cycle % 2 else "",
                },
                model_path="m",
                model_name="m",
                log_path=Path(folder, f"{cycle}.log"),
                start_timeout_s=60,
                module="stub_server",
            )
            server = Server.launch(plan)
            starts_s.append(server.cold_start_s or 0.0)
            ports.add(server.port)
            begun = time.monotonic()
            server.stop()
            stops_s.append(time.monotonic() - begun)
        after = count_all(folder)
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
    leaked = {key: after[key] - before[key] for key in before} | {"ports": len(ports & listening)}
    print(f"{'':10s}{'median s':>10s}{'max s':>10s}")
    for name, values in (("start", starts_s), ("stop", stops_s)):
        print(f"{name:10s}{statistics.median(values):10.3f}{max(values):10.3f}")
    print(f"left behind after {args.cycles} cycles: {leaked}")
    summary = {
        "benchmark": "server_cycles",
        "cycles": args.cycles,
        "leaked": leaked,
        "start_median_s": round(statistics.median(starts_s), 3),
        "stop_median_s": round(statistics.median(stops_s), 3),
        "python": platform.python_version(),
        "machine": platform.platform(),
    }
    print(json.dumps(summary, separators=(",", ":")))
    raise SystemExit(1 if any(leaked.values()) else 0)


if __name__ == "__main__":
    main()
