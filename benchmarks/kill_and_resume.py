"""Kill a run by SIGKILL at random moments and resume it: nothing that was stored may be lost.

A run is a process of its own (a fork, so that the imports are paid once), killed at a moment drawn
evenly over the length of a whole run. What is killed takes turns: evalgate; a server; evalgate and
its supervisors in one blow. The servers are the tests' stubs, launched by the real command line in
vLLM's place; they print a line for each answer that they sent, so that what was lost can be
counted. With ``--real``, the spec's own.

After each kill it checks that no process is left that the next start does not name, and after the
resume that every line stored before is stored still, and that the verdict is not invalid.

    python benchmarks/kill_and_resume.py --kills 45 --seed 0
    python benchmarks/kill_and_resume.py --real 5 benchmarks/kill_and_resume.toml --from-s 60

Real servers take two thirds of such a run to start: ``--from-s`` leaves that part out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import psutil

from evalgate import cli, measure  # noqa: F401 (imported before the forks)
from evalgate.leftovers import find_leftovers
from evalgate.tasks import list_tasks

STUB_FOLDER = Path(__file__).resolve().parent.parent / "tests" / "evalgate"
LINE_FILES = ("requests.jsonl", "samples.jsonl", "fidelity.jsonl")
VICTIMS = ("evalgate", "server", "evalgate and supervisors")
ENDED_S = 60.0  # for a server to end after its evalgate: 20 s of grace and some
STUB_SPEC = """
name = "kill-and-resume"
[model]
name = "stub"
path = "{folder}"
[arms.baseline]
args = ["--max-num-batched-tokens", "512"]
env = {{ PYTHONPATH = "{path}", STUB_MODE = "timed children", STUB_TIMING = '{timing}' }}
[arms.candidate]
args = ["--max-num-batched-tokens", "512"]
env = {{ PYTHONPATH = "{path}", STUB_MODE = "timed", STUB_TIMING = '{timing}' }}
[schedule]
blocks = 2
warmup = 1
[load]
output_tokens = 16
[[load.buckets]]
name = "b"
min_tokens = 1200
max_tokens = 2000
prompts = 3
[tasks.retrieval]
limit = 2
[policy.validity]
min_samples = 2
[[policy.rules]]
name = "tpot"
metric = "tpot"
kind = "non_inferiority"
margin_percent = 50.0
"""


Unused = Literal["ended", "not begun"]  # the kill came too late or too early to resume anything


@dataclass(frozen=True)
class Outcome:
    """One kill. ``stored`` lines lay on disk, ``answered`` answers had been sent in all (None: not
    known), ``left`` processes stayed and were named by the next start."""

    victim: str
    stored: int
    answered: int | None
    left: int
    faults: list[str]


def write_stub_spec(folder: Path) -> Path:
    """A spec whose servers are stubs: a package of vLLM's name, found before any other."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for place in (folder / "vllm", folder / "vllm" / "entrypoints", package):
        (place / "__init__.py").touch()
    (package / "api_server.py").write_text("import stub_server\n\nstub_server.main()\n")
    # Slow chunks: a client that a busy machine holds up for a while still tells them apart.
    timing = json.dumps({"pieces": 6, "ttft_s": 0.05, "tpot_s": 0.06})
    spec = folder / "spec.toml"
    path = f"{folder}:{STUB_FOLDER}"
    spec.write_text(STUB_SPEC.format(folder=folder, path=path, timing=timing))
    return spec


def start(folder: Path, *arguments: str) -> BaseProcess:
    """`evalgate run` with these arguments; what it says goes to said.txt in the folder."""

    def run() -> None:
        said = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(said, number)
        cli.main(["run", *arguments, "--format", "json"])

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def wait(process: BaseProcess, limit_s: float | None = None) -> int | None:
    """Its exit code, None when it has not ended in time."""
    process.join(limit_s)
    return process.exitcode


def find_tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.Error:
        return []


def kill(evalgate: psutil.Process, victim: str, rng: random.Random) -> str:
    """SIGKILL to the victim and its name; evalgate's when there is no server to kill."""
    supervisors = [p for p in find_tree(evalgate) if p.ppid() == evalgate.pid]
    servers = [child for p in supervisors for child in p.children()]
    if victim == "server" and servers:
        rng.choice(servers).kill()
        return victim
    evalgate.kill()
    if victim == "evalgate and supervisors" and supervisors:
        for process in supervisors:
            process.kill()
        return victim
    return "evalgate"


def read_lines(run: Path) -> dict[str, list[bytes]]:
    """Whole lines of each file."""
    lines = {}
    for name in LINE_FILES:
        data = (run / name).read_bytes() if (run / name).exists() else b""
        lines[name] = data[: data.rfind(b"\n") + 1].splitlines()
    return lines


def count_answers(run: Path) -> int:
    texts = (log.read_text(errors="replace") for log in run.glob("server-*.log"))
    return sum(text.count("answered /v1/completions") for text in texts)


