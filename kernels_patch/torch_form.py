"""The INT8 KV scheme in plain torch operations: what serves where no compiler built the kernels.

Every product of two INT8 numbers is summed exactly, as an INT32 sum would be: the operands are
whole float32 numbers of at most 128, and a sum of up to 1024 of their products stays below 2^24.
Larger head sizes are refused. The page's layout comes from ``layout``; routes, counters and vLLM
are unknown here.

Shapes: query and out [tokens, Hq, D], key and value [tokens, Hkv, D], float32 or bfloat16, any
strides; kv_cache int8 [blocks, Hkv, block_size, 2*D + 8]; block_table int32 [N, M]; seq_lens
int32 [N] counts history and chunk. Query head h reads KV head h // (Hq / Hkv).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name under which torch documents it)

from kernels_patch.layout import QMAX, SCALE_BYTES, PageLayout

GROUP_TOKENS = 32
PARTITION_TOKENS = 256
KEY_TILE_TOKENS = 512
MAX_HEAD_DIM = 1024


class _Tables(NamedTuple):
    """Where a token's bytes lie in its page: int64 [block_size, D] for payloads, [block_size] for
    scales (the latter in units of one float32)."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor


class Pages(NamedTuple):
    """Views into a cache: its pages as bytes, int8 [blocks, Hkv, page_bytes], and as float32
    [blocks, Hkv, page_bytes / 4], with the tables that find a token in them."""

    payload: torch.Tensor
    scales: torch.Tensor
    block_size: int
    tables: _Tables


def view_pages(kv_cache: torch.Tensor) -> Pages:
    """Views of ``kv_cache``; writing through them writes the cache.

    Raises ValueError for another dtype or for a (block, head) page that is not contiguous.
    """
    block_size, width = kv_cache.shape[2:]
    if kv_cache.dtype != torch.int8 or kv_cache.stride()[2:] != (width, 1):
        raise ValueError(
            f"a KV cache of {kv_cache.dtype} with strides {kv_cache.stride()} is not one of "
            "contiguous int8 pages"
        )
    payload = kv_cache.flatten(2)
    head_dim = (width - 2 * SCALE_BYTES) // 2
    return Pages(payload, payload.view(torch.float32), block_size, _tables(block_size, head_dim))


