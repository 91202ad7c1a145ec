"""What is compiled before the server is ready is what serving asks for; launches are recorded."""

import sys
from types import SimpleNamespace

import pytest
import torch

import kernels_patch.gpu

DIM, KV_HEADS, GROUP = 256, 4, 6


class Recorder:
    """In a Triton kernel's place: what each launch would look its compilation up by."""

    def __init__(self, kernel, found: set[str]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, **constants):
            from triton.backends.compiler import GPUTarget
            from triton.compiler import make_backend
            from triton.runtime.jit import create_function_from_signature

            backend = make_backend(GPUTarget("cuda", 90, 32))
            bind = create_function_from_signature(
                self.kernel.signature, self.kernel.params, backend
            )
            looked_up = bind(*arguments, **constants, num_warps=num_warps, debug=False)[1]
            self.found.add(f"{looked_up} {num_warps}")

        return launch


@pytest.fixture
def found(monkeypatch):
    """What was launched so far; decode, which needs NVRTC, and the device are stand-ins."""
    pytest.importorskip("triton", reason="Triton comes with vLLM's CPU build")
    monkeypatch.setitem(sys.modules, "kernels_patch.gpu.decode", SimpleNamespace(prepare=list))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    from kernels_patch.gpu import ahead, prefix, producer, rope

    assert ahead.prepare is list
    found: set[str] = set()
    for module, name in ((prefix, "_dequantise"), (producer, "_write"), (rope, "_rope_write")):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    yield found
    del sys.modules["kernels_patch.gpu.ahead"]  # it holds the stand-in
    del kernels_patch.gpu.ahead


def compile_ahead(found: set[str], fuses_rope: bool) -> set[str]:
    from kernels_patch.gpu.ahead import compile_kernels

    compile_kernels(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        kv_heads=KV_HEADS,
        group=GROUP,
        head_dim=DIM,
        block_size=64,
        longest_q=2,
        fuses_rope=fuses_rope,
    )
    compiled = set(found)
    found.clear()
    return compiled


def serve(n_tokens: int, rotary_dim: int | None, is_neox: bool = True) -> None:
    """A write as serving makes it: slices of a projection, one of many counters, padded blocks."""
    from kernels_patch.gpu.producer import int8_write
    from kernels_patch.gpu.rope import int8_rope_write

    sizes = [GROUP * KV_HEADS, KV_HEADS, KV_HEADS]
    qkv = torch.zeros(n_tokens, sum(sizes), DIM, dtype=torch.bfloat16)
    q, k, v = qkv.split(sizes, dim=1)
    page = 64 * (2 * DIM + 8)
    memory = torch.zeros(3, KV_HEADS * page + 48, dtype=torch.int8)
    pages = memory[:, : KV_HEADS * page].view(3, KV_HEADS, 64, 2 * DIM + 8)
    slots = torch.zeros(n_tokens, dtype=torch.int64)
    if rotary_dim is None:
        int8_write(k, v, pages, slots)
        return
    angles = torch.zeros(7, rotary_dim, dtype=torch.bfloat16)
    ticks = torch.zeros(3, 8, dtype=torch.int64)[1, 7:]
    positions = torch.zeros(n_tokens + 1, dtype=torch.int64)[1:]
    int8_rope_write(q, k, v, positions, angles, is_neox, pages, slots[:-1], ticks)


@pytest.mark.parametrize("n_tokens", [1, 2, 16, 64, 65, 256, 2242])
def test_every_write_that_serving_makes_was_compiled_ahead(found, n_tokens):
    compiled = compile_ahead(found, fuses_rope=True)
    serve(n_tokens, rotary_dim=None)
    for is_neox in (True, False):
        for rotary_dim in (DIM, 64):
            serve(n_tokens, rotary_dim, is_neox)
    assert len(found) == 3  # the plain write, and each style of the one that rotates
    assert found <= compiled


def test_the_write_that_rotates_is_compiled_only_where_vllm_may_call_it(found):
    with_rope, without = (compile_ahead(found, fuses_rope) for fuses_rope in (True, False))
    assert without < with_rope
    assert len(with_rope - without) == 4  # two launch shapes in two styles
