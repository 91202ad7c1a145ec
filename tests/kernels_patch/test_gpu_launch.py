"""What decode's launch is given, and what is refused before it; NVRTC and the GPU are stand-ins."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import kernels_patch.gpu

SMS, STREAM = 132, 7


@pytest.fixture
def launch(monkeypatch):
    """``launch(**change)`` decodes with a workspace for 4 requests of 12/2 heads of 64 and up to 3
    query positions; answers with the grid and the arguments of the kernel that was launched."""
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=SMS),
    )
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM)
    )
    from kernels_patch.gpu import decode, nvrtc

    launched = []

    class Kernel:
        def launch_cooperative(self, grid, threads, arguments, stream):
            names = (name for name, _ in arguments._fields_)
            values = {name: getattr(arguments, name) for name in names}
            launched.append(values | {"grid": grid, "threads": threads, "stream": stream})

    monkeypatch.setattr(nvrtc, "load", lambda build, name, shared_bytes: Kernel())
    decode._kernel.cache_clear()
    workspace = decode.DecodeWorkspace(torch.device("cpu"), 4, 2, 3 * 6, 64)

    def call(batch=3, q_len=1, heads=12, dtype=torch.bfloat16, width=136, table=torch.int32):
        q = torch.zeros(batch * q_len, heads, 64, dtype=dtype)
        decode.int8_decode(
            q,
            torch.zeros(5, 2, 32, width, dtype=torch.int8),
            torch.zeros(batch, 4, dtype=table),
            torch.ones(batch, dtype=torch.int32),
            torch.empty_like(q),
            q_len=q_len,
            sm_scale=0.125,
            workspace=workspace,
        )
        return launched[-1]

    yield call
    decode._kernel.cache_clear()
    for name in ("decode", "nvrtc"):  # they hold the stand-ins
        del sys.modules[f"kernels_patch.gpu.{name}"]
        delattr(kernels_patch.gpu, name)


def test_a_launch_fills_the_gpu_and_is_given_strides_in_the_kernel_s_units(launch):
    given = launch()
    wanted = {
        "grid": SMS,
        "stream": STREAM,
        "threads": 32 * (6 + 1),  # six teams of one warp, and the one that copies
        "batch": 3,
        "kv_heads": 2,
        "block_stride": 2 * 32 * 136,  # bytes
        "head_stride": 32 * 136,
        "q_stride": 12 * 64,  # elements
        "out_stride": 12 * 64,
        "table_stride": 4,
        "ticks": None,
    }
    assert {name: given[name] for name in wanted} == wanted
    assert given["score_scale"] == pytest.approx(0.125 * 1.4426950408889634)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch": 5}, "the workspace is too small for a batch of 5"),
        ({"q_len": 4}, "the workspace is too small for 24 rows of 64"),
        ({"heads": 13}, "13 query heads are no multiple of 2 KV heads"),
        ({"heads": 130}, "65 heads a group is 65 rows"),
        ({"dtype": torch.float32}, "both bfloat16 or both float16"),
        ({"width": 128}, "a cache token has 128 bytes: want 136"),
        ({"table": torch.int64}, "block_table and seq_lens must be int32"),
    ],
)
def test_what_the_kernel_would_get_wrong_is_refused_before_the_launch(launch, change, reason):
    with pytest.raises(ValueError, match=reason):
        launch(**change)
