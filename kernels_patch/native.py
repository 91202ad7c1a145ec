"""The compiled kernels as Python functions over torch CPU tensors.

``load`` returns the kernels of one instruction set of the library that ``library`` opens. Shapes,
types and strides are checked here, so that the C++ can trust them. Routes, counters and vLLM are
unknown here; arithmetic is in tiles.cpp, paging in native.cpp.

Shapes: query and out [tokens, Hq, D], key and value [tokens, Hkv, D], float32 or bfloat16, last
axis contiguous, other strides free; kv_cache int8 [blocks, Hkv, block_size, 2*D + 8], each (block,
head) page contiguous; block_table int32 [N, M]; seq_lens int32 [N] counts history and chunk. D is
a multiple of 8 up to 256, block_size one of 32; query head h reads KV head h // (Hq / Hkv).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import lru_cache

import torch

from kernels_patch.layout import SCALE_BYTES
from kernels_patch.library import NativeUnavailable, load_library

GROUP_TOKENS = 32
GRANULE_TOKENS = 32
MAX_HEAD_DIM = 256
ISA_VARIABLE = "KERNELS_PATCH_ISA"

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_SLOT_OUT_OF_RANGE = 2  # native.cpp's Status


@dataclass(frozen=True)
class DecodeTables:
    """The index tensors of a step in which every request decodes, checked once for all its layers
    (``prepare_decode``). ``arguments`` points into them."""

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    arguments: tuple[int, ...]


def prepare_decode(
    slot_mapping: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> DecodeTables:
    """Check slot_mapping int64 [T], T >= N, and the others as ``NativeKernels.decode`` takes them.

    Raises ValueError for an unusable tensor.
    """
    n_requests, n_tokens = len(seq_lens), len(slot_mapping)
    _check_index("seq_lens", seq_lens, torch.int32, (n_requests,))
    _check_index("slot_mapping", slot_mapping, torch.int64, (max(n_tokens, n_requests),))
    table = _table_arguments(block_table, n_requests)
    arguments = (slot_mapping.data_ptr(), n_tokens, *table, seq_lens.data_ptr(), n_requests)
    return DecodeTables(slot_mapping, block_table, seq_lens, arguments)


class NativeKernels:
    """The kernels of one instruction set (``isa``); made by ``load``."""

    def __init__(self, library: ctypes.CDLL, index: int, isa: str) -> None:
        self.isa = isa
        self._library = library
        self._index = index

    @property
    def workspace_bytes(self) -> int:
        """Bytes of query and partition workspaces, kept and shared by all layers."""
        return self._library.kp_workspace_bytes()

    @property
    def max_threads(self) -> int:
        """Threads of the OpenMP pool that the kernels run on."""
        return self._library.kp_max_threads()

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Quantise T keys and values and write them at their slots; a negative slot is skipped.

        slot_mapping: int64 [T], slot = block * block_size + position in the block. Raises
        ValueError for a slot beyond the cache (nothing is written then) or an unusable tensor.
        """
        cache = _cache_arguments(kv_cache)
        if key.shape != value.shape or key.dtype != value.dtype:
            raise ValueError(f"key {key.shape} {key.dtype}, value {value.shape} {value.dtype}")
        if key.shape[1:] != (kv_cache.shape[1], cache[-1]):
            raise ValueError(f"key {tuple(key.shape)} does not fit {tuple(kv_cache.shape)}")
        _check_index("slot_mapping", slot_mapping, torch.int64, (key.shape[0],))
        *k, dtype = _row_arguments("key", key)
        *v, _ = _row_arguments("value", value)
        status = self._library.kp_write_kv(
            self._index, *k, *v, dtype, *cache, slot_mapping.data_ptr(), key.shape[0]
        )
        _check_slots(status, kv_cache, slot_mapping)

    def decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        sm_scale: float,
        out: torch.Tensor,
        group: int = GROUP_TOKENS,
    ) -> None:
        """Attention of one token a request over its INT8 pages, into ``out``.

        Partitions of 256 tokens are spread over the threads and merged by log-sum-exp; W is
        quantised for each ``group`` tokens. Raises ValueError as ``prefix``.
        """
        cache = _cache_arguments(kv_cache)
        n_requests = seq_lens.shape[0]
        _check_attention(query, out, cache, group, n_requests)
        _check_index("seq_lens", seq_lens, torch.int32, (n_requests,))
        status = self._library.kp_decode(
            self._index,
            *_row_arguments("query", query),
            *cache,
            *_table_arguments(block_table, n_requests),
            seq_lens.data_ptr(),
            n_requests,
            query.shape[1],
            sm_scale,
            group,
            *_row_arguments("out", out),
        )
        _check_status(status, kv_cache)

    def write_and_decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        tables: DecodeTables,
        sm_scale: float,
        out: torch.Tensor,
    ) -> None:
        """``write_kv`` and ``decode`` in one call, for a step in which every request decodes.

        query and out [T, Hq, D], key and value [T, Hkv, D], all of one type; the first rows are
        those of ``tables``. Raises ValueError as the two do.
        """
        cache = _cache_arguments(kv_cache)
        *_, n_kv_heads, head_dim = cache
        n_rows, n_heads, _ = query.shape
        _check_rows(query, out, n_kv_heads, head_dim, n_rows)
        q, k = _row_arguments("query", query), _row_arguments("key", key)
        v, o = _row_arguments("value", value), _row_arguments("out", out)
        dtype, n_tokens = q[3], tables.arguments[1]
        same_type = k[3] == dtype and v[3] == dtype and o[3] == dtype
        if not (same_type and key.shape == value.shape == (n_rows, n_kv_heads, head_dim)):
            raise ValueError(
                f"key {tuple(key.shape)} {key.dtype} and value {tuple(value.shape)} {value.dtype} "
                f"do not fit query {tuple(query.shape)} {query.dtype} and {n_kv_heads} KV heads"
            )
        if n_rows < n_tokens:
            raise ValueError(f"query has {n_rows} rows for the {n_tokens} slots of its step")
        status = self._library.kp_write_and_decode(
            self._index,
            *q,
            *k[:3],
            *v[:3],
            *cache,
            *tables.arguments,
            n_heads,
            sm_scale,
            GROUP_TOKENS,
            *o[:3],
        )
        _check_slots(status, kv_cache, tables.slot_mapping)
        _check_status(status, kv_cache)

    def prefix(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        sm_scale: float,
        out: torch.Tensor,
        group: int = GROUP_TOKENS,
    ) -> None:
        """Causal attention of chunks over their INT8 pages in one online softmax, into ``out``.

        query_start_loc int32 [N+1]: rows of each request; query i of a chunk of q tokens sees the
        positions up to seq_len - q + i. Raises ValueError for a block beyond the cache (``out`` is
        then undefined), a ``group`` other than 32, 64 or 128, or an unusable tensor.
        """
        cache = _cache_arguments(kv_cache)
        n_requests = seq_lens.shape[0]
        _check_attention(query, out, cache, group, query.shape[0])
        _check_index("seq_lens", seq_lens, torch.int32, (n_requests,))
        _check_index("query_start_loc", query_start_loc, torch.int32, (n_requests + 1,))
        status = self._library.kp_prefix(
            self._index,
            *_row_arguments("query", query),
            *cache,
            *_table_arguments(block_table, n_requests),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            n_requests,
            query.shape[1],
            sm_scale,
            group,
            *_row_arguments("out", out),
        )
        _check_status(status, kv_cache)

    def first_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_start_loc: torch.Tensor,
        sm_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Causal attention of each request's chunk over itself in float32, into ``out``.

        query_start_loc int32 [N+1]. No request has a history; nothing is quantised. Raises
        ValueError for an unusable tensor.
        """
        tokens, n_kv_heads, head_dim = key.shape
        if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM or value.shape != key.shape:
            raise ValueError(
                f"key {tuple(key.shape)}, value {tuple(value.shape)}: give equal shapes and a head "
                f"size that is a multiple of 8 up to {MAX_HEAD_DIM}"
            )
        _check_rows(query, out, n_kv_heads, head_dim, tokens)
        n_requests = query_start_loc.shape[0] - 1
        _check_index("query_start_loc", query_start_loc, torch.int32, (n_requests + 1,))
        self._library.kp_first_chunk(
            self._index,
            *_row_arguments("query", query),
            *_row_arguments("key", key),
            *_row_arguments("value", value),
            query_start_loc.data_ptr(),
            n_requests,
            query.shape[1],
            n_kv_heads,
            head_dim,
            sm_scale,
            *_row_arguments("out", out),
        )

    def solve(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        sm_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Decode of one token over an unpaged INT8 cache; the query is not quantised.

        query, out float32 [H, D]; k, v int8 [H, S, D]; scales float32 [H, S]; all contiguous (the
        caller checks: ``kernels_patch.solve``), D up to 256.
        """
        heads, tokens, head_dim = k.shape
        tensors = (query, k, v, k_scale, v_scale, out)
        self._library.kp_solve(
            self._index, *(x.data_ptr() for x in tensors), heads, tokens, head_dim, sm_scale
        )


