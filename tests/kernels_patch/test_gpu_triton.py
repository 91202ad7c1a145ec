"""The GPU's Triton kernels without a GPU: under Triton's interpreter, and compiled for one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BLOCK_SIZE, KV_HEADS = 16, 4


@pytest.mark.parametrize(
    "script", ["interpreted.py", "interpreted_rope.py", "interpreted_solve.py"]
)
def test_what_the_kernels_compute_is_the_reference_s_under_the_interpreter(script):
    """``interpreted``: written pages and unpacked ones; ``interpreted_rope``: the write that
    rotates, and NaNs; ``interpreted_solve``: ``solve``."""
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


def specialise_rope(backend, head_dim=64, first=0, layer=0, neox=True, rotary_dim=None):
    """Of the launch of the write that rotates, over slices of a projection from token ``first``."""
    from kernels_patch.gpu.layout import UnitLayout
    from kernels_patch.gpu.rope import _rope_write

    layout = UnitLayout(BLOCK_SIZE, head_dim)
    pages = torch.zeros(2, KV_HEADS, BLOCK_SIZE, layout.bytes_per_token, dtype=torch.int8)
    x = torch.zeros(9, 5 * KV_HEADS, head_dim, dtype=torch.bfloat16)
    q, k, v = x.split([3 * KV_HEADS, KV_HEADS, KV_HEADS], dim=1)
    angles = torch.zeros(99, rotary_dim or head_dim, dtype=torch.bfloat16)
    slots = torch.zeros(2, 9, dtype=torch.int64)[:, first:]
    ticks = torch.zeros(4, 7, dtype=torch.int64)[layer, 2:3]
    return _rope_write, specialise(
        backend, _rope_write, q, k, v, slots[0], angles, pages, slots[1], ticks,
        9 - first, 9 - first, angles.shape[1] // 2,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        pages.stride(0), pages.stride(1),
        KV_HEADS=KV_HEADS, BLOCK_SIZE=BLOCK_SIZE, D=head_dim, UNIT_BYTES=layout.unit_bytes,
        TOKENS=8, NEOX=neox,
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
    for launch in (specialise_unpacking, specialise_rope):
        assert launch(hopper, first=first, layer=layer) == launch(hopper)


def test_a_model_that_rotates_a_part_of_its_heads_is_served_by_what_is_compiled_ahead(hopper):
    assert specialise_rope(hopper, 256, rotary_dim=64) == specialise_rope(hopper, 256)


@pytest.mark.filterwarnings("ignore")  # of the next Triton's defaults
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "launch", [specialise_unpacking, specialise_write, specialise_rope, specialise_solve]
)
def test_the_kernels_compile_for_hopper_with_wide_loads(hopper, launch, head_dim):
    ptx = compile_for(hopper, *launch(hopper, head_dim))
    wide = "ld.global.v4" if head_dim > 64 else "ld.global.v"
    assert wide in ptx
    assert "ld.global.b8" not in ptx  # never a byte at a time


@pytest.mark.filterwarnings("ignore")
def test_the_largest_magnitude_is_found_among_integers_which_lose_no_nan(hopper):
    ptx = compile_for(hopper, *specialise_write(hopper, 256))
    assert "max.s32" in ptx
    assert "max.f32" not in ptx


@pytest.mark.filterwarnings("ignore")
def test_no_lane_writes_a_rotated_element_before_all_have_read_theirs(hopper):
    ptx = compile_for(hopper, *specialise_rope(hopper, 256))
    queries = ptx[: ptx.index("st.global")]  # the first stores are those of the first branch
    assert "bar.sync" in queries[queries.rindex("ld.global") :]


def compile_for(hopper, kernel, arguments) -> str:
    """The PTX of a kernel for these (type, attributes)."""
    from triton import compile
    from triton.compiler import ASTSource

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
    return compile(source, target=hopper.target, options={"num_warps": 4}).asm["ptx"]
