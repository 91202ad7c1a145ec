"""The GPU's Triton kernels without a GPU: under Triton's interpreter, and compiled for one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BLOCK_SIZE, KV_HEADS = 16, 4


@pytest.mark.parametrize("script", ["interpreted.py", "interpreted_solve.py"])
def test_what_the_kernels_compute_is_the_reference_s_under_the_interpreter(script):
    """``interpreted``: written pages and unpacked ones; ``interpreted_solve``: ``solve``."""
    pytest.importorskip("triton", reason="Triton comes with vLLM's CPU build")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script))],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("interpreted\n")


@pytest.fixture
def hopper():
    """Triton's compiler for Hopper, which needs no GPU."""
    pytest.importorskip("triton", reason="Triton comes with vLLM's CPU build")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return make_backend(GPUTarget("cuda", 90, 32))


def specialise(backend, kernel, *arguments, **constants):
    """(type, attributes) of each argument, as a launch would look its compilation up."""
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return bind(*arguments, **constants, num_warps=4, debug=False)[1]


def specialise_unpacking(backend, head_dim=64, first=0, layer=0):
    """Of the unpacking kernel's launch for a run that begins with request ``first``."""
    from kernels_patch.gpu.layout import UnitLayout
    from kernels_patch.gpu.prefix import _dequantise

    layout = UnitLayout(BLOCK_SIZE, head_dim)
    pages = torch.zeros(2, KV_HEADS, BLOCK_SIZE, layout.bytes_per_token, dtype=torch.int8)
    table = torch.zeros(4, 7, dtype=torch.int32)[first:]
    lens = torch.zeros(4, dtype=torch.int32)
    scratch = torch.zeros(2, 5, KV_HEADS, head_dim, dtype=torch.bfloat16)
    ticks = torch.zeros(4, 7, dtype=torch.int64)[layer, 2:3]
    return _dequantise, specialise(
        backend, _dequantise, pages, table, lens[first:], lens, *scratch, ticks,
        table.stride(0), pages.stride(0), pages.stride(1), scratch.stride(1),
        BLOCK_SIZE=BLOCK_SIZE, D=head_dim, UNIT_BYTES=layout.unit_bytes,
    )  # fmt: skip


def specialise_write(backend, head_dim):
    from kernels_patch.gpu.layout import UnitLayout
    from kernels_patch.gpu.producer import _write

    layout = UnitLayout(BLOCK_SIZE, head_dim)
    pages = torch.zeros(2, KV_HEADS, BLOCK_SIZE, layout.bytes_per_token, dtype=torch.int8)
    x = torch.zeros(9, KV_HEADS, head_dim, dtype=torch.bfloat16)
    slots = torch.zeros(9, dtype=torch.int64)
    return _write, specialise(
        backend, _write, x, x, pages, slots, 9, x.stride(0), x.stride(1), x.stride(0), x.stride(1),
        pages.stride(0), pages.stride(1),
        BLOCK_SIZE=BLOCK_SIZE, D=head_dim, UNIT_BYTES=layout.unit_bytes, TOKENS=8, SPLIT=False,
    )  # fmt: skip


def specialise_solve(backend, head_dim):
    from kernels_patch.gpu.solve import PARTITION_TOKENS, TILE_TOKENS, _attend

    x, s = torch.zeros(2, 9, head_dim, dtype=torch.int8), torch.zeros(2, 9)
    sums = torch.zeros(2, 1, head_dim)
    return _attend, specialise(
        backend, _attend, sums, x, x, s, s, sums, s, s, 9, head_dim, 0.125,
        WIDTH=head_dim, PARTITION=PARTITION_TOKENS, TILE=TILE_TOKENS,
    )  # fmt: skip


@pytest.mark.parametrize(("first", "layer"), [(1, 0), (2, 1), (3, 3), (0, 1)])
def test_no_request_and_no_layer_asks_for_another_compilation_than_the_first(hopper, first, layer):
    """What is compiled ahead serves all: slices of a batch are aligned as they fall."""
    assert specialise_unpacking(hopper, first=first, layer=layer) == specialise_unpacking(hopper)


@pytest.mark.filterwarnings("ignore")  # of the next Triton's defaults
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("launch", [specialise_unpacking, specialise_write, specialise_solve])
def test_the_kernels_compile_for_hopper_with_wide_loads(hopper, launch, head_dim):
    from triton import compile
    from triton.compiler import ASTSource

    kernel, arguments = launch(hopper, head_dim)
    source = ASTSource(
        kernel,
        dict(zip(kernel.arg_names, (kind for kind, _ in arguments), strict=True)),
        {(at,): value for at, (kind, value) in enumerate(arguments) if kind == "constexpr"},
        {
            (at,): hopper.parse_attr(value)
            for at, (kind, value) in enumerate(arguments)
            if kind != "constexpr" and value
        },
    )
    ptx = compile(source, target=hopper.target, options={"num_warps": 4}).asm["ptx"]
    wide = "ld.global.v4" if head_dim > 64 else "ld.global.v"
    assert wide in ptx
    assert "ld.global.b8" not in ptx  # never a byte at a time
