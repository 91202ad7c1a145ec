"""The scheme in NumPy, written to be read: what every other implementation is compared with.

Quantisation, page bytes and attention, all in float64 but for what the scheme itself stores in
float32 (scales). Nothing here is fast, and nothing here knows torch, threads or vLLM.

Shapes: query [T, Hq, D]; key and value [S, Hkv, D] with S >= T, where the T queries are the last T
of the S positions (causal); Hq is a multiple of Hkv and query head h reads KV head h // (Hq / Hkv).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels_patch.layout import QMAX, PageLayout

GROUP_TOKENS = 32
PARTITION_TOKENS = 256


@dataclass(frozen=True)
class Rounding:
    """Which of the four roundings are made; with all of them off the scheme is exact attention."""

    q: bool = True
    k: bool = True
    v: bool = True
    w: bool = True


ALL_ROUNDINGS = Rounding()


def quantise(x: np.ndarray, rounded: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric INT8 over the last axis: payload [..., D] and float32 scale [...].

    ``scale = amax / 127``, ``q = clamp(round_half_even(x / scale), -127, 127)``, both in float32 so
    that every implementation can give the same bytes; amax = 0 gives zeros. With ``rounded`` False
    the payload stays the float64 quotient, so that payload * scale is x.
    """
    x = np.asarray(x, dtype=np.float32)
    scale = np.abs(x).max(axis=-1) / np.float32(QMAX)
    divisor = np.where(scale == 0, np.float32(1), scale)[..., None]
    if not rounded:
        return x.astype(np.float64) / divisor, scale
    quotient = np.where(scale[..., None] == 0, np.float32(0), x / divisor)
    return np.clip(np.rint(quotient), -QMAX, QMAX).astype(np.int8), scale


def write_kv(
    key: np.ndarray, value: np.ndarray, kv_cache: np.ndarray, slot_mapping: np.ndarray
) -> None:
    """Quantise key and value [T, Hkv, D] into pages [B, Hkv, BS, 2D+8]; slot < 0 is skipped."""
    layout = PageLayout(block_size=kv_cache.shape[2], head_dim=key.shape[-1])
    k, k_scale = quantise(key)
    v, v_scale = quantise(value)
    for t, slot in enumerate(slot_mapping):
        if slot < 0:
            continue
        block, offset = divmod(int(slot), layout.block_size)
        for head in range(key.shape[1]):
            page = kv_cache[block, head].reshape(-1)  # a view: each page is contiguous
            page[layout.k_index[offset]] = k[t, head]
            page[layout.v_index[offset]] = v[t, head]
            page[layout.k_scale_index[offset]] = np.frombuffer(k_scale[t, head], np.int8)
            page[layout.v_scale_index[offset]] = np.frombuffer(v_scale[t, head], np.int8)


