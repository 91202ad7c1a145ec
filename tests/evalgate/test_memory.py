"""Which devices a server fills and what is free on them, NVIDIA's library scripted."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from evalgate import memory as memory_module
from evalgate.memory import GIB, Memory, parse_memory_fraction, read_memory, select_used

GPUS = [Memory(f"GPU {i}", GIB, GIB, (), f"GPU-{name}") for i, name in enumerate("abcd")]
RAM = [Memory("RAM", GIB, GIB, ())]


class NVMLError(Exception):
    pass


def refuse(*_: Any) -> None:
    raise NVMLError


def script(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(free=index * GIB, total=2 * GIB),
        nvmlDeviceGetComputeRunningProcesses=lambda index: [SimpleNamespace(pid=9 - index)],
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
    )
    vars(nvml).update(calls)

    @contextmanager
    def open_scripted():
        yield nvml

    monkeypatch.setattr(memory_module, "open_nvml", open_scripted)


def test_each_gpu_is_told_with_its_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch)
    assert read_memory() == [
        Memory("GPU 0", 0, 2 * GIB, (9,), "GPU-0"),
        Memory("GPU 1", GIB, 2 * GIB, (8,), "GPU-1"),
    ]


def test_a_gpu_without_memory_of_its_own_leaves_the_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script(monkeypatch, nvmlDeviceGetMemoryInfo=refuse)
    assert [memory.device for memory in read_memory()] == ["RAM"]


def test_what_a_driver_does_not_tell_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, nvmlDeviceGetComputeRunningProcesses=refuse, nvmlDeviceGetUUID=refuse)
    assert read_memory()[1] == Memory("GPU 1", GIB, 2 * GIB, ())


@pytest.mark.parametrize(
    ("visible", "args", "used"),
    [
        (None, [], [0]),
        ("", [], [0]),
        ("3", [], [3]),
        ("2, 1", ["--tensor-parallel-size", "2"], [2, 1]),
        (None, ["-tp=2", "--pipeline_parallel_size", "2"], [0, 1, 2, 3]),
        (None, ["--tensor-parallel-size", "many"], [0]),
        ("GPU-c", [], [2]),
        ("MIG-1", [], []),
        ("7", [], []),
    ],
)
def test_a_server_fills_the_first_gpus_that_it_sees(
    visible: str | None, args: list[str], used: list[int]
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert select_used(GPUS, env, args) == [GPUS[i] for i in used]


def test_without_a_gpu_the_machines_memory_is_used() -> None:
    assert select_used(RAM, {"CUDA_VISIBLE_DEVICES": "3"}, []) == RAM


def test_a_share_counts_in_both_spellings_and_not_beside_bytes() -> None:
    assert parse_memory_fraction(["--gpu_memory_utilization=0.5"]) == 0.5
    both = ["--gpu-memory-utilization", "0.5", "--kv_cache_memory_bytes", "9"]
    assert parse_memory_fraction(both) is None
