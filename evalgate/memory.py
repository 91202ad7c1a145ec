"""Is there room for a server, and who holds it if not: RAM and GPUs, before a start is tried.

Also finds servers that an earlier evalgate left behind: each carries its owner's process id in its
environment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from evalgate.errors import ServerStartError
from evalgate.gpu import open_nvml

OWNER_VARIABLE = "EVALGATE_OWNER"
FRACTION_FLAGS = ("--gpu-memory-utilization", "--gpu_memory_utilization")
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one device; ``holders``: ids of processes known to hold some of it."""

    device: str
    free_bytes: int
    total_bytes: int
    holders: tuple[int, ...]


def read_memory() -> list[Memory]:
    """Each GPU where there is one, else the machine's RAM with servers left behind as holders."""
    with open_nvml() as nvml:
        if nvml is None:
            ram = psutil.virtual_memory()
            return [Memory("RAM", ram.available, ram.total, tuple(find_leftovers()))]
        devices = []
        for i in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(i)
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
            pids = (p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
            devices.append(Memory(f"GPU {i}", info.free, info.total, tuple(sorted(pids))))
        return devices


def check_memory(memories: Sequence[Memory], fraction: float) -> None:
    """Raise ServerStartError when a device has less than ``fraction`` of its memory free.

    vLLM refuses such a start itself, but after a minute and without naming who holds the rest.
    """
    for memory in memories:
        if memory.free_bytes < fraction * memory.total_bytes:
            share = memory.free_bytes / memory.total_bytes
            holders = ", ".join(map(str, memory.holders)) or "none that can be seen"
            raise ServerStartError(
                f"{memory.device} has {memory.free_bytes / GIB:.2f} of "
                f"{memory.total_bytes / GIB:.2f} GiB free ({share:.1%}), and the server asks for "
                f"{fraction:.0%}: end what holds it (process ids: {holders}), or lower "
                "--gpu-memory-utilization"
            )


def parse_memory_fraction(args: Sequence[str]) -> float | None:
    """--gpu-memory-utilization in a server's arguments, None when it is not set or not used.

    vLLM does not look at it when the KV cache is given in bytes.
    """
    if any(arg.split("=")[0] == "--kv-cache-memory-bytes" for arg in args):
        return None
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag in FRACTION_FLAGS:
            text = value if equals else (args[i + 1] if i + 1 < len(args) else "")
            try:
                return float(text)
            except ValueError:
                return None
    return None


def find_leftovers() -> list[int]:
    """Process ids of servers whose evalgate is gone."""
    left = []
    for process in psutil.process_iter():
        try:
            owner = process.environ().get(OWNER_VARIABLE)
            zombie = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue  # another user's, or just ended
        if owner is not None and not zombie and not _is_alive(owner):
            left.append(process.pid)
    return sorted(left)


def build_owner() -> str:
    """Our process id and its start, as an id alone is used again."""
    return f"{os.getpid()}@{psutil.Process().create_time():.2f}"


def _is_alive(owner: str) -> bool:
    pid, _, start = owner.partition("@")
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" == start
    except (ValueError, psutil.Error):
        return False