def forced_isa() -> str | None:
    """The instruction set that the environment forces, or None."""
    return os.environ.get(ISA_VARIABLE) or None


@lru_cache
def load(isa: str | None = None) -> NativeKernels:
    """The kernels of ``isa``, of ``KERNELS_PATCH_ISA``, or of the best set that this CPU has.

    Raises NativeUnavailable when the library is missing, was built from other sources, does not
    load, or has no kernels of the wanted set for this CPU.
    """
    library = load_library()
    names = {}
    for index in range(library.kp_n_sets()):
        if library.kp_set_supported(index):
            names[library.kp_set_name(index).decode()] = index
    wanted = isa or forced_isa() or next(iter(names))
    if wanted not in names:
        raise NativeUnavailable(
            f"instruction set {wanted!r} is not available here: choose from {', '.join(names)}"
        )
    return NativeKernels(library, names[wanted], wanted)


def list_instruction_sets() -> list[str]:
    """Names of the sets that this CPU can run, best first. Raises NativeUnavailable."""
    library = load_library()
    return [
        library.kp_set_name(index).decode()
        for index in range(library.kp_n_sets())
        if library.kp_set_supported(index)
    ]


def _row_arguments(name: str, rows: torch.Tensor) -> tuple[int, int, int, int]:
    """Pointer, token and head strides (elements) and type of rows [tokens, heads, D]."""
    token_stride, head_stride, last_stride = rows.stride()
    dtype = _TYPES.get(rows.dtype)
    if dtype is None or last_stride != 1:
        raise ValueError(
            f"{name} is {rows.dtype} with strides {rows.stride()}: give float32 or bfloat16 with a "
            "contiguous last axis"
        )
    return rows.data_ptr(), token_stride, head_stride, dtype


