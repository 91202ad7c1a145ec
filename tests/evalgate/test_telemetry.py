"""The machine's state: load of others is told from our own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from evalgate import telemetry
from evalgate.telemetry import MachineSampler, name_slowdowns, read_cpu_s, summarise_machine

SPIN = "while True: pass"


@pytest.fixture
def spinner() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    yield process
    process.kill()
    process.wait()


def test_the_first_sample_has_no_cpu_use() -> None:
    sample = MachineSampler().sample([os.getpid()])
    assert (sample["cpu_cores"], sample["other_cpu_cores"]) == (None, None)
    assert sample["memory_available_bytes"] > 0


def test_a_process_that_is_ours_is_not_other_load(spinner: subprocess.Popen[bytes]) -> None:
    """The same spinning process, seen as ours and as another's, over the same time."""
    ours, theirs = MachineSampler(), MachineSampler()
    child = psutil.Process(spinner.pid)
    ours.sample([os.getpid()])  # the spinner is a child of this process
    theirs.sample([])
    began, before = time.monotonic(), read_cpu_s(child)
    while read_cpu_s(child) - before < 0.5:  # longer where others keep the machine busy
        time.sleep(0.1)
    seen_as_ours = ours.sample([os.getpid()])["other_cpu_cores"]
    seen_as_theirs = theirs.sample([])["other_cpu_cores"]
    assert seen_as_theirs - seen_as_ours > 0.5 * 0.5 / (time.monotonic() - began)


def test_time_is_counted_from_the_processes_times(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, own, clock = iter([100.0, 115.0]), iter([10.0, 16.0]), iter([0.0, 10.0])
    monkeypatch.setattr(telemetry, "_read_busy_s", lambda: next(busy))
    monkeypatch.setattr(telemetry, "read_cpu_s", lambda process: next(own))
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: next(clock))
    sampler = MachineSampler()
    monkeypatch.setattr(telemetry, "_find_tree", lambda pids: {object()})
    sampler.sample([1])
    sample = sampler.sample([1])
    assert sample["cpu_cores"] == 1.5  # 15 s in 10
    assert sample["other_cpu_cores"] == 0.9  # of which 6 s are ours


def test_a_gpu_value_that_the_card_does_not_give_is_none() -> None:
    class NVMLError(Exception):
        pass

    def refuse(*_: Any) -> None:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetPowerUsage=lambda handle: 312_500,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetTemperature=refuse,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 4,
    )
    assert telemetry._read_gpu(nvml, object()) == {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "temperature_c": None,
        "power_w": 312.5,
        "throttle_reasons": 4,
    }


def test_a_gpu_that_was_lost_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def lose() -> int:
        raise NVMLError("GPU is lost")

    @contextmanager
    def open_scripted() -> Iterator[Any]:
        yield SimpleNamespace(NVMLError=NVMLError, nvmlDeviceGetCount=lose)

    monkeypatch.setattr(telemetry, "open_nvml", open_scripted)
    assert MachineSampler().sample([])["gpus"] is None


def make_gpu(reasons: int | None) -> dict[str, Any]:
    return {"throttle_reasons": reasons}


def test_what_holds_a_clock_down_is_named_and_idling_is_not() -> None:
    # 0x1 idle, 0x2 clocks set by someone, 0x4 power cap, 0x40 temperature.
    assert name_slowdowns([make_gpu(0x3), make_gpu(0x44)]) == [
        "GPU 1: power cap",
        "GPU 1: temperature (hardware)",
    ]
    assert name_slowdowns([make_gpu(None)]) == name_slowdowns(None) == []


def test_a_runs_samples_become_shares_and_means() -> None:
    samples = [
        {"other_cpu_cores": None, "gpus": [make_gpu(0x4)]},
        {"other_cpu_cores": 0.5, "gpus": [make_gpu(0)]},
        {"other_cpu_cores": 0.1, "gpus": [make_gpu(0x4)]},
        {"other_cpu_cores": 0.3, "gpus": [make_gpu(0x40)]},
    ]
    assert summarise_machine(samples) == {
        "other_cpu_cores_mean": pytest.approx(0.3),
        "other_cpu_cores_max": 0.5,
        "slowdowns": {"GPU 0: power cap": 0.5, "GPU 0: temperature (hardware)": 0.25},
    }
    assert summarise_machine([{"other_cpu_cores": None, "gpus": None}]) is None
    assert "slowdowns" not in summarise_machine([{"other_cpu_cores": 0.1, "gpus": None}])
