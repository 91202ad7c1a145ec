"""Is there room for a server, and who holds it if not: RAM and GPUs, before a start is tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from evalgate.errors import ServerStartError
from evalgate.gpu import open_nvml
from evalgate.leftovers import find_leftovers

FRACTION_FLAGS = ("--gpu-memory-utilization", "--gpu_memory_utilization")
GIB = 2**30
HOLDER_SHARE = 0.05  # of the machine's RAM: who has less is not worth naming


@dataclass(frozen=True)
class Memory:
    """Bytes of one device; ``holders``: ids of processes known to hold some of it."""

    device: str
    free_bytes: int
    total_bytes: int
    holders: tuple[int, ...]


def read_memory() -> list[Memory]:
    """Each GPU where there is one, else the machine's RAM; its holders are the processes with a
    good share of it, and servers left behind."""
    with open_nvml() as nvml:
        if nvml is None:
            ram = psutil.virtual_memory()
            holders = {*find_leftovers(), *_find_large(HOLDER_SHARE * ram.total)}
            return [Memory("RAM", ram.available, ram.total, tuple(sorted(holders)))]
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
            raise ServerStartError(
                f"{describe_memory(memory)}, and the server asks for {fraction:.0%}: end what "
                f"holds it ({describe_holders(memory)}), or lower --gpu-memory-utilization"
            )


def describe_memory(memory: Memory) -> str:
    return (
        f"{memory.device} has {memory.free_bytes / GIB:.2f} of {memory.total_bytes / GIB:.2f} GiB "
        f"free ({memory.free_bytes / memory.total_bytes:.1%})"
    )


def describe_holders(memory: Memory) -> str:
    return f"process ids: {', '.join(map(str, memory.holders)) or 'none that can be seen'}"


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


def _find_large(least_bytes: float) -> list[int]:
    """Ids of processes with at least so much memory of their own."""
    found = []
    for process in psutil.process_iter():
        try:
            memory = process.memory_info()
        except psutil.Error:
            continue  # another user's, or just ended
        # What is shared (a mapped model file) comes back by itself when it is needed.
        if memory.rss - getattr(memory, "shared", 0) >= least_bytes:
            found.append(process.pid)
    return found
