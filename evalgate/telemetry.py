"""The machine's state beside the measurement: who else uses the CPU, how the GPU is clocked.

Sampled before each pair, so that a stretched measurement can be told from a slow kernel. Reads the
machine only; judges nothing. What cannot be read is None.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import psutil

from evalgate.gpu import open_nvml

# Bits of NVML's clock event reasons that hold a clock down; idle and set clocks are none.
SLOWDOWNS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


class MachineSampler:
    """Takes samples; CPU use is that since the previous one, so the first has none."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float] | None = None

    def sample(self, own_pids: Iterable[int]) -> dict[str, Any]:
        """One sample. ``own_pids``: evalgate and the servers it launched; their descendants count
        as ours too.

        Keys: at, load1, cpu_cores and other_cpu_cores (mean number of cores busy since the last
        sample: in all, and with processes that are not ours), memory_available_bytes, gpus (list of
        {sm_clock_mhz, memory_clock_mhz, temperature_c, power_w, throttle_reasons}, None without).
        """
        now, busy_s = time.monotonic(), _read_busy_s()
        own_s = sum(read_cpu_s(process) for process in _find_tree(own_pids))
        used = other = None
        if self._before is not None:
            then, busy_before, own_before = self._before
            elapsed = max(now - then, 1e-6)
            used = max(0.0, busy_s - busy_before) / elapsed
            # A process of ours that ended takes its time with it: then all of ours is in doubt.
            if own_s >= own_before:
                other = max(0.0, used - (own_s - own_before) / elapsed)
        self._before = (now, busy_s, own_s)
        return {
            "at": datetime.now(UTC).isoformat(),
            "load1": psutil.getloadavg()[0],
            "cpu_cores": _round(used),
            "other_cpu_cores": _round(other),
            "memory_available_bytes": psutil.virtual_memory().available,
            "gpus": _read_gpus(),
        }


def summarise_machine(samples: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What run.json keeps of a run's samples; None without any that says something.

    other_cpu_cores_mean and _max: cores that other processes used. slowdowns: the share of the GPU
    samples in which a clock was held down, by GPU and reason.
    """
    used = [s["other_cpu_cores"] for s in samples if s.get("other_cpu_cores") is not None]
    on_gpu = [s["gpus"] for s in samples if s.get("gpus")]
    found: dict[str, Any] = {}
    if used:
        found = {"other_cpu_cores_mean": sum(used) / len(used), "other_cpu_cores_max": max(used)}
    if on_gpu:
        counts = Counter(name for gpus in on_gpu for name in name_slowdowns(gpus))
        found["slowdowns"] = {name: n / len(on_gpu) for name, n in sorted(counts.items())}
    return found or None


def name_slowdowns(gpus: Sequence[dict[str, Any]] | None) -> list[str]:
    """What holds the clocks of a sample's GPUs down, as ``GPU 0: power cap``."""
    return [
        f"GPU {i}: {reason}"
        for i, gpu in enumerate(gpus or [])
        for bit, reason in SLOWDOWNS.items()
        if (gpu["throttle_reasons"] or 0) & bit
    ]


def _read_busy_s() -> float:
    """Seconds of CPU that all processes used since boot, over all cores."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guest time is counted in user and nice already.
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - idle - guest


def _find_tree(pids: Iterable[int]) -> set[psutil.Process]:
    tree: set[psutil.Process] = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            tree |= {process, *process.children(recursive=True)}
        except psutil.Error:
            continue
    return tree


def read_cpu_s(process: psutil.Process) -> float:
    """Processor seconds that ``process`` has used; 0 when it is gone or not ours to read."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def _read_gpus() -> list[dict[str, Any]] | None:
    with open_nvml() as nvml:
        if nvml is None:
            return None
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:
            return None  # a GPU that was lost ends its server, and must not end what tells of it
        return [_read_gpu(nvml, handle) for handle in handles]


def _read_gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    def read(call: str, *args: Any) -> Any:
        try:
            return getattr(nvml, call)(handle, *args)
        except nvml.NVMLError:
            return None  # not every card measures everything

    power_mw = read("nvmlDeviceGetPowerUsage")
    return {
        "sm_clock_mhz": read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "temperature_c": read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "power_w": None if power_mw is None else power_mw / 1000,
        "throttle_reasons": read("nvmlDeviceGetCurrentClocksThrottleReasons"),
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
