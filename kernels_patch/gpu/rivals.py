"""What the kernels are measured against: vLLM's own, when vLLM is installed.

FlashAttention-3 over a BF16 cache, the Triton kernel of ``int8_per_token_head``, the BF16 cache
write, and the rotary embedding. Nothing here is used by the patch itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Call = Callable[[], object]
_SEGMENTS = 16  # of vLLM's own split of a context, as its backend sets it


def installed() -> str | None:
    """vLLM's version, or None."""
    try:
        import vllm
    except ImportError:
        return None
    return vllm.__version__


def flash_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_len: int,
    out: torch.Tensor,
) -> Call:
    """FlashAttention-3 over key and value [blocks, block_size, Hkv, D] bfloat16."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    batch = seq_lens.shape[0]
    starts = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=q.device)
    longest = int(seq_lens.max())
    return lambda: flash_attn_varlen_func(
        q,
        key,
        value,
        max_seqlen_q=q_len,
        cu_seqlens_q=starts,
        max_seqlen_k=longest,
        seqused_k=seq_lens,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
        block_table=block_table,
        out=out,
        fa_version=3,
    )


def flash_attention_contiguous(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
) -> Call:
    """FlashAttention-3 of one request over key and value [S, Hkv, D] that need no block table."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    n_queries, length = q.shape[0], key.shape[0]
    q_starts = torch.tensor([0, n_queries], dtype=torch.int32, device=q.device)
    k_starts = torch.tensor([0, length], dtype=torch.int32, device=q.device)
    return lambda: flash_attn_varlen_func(
        q,
        key,
        value,
        max_seqlen_q=n_queries,
        cu_seqlens_q=q_starts,
        max_seqlen_k=length,
        cu_seqlens_k=k_starts,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
        out=out,
        fa_version=3,
    )


def stock_int8(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_len: int,
    out: torch.Tensor,
) -> Call:
    """vLLM's ``int8_per_token_head`` over the same key and value, quantised here."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    blocks, block_size, kv_heads, head_dim = key.shape
    half = head_dim + 4
    pages = torch.empty(blocks, kv_heads, block_size, 2 * half, dtype=torch.int8, device=q.device)
    views = pages.transpose(1, 2).split(half, dim=-1)
    words = pages.view(torch.float32)
    scales = (
        words[..., head_dim // 4].transpose(1, 2),
        words[..., half // 4 + head_dim // 4].transpose(1, 2),
    )
    for x, view, scale in zip((key, value), views, scales, strict=True):
        s = x.float().abs().amax(-1) / 127
        view[..., :head_dim] = (x.float() / s[..., None]).round().clamp(-127, 127).to(torch.int8)
        scale.copy_(s)
    batch = seq_lens.shape[0]
    starts = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=q.device)
    longest = int(seq_lens.max())
    threshold = max(1, 128 // kv_heads)
    heads = q.shape[1]
    segments = torch.empty(threshold, heads, _SEGMENTS, head_dim, device=q.device)
    peaks = torch.empty(threshold, heads, _SEGMENTS, device=q.device)
    sums = torch.empty_like(peaks)
    return lambda: unified_attention(
        q=q,
        k=views[0],
        v=views[1],
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=q_len,
        seqused_k=seq_lens,
        max_seqlen_k=longest,
        softmax_scale=head_dim**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=block_table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=threshold,
        num_par_softmax_segments=_SEGMENTS,
        softmax_segm_output=segments,
        softmax_segm_max=peaks,
        softmax_segm_expsum=sums,
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        k_scale_cache=scales[0],
        v_scale_cache=scales[1],
    )


def bf16_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> Call:
    """vLLM's ``reshape_and_cache_flash`` into [blocks, block_size, Hkv, D] bfloat16."""
    from vllm import _custom_ops

    one = torch.ones(1, device=key.device)
    return lambda: _custom_ops.reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, "auto", one, one
    )


def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> Call:
    """vLLM's ``rotary_embedding``, in place: query and key [T, H, D], halves rotated together."""
    from vllm import _custom_ops

    return lambda: _custom_ops.rotary_embedding(
        positions, query, key, query.shape[-1], cos_sin_cache, True
    )