def kill_once(
    spec: Path, folder: Path, victim: str, after_s: float, rng: random.Random, stub: bool
) -> Outcome | Unused:
    """One run killed and resumed, or why it does not count."""
    run = folder / "run"
    process = start(folder, str(spec), "--out", str(run))
    evalgate = psutil.Process(process.pid)
    if wait(process, after_s) is not None:
        return "ended"
    tree = find_tree(evalgate)
    victim = kill(evalgate, victim, rng)
    wait(process, ENDED_S)
    _, alive = psutil.wait_procs(tree, timeout=ENDED_S if victim != VICTIMS[2] else 25.0)
    left = {p.pid for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
    try:
        return examine(run, folder, victim, left, stub)
    finally:
        for pid in left:
            with suppress(psutil.Error):
                psutil.Process(pid).kill()


def examine(run: Path, folder: Path, victim: str, left: set[int], stub: bool) -> Outcome | Unused:
    """What the kill left on disk and running, and how the resume went."""
    if not (run / "run.json").exists():
        return "not begun"
    faults = []
    if left and victim != VICTIMS[2]:
        faults.append(f"processes left: {sorted(left)}")
    if missed := left - set(find_leftovers()):
        faults.append(f"processes left that the next start cannot know: {sorted(missed)}")
    before = read_lines(run)
    stored = sum(map(len, before.values()))
    answered = count_answers(run) if stub else None
    if answered is not None and answered > stored + 1:
        faults.append(f"{answered} answers were sent, {stored} stored")
    if json.loads((run / "run.json").read_text())["status"] == "complete":
        return "ended"
    faults += resume(folder, run, left)
    after = read_lines(run)
    faults += [
        f"{name} lost lines" for name, kept in before.items() if after[name][: len(kept)] != kept
    ]
    return Outcome(victim, stored, answered, len(left), faults)


def resume(folder: Path, run: Path, left: set[int]) -> list[str]:
    """Continue; what is wrong with how that went."""
    said = folder / "said.txt"
    begun = said.stat().st_size
    code = wait(start(folder, "--resume", str(run)))
    text = said.read_bytes()[begun:].decode(errors="replace")
    faults = []
    if code not in (0, 1, 3):
        verdict = run / "verdict.json"
        why = (
            json.loads(verdict.read_text())["invalid_reasons"] if verdict.exists() else text[-500:]
        )
        faults.append(f"resumed, it exited {code}: {why}")
    named = text.partition("process ids: ")[2].partition(")")[0].split()
    if missing := left - set(map(int, named)):
        faults.append(f"the next start did not name {sorted(missing)}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", nargs=2, metavar=("KILLS", "SPEC"))
    parser.add_argument("--whole-s", type=float, help="length of a whole run, when it is known")
    parser.add_argument("--from-s", type=float, default=0.0, help="no kill before")
    args = parser.parse_args()
    list_tasks()  # imports them
    rng = random.Random(args.seed)
    outcomes: list[Outcome] = []
    unused = 0
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as name:
        folder = Path(name)
        kills = int(args.real[0]) if args.real else args.kills
        spec = Path(args.real[1]) if args.real else write_stub_spec(folder)
        whole_s = args.whole_s or measure_whole_s(spec, folder)
        while len(outcomes) < kills:
            place = folder / f"{len(outcomes)}-{unused}"
            place.mkdir()
            victim = VICTIMS[len(outcomes) % len(VICTIMS)]
            moment = rng.uniform(args.from_s, whole_s)
            begun = time.monotonic()
            outcome = kill_once(spec, place, victim, moment, rng, stub=not args.real)
            if not isinstance(outcome, Outcome):
                unused += 1
                if outcome == "ended":  # the first run may have been a slow one, others at work
                    whole_s = min(whole_s, time.monotonic() - begun)
                continue
            outcomes.append(outcome)
            shown = "; ".join(outcome.faults) or "ok"
            print(
                f"{len(outcomes):3d}  {moment:6.1f} s  {outcome.victim:25s} stored "
                f"{outcome.stored:3d}, left {outcome.left}: {shown}",
                flush=True,
            )
    report(args.seed, outcomes, unused, whole_s)


def measure_whole_s(spec: Path, folder: Path) -> float:
    """Length of a run that nobody kills."""
    (folder / "whole").mkdir()
    begun = time.monotonic()
    process = start(folder / "whole", str(spec), "--out", str(folder / "whole" / "run"))
    if wait(process) not in (0, 1, 3):
        sys.exit((folder / "whole" / "said.txt").read_text(errors="replace"))
    return time.monotonic() - begun


def report(seed: int, outcomes: list[Outcome], unused: int, whole_s: float) -> None:
    faulty = [outcome for outcome in outcomes if outcome.faults]
    lost = [o.answered - o.stored for o in outcomes if o.answered is not None]
    summary = {
        "benchmark": "kill_and_resume",
        "command": " ".join(sys.argv),
        "seed": seed,
        "kills": len(outcomes),
        "victims": dict(Counter(o.victim for o in outcomes)),
        "killed_before_a_record_or_after_the_end": unused,
        "with_stored_lines": sum(o.stored > 0 for o in outcomes),
        "answers_lost_most": max(lost) if lost else None,
        "left_and_named": sum(o.left for o in outcomes),
        "faulty": len(faulty),
        "whole_run_s": round(whole_s, 1),
        "python": platform.python_version(),
        "machine": platform.platform(),
    }
    print(json.dumps(summary, separators=(",", ":")))
    raise SystemExit(1 if faulty else 0)


if __name__ == "__main__":
    main()
