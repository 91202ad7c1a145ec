"""Decode attention over INT8 pages on the GPU: checks shapes, owns the workspace, launches once.

``int8_decode`` reads the pages of ``layout.UnitLayout`` directly (decode.cu says how) and writes
the merged output. It knows torch tensors, not vLLM; nothing is allocated after the workspace is.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from kernels_patch.gpu import nvrtc
from kernels_patch.gpu.device import table_of
from kernels_patch.gpu.layout import UNIT_TOKENS
from kernels_patch.gpu.shape import DecodePlan, DecodeShape
from kernels_patch.gpu.tuning import DecodeTuning

_SOURCE = Path(__file__).with_name("decode.cu")
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "out", "kv_cache", "block_table", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("partial", "partial_lse", "arrived", "ticks")),
        *((name, ctypes.c_longlong) for name in ("block_stride", "head_stride")),
        *((name, ctypes.c_longlong) for name in ("q_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("table_stride", "batch", "kv_heads", "least_tiles")),
        ("score_scale", ctypes.c_float),
    ]


class DecodeWorkspace:
    """Partial outputs and arrival counters, for every layer that runs one after the other.

    Serves any ``int8_decode`` of at most ``max_batch`` requests, ``kv_heads`` KV heads, ``rows``
    rows of ``head_dim``; ``n_bytes`` is what it costs. One workspace serves one stream at a time.
    """

    def __init__(
        self, device: torch.device, max_batch: int, kv_heads: int, rows: int, head_dim: int
    ) -> None:
        self.ctas = torch.cuda.get_device_properties(device).multi_processor_count
        slots = 2 * self.ctas
        self.partial = torch.empty(slots * rows * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(slots * rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(2 * max_batch * kv_heads, dtype=torch.int32, device=device)

    @property
    def n_bytes(self) -> int:
        return 4 * (self.partial.numel() + self.lse.numel() + self.arrived.numel())


def int8_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    q_len: int,
    sm_scale: float,
    workspace: DecodeWorkspace,
    ticks: torch.Tensor | None = None,
    tuning: DecodeTuning | None = None,
) -> None:
    """Attention of the last ``q_len`` tokens of each request over its INT8 pages, into ``out``.

    q, out [B * q_len, Hq, D] bfloat16 or float16, heads contiguous; kv_cache int8
    [blocks, Hkv, block_size, 2 D + 8] whose single pages are contiguous; block_table int32 [B, n];
    seq_lens int32 [B], the ``q_len`` queries included: at least q_len, or 0 for a padding request,
    whose output is left as it is. ``ticks`` int64 [1] is raised by one for each launch, also when a
    CUDA graph replays it. Raises ValueError for what the kernel does not serve.
    """
    batch = seq_lens.shape[0]
    _, kv_heads, block_size, bytes_per_token = kv_cache.shape
    heads, head_dim = q.shape[-2:]
    shape = DecodeShape(head_dim, heads // kv_heads, q_len, block_size, q.dtype == torch.float16)
    _check(q, kv_cache, block_table, seq_lens, out, q_len)
    if bytes_per_token != 2 * head_dim + 8:
        raise ValueError(f"a cache token has {bytes_per_token} bytes: want {2 * head_dim + 8}")
    slots = 2 * workspace.ctas * shape.rows
    if slots * head_dim > workspace.partial.numel() or slots > workspace.lse.numel():
        raise ValueError(f"the workspace is too small for {shape.rows} rows of {head_dim}")
    if 2 * batch * kv_heads > workspace.arrived.numel():
        raise ValueError(f"the workspace is too small for a batch of {batch}")
    plan = shape.plan(tuning, table_of(q.device))
    arguments = _Arguments(
        q=q.data_ptr(),
        out=out.data_ptr(),
        kv_cache=kv_cache.data_ptr(),
        block_table=block_table.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        partial=workspace.partial.data_ptr(),
        partial_lse=workspace.lse.data_ptr(),
        arrived=workspace.arrived.data_ptr(),
        ticks=None if ticks is None else ticks.data_ptr(),
        block_stride=kv_cache.stride(0),
        head_stride=kv_cache.stride(1),
        q_stride=q.stride(0),
        out_stride=out.stride(0),
        table_stride=block_table.stride(0),
        batch=batch,
        kv_heads=kv_heads,
        least_tiles=plan.tuning.least_tiles,
        score_scale=sm_scale * math.log2(math.e),
    )
    stream = torch.cuda.current_stream(q.device).cuda_stream
    kernel = _kernel(plan, q.device.index)
    kernel.launch_cooperative(workspace.ctas, plan.threads, arguments, stream)


def prepare(shapes: Iterable[DecodeShape]) -> None:
    """Compile and load the kernels of these shapes on the current device, as its table has them."""
    index = torch.cuda.current_device()
    plans = [shape.plan(table=table_of(torch.device("cuda", index))) for shape in shapes]
    nvrtc.compile_all(build(plan) for plan in plans)
    for plan in plans:
        _kernel(plan, index)


def build(plan: DecodePlan) -> nvrtc.Build:
    """The compilation that ``int8_decode`` asks for, for ``nvrtc.compile_all``."""
    return nvrtc.Build(_SOURCE, tuple(plan.definitions.items()))


@cache
def _kernel(plan: DecodePlan, device: int) -> nvrtc.Kernel:
    """Loaded once for each device: a kernel belongs to the context that was current then."""
    return nvrtc.load(build(plan), "int8_decode", plan.shared_bytes)


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    q_len: int,
) -> None:
    batch, heads, head_dim = seq_lens.shape[0], *q.shape[-2:]
    kv_heads = kv_cache.shape[1]
    if q.dtype not in _DTYPES or out.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype} and out {out.dtype}: both bfloat16 or both float16")
    if q.shape != out.shape or q.shape[0] != batch * q_len:
        raise ValueError(
            f"q {tuple(q.shape)} and out {tuple(out.shape)}: want {batch * q_len} tokens in both"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    for name, x in (("q", q), ("out", out)):
        if x.stride(2) != 1 or x.stride(1) != head_dim or x.stride(0) % 8 or x.data_ptr() % 16:
            raise ValueError(f"{name} has strides {x.stride()}: heads must be contiguous, 16-byte")
    page = kv_cache.stride()[2:]
    if kv_cache.dtype != torch.int8 or page != (kv_cache.shape[3], 1):
        raise ValueError("kv_cache must be int8 with contiguous pages")
    if kv_cache.stride(0) % UNIT_TOKENS or kv_cache.stride(1) % UNIT_TOKENS:
        raise ValueError(f"kv_cache has strides {kv_cache.stride()}: want multiples of 16 bytes")
    if block_table.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        raise ValueError("block_table and seq_lens must be int32")