def read_kv(
    kv_cache: np.ndarray, block_table: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The first seq_len tokens of one request: K int8 [S, Hkv, D], sK [S, Hkv], and V likewise."""
    _, _, block_size, bytes_per_token = kv_cache.shape
    layout = PageLayout(block_size=block_size, head_dim=(bytes_per_token - 8) // 2)
    n_blocks = -(-seq_len // block_size)
    pages = kv_cache[block_table[:n_blocks]]  # [n, Hkv, BS, 2D+8]
    pages = pages.reshape(n_blocks, pages.shape[1], layout.page_bytes)

    def gather(index: np.ndarray) -> np.ndarray:
        per_token = pages[:, :, index].swapaxes(1, 2)  # [n, BS, Hkv, bytes]
        return np.ascontiguousarray(per_token.reshape(-1, *per_token.shape[2:])[:seq_len])

    k_scale = gather(layout.k_scale_index).view(np.float32)[..., 0]
    v_scale = gather(layout.v_scale_index).view(np.float32)[..., 0]
    return gather(layout.k_index), k_scale, gather(layout.v_index), v_scale


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, sm_scale: float) -> np.ndarray:
    """Exact causal attention in float64, [T, Hq, D]."""
    scores = _hide_future(_scores(query, key) * sm_scale)
    p = np.exp(scores - _finite_max(scores))
    return _weigh(p / p.sum(axis=-1, keepdims=True), value)


def int8_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    sm_scale: float,
    *,
    rounding: Rounding = ALL_ROUNDINGS,
    group: int = GROUP_TOKENS,
    partition: int | None = None,
) -> np.ndarray:
    """The scheme from unquantised key and value, float64 [T, Hq, D].

    ``rounding`` turns single roundings off (the error budget). ``partition`` None is the prefix
    route, a number of tokens is the decode route: see ``int8_attention_quantised``.
    """
    k, k_scale = quantise(key, rounding.k)
    v, v_scale = quantise(value, rounding.v)
    return int8_attention_quantised(
        query, k, k_scale, v, v_scale, sm_scale, rounding=rounding, group=group, partition=partition
    )


def int8_attention_quantised(
    query: np.ndarray,
    k: np.ndarray,
    k_scale: np.ndarray,
    v: np.ndarray,
    v_scale: np.ndarray,
    sm_scale: float,
    *,
    rounding: Rounding = ALL_ROUNDINGS,
    group: int = GROUP_TOKENS,
    partition: int | None = None,
) -> np.ndarray:
    """The scheme over payloads [S, Hkv, D] and scales [S, Hkv] as they lie in the cache.

    Score = (q . k) * sQ * sK * sm_scale. W = p * sV is quantised for each group of ``group``
    neighbouring positions and summed as integers: sum(Wq * Vq) * sW. Prefix (``partition`` None):
    p = exp(score - max), the division by sum(p) comes last. Decode: p is normalised inside each
    partition and the partitions are merged by their log-sum-exp.
    """
    q, q_scale = quantise(query, rounding.q)
    repeat = query.shape[1] // k.shape[1]
    scores = _scores(q, k) * q_scale.T[:, :, None].astype(np.float64)
    scores *= np.repeat(k_scale.T, repeat, axis=0)[:, None, :] * sm_scale
    scores = _hide_future(scores)
    v_scale_of_head = np.repeat(v_scale.T, repeat, axis=0)[:, None, :].astype(np.float64)

    n_tokens = k.shape[0]
    width = n_tokens if partition is None else partition
    outputs, lses = [], []
    for start in range(0, n_tokens, width):
        part = slice(start, start + width)
        peak = _finite_max(scores[:, :, part])
        p = np.exp(scores[:, :, part] - peak)
        total = p.sum(axis=-1, keepdims=True)
        if partition is not None:
            p = p / np.where(total == 0, 1, total)
        w = (
            _round_groups(p * v_scale_of_head[:, :, part], group)
            if rounding.w
            else (p * v_scale_of_head[:, :, part])
        )
        out = _weigh(w, v[part])
        if partition is None:
            return out / total.transpose(1, 0, 2)
        outputs.append(out)
        with np.errstate(divide="ignore"):  # a partition that the causal mask empties: lse = -inf
            lses.append((peak + np.log(total)).transpose(1, 0, 2))
    return merge_partitions(np.stack(outputs), np.stack(lses))


def merge_partitions(outputs: np.ndarray, lses: np.ndarray) -> np.ndarray:
    """Merge outputs [P, T, Hq, D], each normalised in its partition, by lse [P, T, Hq, 1]."""
    share = np.exp(lses - lses.max(axis=0))
    return (share * outputs).sum(axis=0) / share.sum(axis=0)


def _scores(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """q . k of every query and position, float64 [Hq, T, S]."""
    keys = np.repeat(key, query.shape[1] // key.shape[1], axis=1).astype(np.float64)
    return np.einsum("thd,shd->hts", query.astype(np.float64), keys, optimize=True)


def _hide_future(scores: np.ndarray) -> np.ndarray:
    """Scores [Hq, T, S] with -inf where a query may not see: the T queries are the last T of S."""
    _, n_query, n_tokens = scores.shape
    position = np.arange(n_tokens - n_query, n_tokens)
    return np.where(np.arange(n_tokens) > position[:, None], -np.inf, scores)


def _weigh(weights: np.ndarray, value: np.ndarray) -> np.ndarray:
    """weights [Hq, T, S] times value [S, Hkv, D], float64 [T, Hq, D]."""
    repeat = weights.shape[0] // value.shape[1]
    values = np.repeat(value, repeat, axis=1).astype(np.float64)
    return np.einsum("hts,shd->thd", weights, values, optimize=True)


def _round_groups(w: np.ndarray, group: int) -> np.ndarray:
    """w [..., S] after quantising each ``group`` of neighbours with one scale (dequantised)."""
    pad = -w.shape[-1] % group
    grouped = np.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, pad)]).reshape(*w.shape[:-1], -1, group)
    scale = np.abs(grouped).max(axis=-1, keepdims=True) / QMAX
    rounded = np.rint(grouped / np.where(scale == 0, 1, scale)) * scale
    return rounded.reshape(*w.shape[:-1], -1)[..., : w.shape[-1]]


def _finite_max(scores: np.ndarray) -> np.ndarray:
    """Largest score along the last axis; 0 where the mask leaves none (exp(-inf - 0) is 0)."""
    peak = scores.max(axis=-1, keepdims=True)
    return np.where(np.isneginf(peak), 0.0, peak)
