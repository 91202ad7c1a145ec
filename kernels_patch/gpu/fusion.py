"""vLLM's own fusion of rotary embedding and cache update, switched on where it can work.

vLLM has the pass on every platform and leaves it off on CUDA, since no backend of its own offers
the fused call there; the patch's does. What the pass needs besides is the user's to ask for:
compiled graphs that hold the cache update, and the rotary embedding as one operation in them.
"""

from __future__ import annotations

from vllm.config.compilation import CompilationConfig, CompilationMode

CACHE_UPDATE = "vllm::unified_kv_cache_update"


def fuse_rope(compilation: CompilationConfig) -> bool:
    """Switch the pass on, or leave all as it is; whether it is on.

    To be called before the model is compiled. The pass takes part only in graphs for at most
    ``rope_kvcache_fusion_max_token_num`` tokens: batches up to there get a graph of their own.
    """
    apart = (
        CACHE_UPDATE in (compilation.splitting_ops or ())
        and not compilation.use_inductor_graph_partition
    )
    if (
        compilation.mode != CompilationMode.VLLM_COMPILE
        or apart
        or not compilation.is_custom_op_enabled("rotary_embedding")
    ):
        return False
    most = compilation.pass_config.rope_kvcache_fusion_max_token_num
    endpoints = compilation.compile_ranges_endpoints or []
    if most not in endpoints and most < max(endpoints, default=0):
        compilation.compile_ranges_endpoints = sorted([*endpoints, most])
    compilation.pass_config.fuse_rope_kvcache = True
    return True