def _cache_arguments(kv_cache: torch.Tensor) -> tuple[int, ...]:
    """Pointer, blocks, strides (bytes), block size, KV heads and head size of a cache."""
    n_blocks, n_kv_heads, block_size, width = kv_cache.shape
    block_stride, head_stride, *page_strides = kv_cache.stride()
    head_dim = (width - 2 * SCALE_BYTES) // 2
    if kv_cache.dtype != torch.int8 or page_strides != [width, 1]:
        raise ValueError(
            f"kv_cache is {kv_cache.dtype} with strides {kv_cache.stride()}: give int8 with "
            "contiguous pages"
        )
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM or block_size % GRANULE_TOKENS:
        raise ValueError(
            f"kv_cache {tuple(kv_cache.shape)} has head size {head_dim} and block size "
            f"{block_size}: give a multiple of 8 up to {MAX_HEAD_DIM} and one of {GRANULE_TOKENS}"
        )
    return (
        kv_cache.data_ptr(),
        n_blocks,
        block_stride,
        head_stride,
        block_size,
        n_kv_heads,
        head_dim,
    )


def _table_arguments(block_table: torch.Tensor, n_requests: int) -> tuple[int, int]:
    if (
        block_table.dtype != torch.int32
        or block_table.shape[0] < n_requests
        or block_table.stride(1) != 1
    ):
        raise ValueError(
            f"block_table is {block_table.dtype} {tuple(block_table.shape)}: give int32 with "
            f"{n_requests} contiguous rows"
        )
    return block_table.data_ptr(), block_table.stride(0)


def _check_attention(
    query: torch.Tensor, out: torch.Tensor, cache: tuple[int, ...], group: int, n_rows: int
) -> None:
    *_, n_kv_heads, head_dim = cache
    _check_rows(query, out, n_kv_heads, head_dim, n_rows)
    if group not in (32, 64, 128):
        raise ValueError(f"group is {group}: give 32, 64 or 128")


def _check_rows(
    query: torch.Tensor, out: torch.Tensor, n_kv_heads: int, head_dim: int, n_rows: int
) -> None:
    rows, n_heads, query_dim = query.shape
    if query_dim != head_dim or n_heads % n_kv_heads or out.shape != query.shape or rows != n_rows:
        raise ValueError(
            f"query {tuple(query.shape)} and out {tuple(out.shape)} do not fit {n_rows} rows, "
            f"{n_kv_heads} KV heads and head size {head_dim}"
        )


def _check_index(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}: give contiguous {dtype} {shape}"
        )


def _check_status(status: int, kv_cache: torch.Tensor) -> None:
    if status:
        raise ValueError(f"block_table names a block beyond the cache's {kv_cache.shape[0]} blocks")


def _check_slots(status: int, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    if status == _SLOT_OUT_OF_RANGE:
        raise ValueError(
            f"slot {int(slot_mapping.max())} is beyond the cache's "
            f"{kv_cache.shape[0]} blocks of {kv_cache.shape[2]} tokens"
        )
