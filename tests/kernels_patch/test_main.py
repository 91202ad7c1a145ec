"""``python -m kernels_patch``: whose kernels are checked and timed; nothing is run here."""

import sys
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from kernels_patch import __main__ as program
from kernels_patch import bench, native


def run(*arguments: str):
    return CliRunner().invoke(program.main, arguments)


@pytest.fixture
def hopper(monkeypatch):
    """A machine with a Hopper GPU whose check fails and whose bench holds."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a Hopper")
    for name, code in (("check", 1), ("bench", 0)):
        module = ModuleType(f"kernels_patch.gpu.{name}")
        module.main = lambda code=code: code
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(("action", "code"), [("check", 1), ("bench", 0)])
@pytest.mark.parametrize("chosen", [(), ("--device", "gpu")])
def test_where_a_hopper_gpu_is_its_kernels_are_meant(hopper, action, code, chosen):
    result = run(action, *chosen)
    assert result.exit_code == code
    assert result.output == "on a Hopper (--device cpu for the CPU's kernels)\n"


@pytest.mark.parametrize(
    "arguments",
    [("check", "--device", "cpu"), ("check", "--quick"), ("bench", "--route", "decode")],
)
def test_an_option_of_the_cpu_s_chooses_the_cpu(hopper, monkeypatch, arguments):
    def unavailable(*isa):
        raise native.NativeUnavailable("the CPU's kernels were asked for")

    monkeypatch.setattr(native, "load", unavailable)
    monkeypatch.setattr(native, "list_instruction_sets", unavailable)
    assert isinstance(run(*arguments).exception, native.NativeUnavailable)


def test_what_the_gpu_does_not_take_is_refused_by_name(hopper):
    result = run("bench", "--device", "gpu", "--heads", "9/3x64", "--quick")
    assert result.exit_code == 2
    assert "--heads, --quick chooses among the CPU's: leave it out" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    result = run("check", "--device", "gpu")
    assert result.exit_code == 2
    assert "no Hopper GPU" in result.output


def test_a_part_of_pytorch_s_cuda_wheels_that_is_missing_is_named(hopper, monkeypatch):
    monkeypatch.delitem(sys.modules, "kernels_patch.gpu.check")
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "kernels_patch.gpu.nvrtc", None)
    monkeypatch.delitem(sys.modules, "kernels_patch.gpu.decode", raising=False)
    result = run("check")
    assert result.exit_code == 1
    assert "the GPU kernels need kernels_patch.gpu.nvrtc" in result.output


def test_a_vllm_without_the_cpu_s_attention_is_no_yardstick(monkeypatch):
    """vLLM's CUDA builds: SDPA is, and nothing falls over."""

    class Nothing:
        pass

    monkeypatch.setattr(torch, "ops", type("Ops", (), {"_C": Nothing()})())
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(sys.modules["vllm"], "_custom_ops", None, raising=False)
    assert bench.has_stock() is False
