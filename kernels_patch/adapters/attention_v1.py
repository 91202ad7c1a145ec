"""What vLLM's attention interface has kept from 0.24 to 0.32, on CPUs and on CUDA."""

from __future__ import annotations

BACKEND = "vllm.v1.attention.backend"
OVERRIDDEN = {
    f"{BACKEND}:AttentionMetadataBuilder.__init__": (
        "self",
        "kv_cache_spec",
        "layer_names",
        "vllm_config",
        "device",
    ),
    f"{BACKEND}:AttentionMetadataBuilder.build": (
        "self",
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ),
    f"{BACKEND}:AttentionImpl.__init__": (
        "self",
        "num_heads",
        "head_size",
        "scale",
        "num_kv_heads",
        "alibi_slopes",
        "sliding_window",
        "kv_cache_dtype",
        "logits_soft_cap",
        "attn_type",
        "kv_sharing_target_layer_name",
    ),
    f"{BACKEND}:AttentionImpl.forward": (
        "self",
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        "output_scale",
        "output_block_scale",
    ),
}
# What ``attention.describe_engine`` reads.
USED = {
    "vllm.config.parallel:ParallelConfig": (
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ),
    "vllm.config.vllm:VllmConfig": ("speculative_config", "kv_transfer_config"),
}
