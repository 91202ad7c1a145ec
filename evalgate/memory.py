"""Is there room for a server, and who holds it if not: RAM and GPUs, before a start is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from evalgate.arguments import count_engines, count_workers, find_value
from evalgate.errors import ServerStartError
from evalgate.gpu import open_nvml
from evalgate.leftovers import find_leftovers

FRACTION_FLAG = "--gpu-memory-utilization"
BYTES_FLAG = "--kv-cache-memory-bytes"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
GIB = 2**30
HOLDER_SHARE = 0.05  # of the machine's RAM: who has less is not worth naming


@dataclass(frozen=True)
class Memory:
    """Bytes of one device; ``holders``: ids of processes known to hold some of it; ``uuid``: its
    name for life, where it has one."""

    device: str
    free_bytes: int
    total_bytes: int
    holders: tuple[int, ...]
    uuid: str | None = None


def read_memory() -> list[Memory]:
    """Each GPU with memory of its own where there is one, else the machine's RAM; its holders are
    the processes with a good share of it, and servers left behind."""
    with open_nvml() as nvml:
        if nvml is not None:
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            gpus = [_read_gpu(nvml, i, handle) for i, handle in enumerate(handles)]
            if known := [gpu for gpu in gpus if gpu is not None]:
                return known
    ram = psutil.virtual_memory()
    holders = {*find_leftovers(), *_find_large(HOLDER_SHARE * ram.total)}
    return [Memory("RAM", ram.available, ram.total, tuple(sorted(holders)))]


def _read_gpu(nvml: Any, index: int, handle: Any) -> Memory | None:
    """One GPU's memory; None of a card that shares the machine's, as it does not tell any."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return None
    holders: list[int] = []
    uuid = None
    with suppress(nvml.NVMLError):  # not told to everybody
        holders = [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    with suppress(nvml.NVMLError):
        uuid = nvml.nvmlDeviceGetUUID(handle)
        uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
    return Memory(f"GPU {index}", info.free, info.total, tuple(sorted(holders)), uuid)


def select_used(
    memories: Sequence[Memory], env: Mapping[str, str], args: Sequence[str]
) -> list[Memory]:
    """The devices that a server with this environment and these arguments would fill: the first
    ones that it sees, as many as it splits the model over. Empty when that cannot be known."""
    seen = list(memories)
    if memories and memories[0].device != "RAM" and (named := env.get(DEVICES_VARIABLE)):
        found = [_find_device(memories, name.strip()) for name in named.split(",")]
        if None in found:
            return []
        seen = [device for device in found if device is not None]
    return seen[: count_workers(args) * count_engines(args)]


def _find_device(memories: Sequence[Memory], name: str) -> Memory | None:
    """The GPU of that number, or of that UUID or the beginning of one."""
    for memory in memories:
        if memory.device == f"GPU {name}":
            return memory
        if name and memory.uuid is not None and memory.uuid.startswith(name):
            return memory
    return None


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
    if find_value(args, (BYTES_FLAG,)) is not None:
        return None
    try:
        return float(find_value(args, (FRACTION_FLAG,)) or "")
    except ValueError:
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
