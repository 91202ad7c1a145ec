"""`evalgate selftest`: faults are planted, and each must be caught for the reason that it is.

A gate that never failed proves little. Faults of a run go the way of every stored run (written,
read, judged); faults of a stream the way of every answer. Starts no server and takes seconds; what
needs a machine is `evalgate doctor`'s.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evalgate.errors import EXIT_FAIL, EXIT_PASS, EvidenceError
from evalgate.faults import FAULTS, STREAM_FAULTS, Fault, StreamFault
from evalgate.generation import StreamError, StreamReader
from evalgate.policy import Policy, parse_policy
from evalgate.sound_run import build_sound_run
from evalgate.sse import SseDecoder
from evalgate.store import load_run
from evalgate.verdicts import judge_run

POLICY = parse_policy(
    {
        "rules": [
            {
                "name": "throughput",
                "metric": "weighted_normalised_output_throughput",
                "kind": "non_inferiority",
                "margin_percent": 2.0,
            },
            *(
                {
                    "name": metric.upper(),
                    "metric": metric,
                    "kind": "non_inferiority",
                    "margin_percent": 2.0,
                    "bucket": "*",
                }
                for metric in ("ttft", "tpot")
            ),
            {
                "name": "score",
                "metric": "score",
                "kind": "non_inferiority",
                "margin_points": 10.0,
                "task": "*",
                "bucket": "*",
            },
        ],
        "validity": {"require_routes": ["prefix", "decode"], "min_blocks": 3},
    },
    "selftest",
)


@dataclass(frozen=True)
class Finding:
    """``caught``: the answer was the right one, for the right reason. ``answer``: what it was."""

    name: str
    caught: bool
    answer: str


def run_selftest() -> list[Finding]:
    """Plant every fault in turn."""
    return [
        *(check_fault(fault, POLICY) for fault in FAULTS),
        *(check_stream(fault) for fault in STREAM_FAULTS),
    ]


def check_fault(fault: Fault, policy: Policy) -> Finding:
    files = build_sound_run()
    fault.plant(files)
    with tempfile.TemporaryDirectory(prefix="evalgate-selftest-") as name:
        files.save(Path(name))
        try:
            stored = replace(load_run(Path(name)), label="planted")
            verdict = judge_run(stored, policy, None)
        except EvidenceError as exc:
            status, reasons = "refused", [str(exc).removeprefix(f"{name}/")]
        else:
            failed = [f"{r.rule.name}: {r.reason}" for r in verdict.rules if r.status == "fail"]
            status, reasons = verdict.status, verdict.invalid_reasons or failed
    told = next((reason for reason in reasons if fault.reason in reason), None)
    caught = status == fault.status and (told is not None or not fault.reason)
    shown = told or "; ".join(reasons) or "no reason"
    return Finding(fault.name, caught, status if status == "pass" else f"{status}: {shown}")


def check_stream(fault: StreamFault) -> Finding:
    decoder, reader = SseDecoder(), StreamReader()
    try:
        for number, data in enumerate([*decoder.feed(fault.stream), *decoder.finish()]):
            reader.add(data, number + 1)
        reader.build("", 0, 100)
    except StreamError as exc:
        return Finding(fault.name, exc.category == fault.category, f"{exc.category}: {exc.message}")
    return Finding(fault.name, False, "taken for an answer")


def compute_exit_code(found: Sequence[Finding]) -> int:
    """1 when a fault was not caught."""
    return EXIT_PASS if all(f.caught for f in found) else EXIT_FAIL


def render_text(found: Sequence[Finding]) -> str:
    width = max(len(f.name) for f in found)
    lines = [
        f"{'caught' if f.caught else 'MISSED'}  {f.name:{width}}  {f.answer}" for f in found[1:]
    ]
    missed = sum(not f.caught for f in found)
    sound = f"{'right ' if found[0].caught else 'WRONG '}  {found[0].name:{width}}  "
    end = f"{missed} not caught" if missed else f"all {len(found) - 1} faults are caught"
    return "\n".join([sound + found[0].answer, *lines, "", end])


def render_json(found: Sequence[Finding]) -> str:
    faults = [{"name": f.name, "caught": f.caught, "answer": f.answer} for f in found]
    answer = {"schema_version": 1, "exit_code": compute_exit_code(found), "faults": faults}
    return json.dumps(answer, ensure_ascii=False, indent=1)