@lru_cache
def _tables(block_size: int, head_dim: int) -> _Tables:
    layout = PageLayout(block_size, head_dim)
    return _Tables(
        k=torch.from_numpy(layout.k_index),
        v=torch.from_numpy(layout.v_index),
        k_scale=torch.from_numpy(layout.k_scale_index[:, 0] // SCALE_BYTES),
        v_scale=torch.from_numpy(layout.v_scale_index[:, 0] // SCALE_BYTES),
    )


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round along the last axis to whole numbers in [-127, 127]; returns them (float32) and the
    scales (float32, last axis 1). An all-zero row gets scale 0 and zeros."""
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / QMAX
    divisor = torch.where(scale > 0, scale, 1.0)
    return torch.round(x / divisor).clamp_(-QMAX, QMAX), scale


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Quantise T keys and values and write them at their slots; a negative slot is skipped.

    slot_mapping: integer [T], slot = block * block_size + position in the block.
    """
    pages = view_pages(kv_cache)
    slots = slot_mapping.long()
    kept = slots >= 0
    if not bool(kept.all()):
        slots, key, value = slots[kept], key[kept], value[kept]
    block, position = slots // pages.block_size, slots % pages.block_size
    block, head = block[:, None], torch.arange(key.shape[1])
    tables = pages.tables
    for x, where, scale_at in ((key, tables.k, tables.k_scale), (value, tables.v, tables.v_scale)):
        whole, scale = quantise(x)
        at = where[position][:, None]
        pages.payload[block[..., None], head[:, None], at] = whole.to(torch.int8)
        pages.scales[block, head, scale_at[position][:, None]] = scale.squeeze(-1)


def first_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of each request's chunk over itself, at the precision of its inputs.

    query_start_loc: int32 [N+1]. The requests have no history.
    """
    starts = query_start_loc.tolist()
    for begin, end in pairwise(starts):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=sm_scale, enable_gqa=True
        )
        out[begin:end] = attended[0].transpose(0, 1)


def prefix(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of chunks with history over their INT8 pages, in a single online softmax.

    Query i of a request of q tokens sees the positions up to seq_len - q + i. W is unnormalised:
    exp(score - running maximum), so its groups' scales are of the order of sV.
    """
    pages = view_pages(kv_cache)
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        out[rows] = _prefix_one(query[rows], pages, block_table[request], seq_len, sm_scale)


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of one token a request over its INT8 pages.

    Partitions of 256 tokens are computed apart, W normalised within its partition, and merged by
    log-sum-exp.
    """
    pages = view_pages(kv_cache)
    for request, seq_len in enumerate(seq_lens.tolist()):
        out[request] = _decode_one(query[request], pages, block_table[request], seq_len, sm_scale)


def _prefix_one(
    query: torch.Tensor, pages: Pages, block_row: torch.Tensor, seq_len: int, sm_scale: float
) -> torch.Tensor:
    """[q, Hq, D] over one request's pages; float32 [q, Hq, D]."""
    tokens, heads, head_dim = query.shape
    q_whole, q_scale = _quantised_query(query, pages, sm_scale)
    last_seen = (seq_len - tokens + torch.arange(tokens)).repeat(q_whole.shape[1] // tokens)
    row_max = torch.full_like(q_scale, -torch.inf)
    row_sum = torch.zeros_like(q_scale)
    acc = torch.zeros_like(q_whole)
    for begin in range(0, seq_len, KEY_TILE_TOKENS):
        k, k_scale, v, v_scale = _gather(pages, block_row, begin, KEY_TILE_TOKENS, seq_len)
        scores = (q_whole @ k.transpose(1, 2)) * (q_scale * k_scale[:, None])
        if begin + KEY_TILE_TOKENS > seq_len - tokens:
            hidden = begin + torch.arange(KEY_TILE_TOKENS) > last_seen[:, None]
            scores.masked_fill_(hidden, -torch.inf)
        new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
        decay = torch.exp(row_max - new_max)
        p = torch.exp(scores - new_max)
        row_sum = row_sum * decay + p.sum(dim=-1, keepdim=True)
        acc = acc * decay + _grouped_pv(p * v_scale[:, None], v).sum(dim=2)
        row_max = new_max
    return (acc / row_sum).view(heads, tokens, head_dim).transpose(0, 1)


def _decode_one(
    query: torch.Tensor, pages: Pages, block_row: torch.Tensor, seq_len: int, sm_scale: float
) -> torch.Tensor:
    """[Hq, D] over one request's pages; float32 [Hq, D]."""
    q_whole, q_scale = _quantised_query(query[None], pages, sm_scale)
    padded = -(-seq_len // PARTITION_TOKENS) * PARTITION_TOKENS
    k, k_scale, v, v_scale = _gather(pages, block_row, 0, padded, seq_len)
    scores = (q_whole @ k.transpose(1, 2)) * (q_scale * k_scale[:, None])
    scores[..., seq_len:] = -torch.inf
    scores = scores.unflatten(-1, (-1, PARTITION_TOKENS))
    peak = scores.amax(dim=-1, keepdim=True)
    p = torch.exp(scores - peak)
    total = p.sum(dim=-1, keepdim=True)
    lse = (peak + torch.log(total)).squeeze(-1)
    # Divided rather than exp(score - lse): a score of 1000 leaves lse only four decimals.
    w = (p / total).flatten(-2) * v_scale[:, None]
    groups_a_partition = PARTITION_TOKENS // GROUP_TOKENS
    parts = _grouped_pv(w, v).unflatten(2, (-1, groups_a_partition)).sum(dim=3)
    merged = (torch.softmax(lse, dim=-1)[..., None] * parts).sum(dim=2)
    return merged.view(query.shape)


def _quantised_query(
    query: torch.Tensor, pages: Pages, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[q, Hq, D] to whole numbers [Hkv, g*q, D] and scales times sm_scale [Hkv, g*q, 1]."""
    tokens, heads, head_dim = query.shape
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head size {head_dim} is beyond {MAX_HEAD_DIM}: sums would be inexact")
    kv_heads = pages.payload.shape[1]
    whole, scale = quantise(query.transpose(0, 1))
    rows = heads // kv_heads * tokens
    return whole.reshape(kv_heads, rows, head_dim), scale.reshape(kv_heads, rows, 1) * sm_scale


def _gather(
    pages: Pages, block_row: torch.Tensor, begin: int, length: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [begin, begin + length) of a request: K, V float32 [Hkv, length, D] and their scales
    [Hkv, length].

    What lies at or beyond seq_len is zero: an unwritten page may hold anything, a NaN scale too.
    """
    block_size, tables = pages.block_size, pages.tables
    end = min(begin + length, seq_len)
    first_block = begin // block_size
    blocks = block_row[first_block : -(-end // block_size)].long()
    skip = begin - first_block * block_size

    read = pages.payload[blocks]

    def tokens_of(source: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        # NumPy's take is three times faster than torch.gather here, and fifty than index_select.
        taken = torch.from_numpy(np.take(source.numpy(), where.numpy(), axis=-1))
        joined = taken.transpose(0, 1).flatten(1, 2)
        padded = torch.zeros((joined.shape[0], length, *joined.shape[2:]))
        padded[:, : end - begin] = joined[:, skip : skip + end - begin]
        return padded

    scales = read.view(torch.float32)
    return (
        tokens_of(read, tables.k),
        tokens_of(scales, tables.k_scale),
        tokens_of(read, tables.v),
        tokens_of(scales, tables.v_scale),
    )


def _grouped_pv(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """W times V with W rounded to INT8 for each group of 32 tokens.

    w: [Hkv, rows, S] with sV folded in; v: whole numbers [Hkv, S, D]; S a multiple of 32.
    Returns [Hkv, rows, S / 32, D].
    """
    whole, scale = quantise(w.unflatten(-1, (-1, GROUP_TOKENS)))
    grouped_v = v.unflatten(1, (-1, GROUP_TOKENS))
    return torch.einsum("hrgt,hgtd->hrgd", whole, grouped_v) * scale
