"""Which implementation serves a route, chosen once, and a step's work sent to it.

The native kernels serve where they load and support the shape, else the plain torch form does: as
the routes ``prefix_torch`` and ``decode_torch`` where native is missing or was not wanted, as
``fallback`` where native is there and cannot take this shape. Whatever is chosen is said on stderr
once. It knows plans and kernels, but neither vLLM nor counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from kernels_patch import native, torch_form
from kernels_patch.plan import DECODE, FIRST_CHUNK, PREFIX, RouteBatch
from kernels_patch.switches import IMPL_SWITCH, RefusalError, forced_impl, say

FALLBACK = "fallback"
TORCH_LABELS = {FIRST_CHUNK: FIRST_CHUNK, PREFIX: "prefix_torch", DECODE: "decode_torch"}
NATIVE_LABELS = {FIRST_CHUNK: FIRST_CHUNK, PREFIX: PREFIX, DECODE: DECODE}
FALLBACK_LABELS = {FIRST_CHUNK: FIRST_CHUNK, PREFIX: FALLBACK, DECODE: FALLBACK}


@dataclass(frozen=True)
class Kernels:
    """One implementation of the scheme. ``labels`` names the route under which each planned route
    is counted; the functions have the signatures of ``torch_form``, but for the last (see
    ``native``), which only the native ones have."""

    impl: str
    labels: Mapping[str, str]
    write_kv: Callable[..., None]
    first_chunk: Callable[..., None]
    prefix: Callable[..., None]
    decode: Callable[..., None]
    write_and_decode: Callable[..., None] | None = None


@dataclass(frozen=True)
class Step:
    """One step as its layers take it (``prepare_step``). With ``tables`` every request decodes."""

    slot_mapping: torch.Tensor
    batches: tuple[RouteBatch, ...]
    tables: native.DecodeTables | None


@cache
def choose_kernels(head_dim: int) -> Kernels:
    """The kernels for this head size, by the environment and the machine.

    Raises RefusalError when the environment forces the native ones, or one instruction set of
    them, and they cannot serve.
    """
    wanted = forced_impl()
    if wanted == "torch":
        say(f"serving with the plain torch form ({IMPL_SWITCH}=torch): slow, for comparison only")
        return _kernels("torch", torch_form, TORCH_LABELS)
    try:
        kernels = native.load()
        labels, reason = FALLBACK_LABELS, _native_refusal(head_dim)
    except native.NativeUnavailable as error:
        labels, reason = TORCH_LABELS, str(error)
    if reason is None:
        say(f"serving with the native {kernels.isa} kernels")
        return _kernels("native", kernels, NATIVE_LABELS)
    for switch, value in ((IMPL_SWITCH, wanted), (native.ISA_VARIABLE, native.forced_isa())):
        if value is not None:
            raise RefusalError(f"{switch}={value} was asked for, and {reason}")
    say(f"NO NATIVE KERNELS: {reason}. Serving with the plain torch form, which is slow.")
    return _kernels("torch", torch_form, labels)


def prepare_step(
    kernels: Kernels, slot_mapping: torch.Tensor, batches: tuple[RouteBatch, ...]
) -> Step:
    """What all layers of a step share; slot_mapping int64 [T] holds -1 for a padded tail."""
    tables = None
    if kernels.write_and_decode is not None and [b.route for b in batches] == [DECODE]:
        (batch,) = batches
        if batch.rows == slice(0, batch.num_requests):
            tables = native.prepare_decode(slot_mapping, batch.block_table, batch.seq_lens)
    return Step(slot_mapping, batches, tables)


def run_step(
    kernels: Kernels,
    step: Step,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
    after_write: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> None:
    """Write one layer's keys and values [T, Hkv, D] and attend query [T, Hq, D] into ``out``.

    ``after_write`` is called with kv_cache and slot_mapping between the two.
    """
    if step.tables is not None and after_write is None:
        kernels.write_and_decode(query, key, value, kv_cache, step.tables, sm_scale, out)
        return
    tokens = step.slot_mapping.numel()
    kernels.write_kv(key[:tokens], value[:tokens], kv_cache, step.slot_mapping)
    if after_write is not None:
        after_write(kv_cache, step.slot_mapping)
    for batch in step.batches:
        run_batch(kernels, batch, query, key, value, kv_cache, sm_scale, out)


def run_batch(
    kernels: Kernels,
    batch: RouteBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    """Attend one route's requests of a step; their rows of ``out`` are written.

    query and out [tokens of the step, Hq, D], key and value [tokens of the step, Hkv, D]; the
    step's keys and values are in ``kv_cache`` already.
    """
    rows = batch.rows
    q = query[rows]
    # A slice of out is a view that the kernel writes through; an index needs a copy back.
    result = out[rows] if isinstance(rows, slice) else torch.empty_like(q)
    pages = (kv_cache, batch.block_table)
    if batch.route == FIRST_CHUNK:
        kernels.first_chunk(q, key[rows], value[rows], batch.query_start_loc, sm_scale, result)
    elif batch.route == PREFIX:
        kernels.prefix(q, *pages, batch.query_start_loc, batch.seq_lens, sm_scale, result)
    else:
        kernels.decode(q, *pages, batch.seq_lens, sm_scale, result)
    if not isinstance(rows, slice):
        out[rows] = result


def _native_refusal(head_dim: int) -> str | None:
    """Why the native kernels, loaded, cannot take this shape; None when they can."""
    if head_dim > native.MAX_HEAD_DIM:
        return f"head size {head_dim} is beyond the native kernels' {native.MAX_HEAD_DIM}"
    return None


def _kernels(
    impl: str, functions: native.NativeKernels | ModuleType, labels: Mapping[str, str]
) -> Kernels:
    """The first chunk is attended at full precision by both implementations."""
    return Kernels(
        impl=impl,
        labels=labels,
        write_kv=functions.write_kv,
        first_chunk=functions.first_chunk,
        prefix=functions.prefix,
        decode=functions.decode,
        write_and_decode=getattr(functions, "write_and_decode", None),
    )
