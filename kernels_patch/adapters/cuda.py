"""What the CUDA adapters share: how the backend is registered and the interface it is built on.

The backend stands under vLLM's own name for outside backends, ``CUSTOM``, and keeps its pages under
vLLM's own cache type ``int8_per_token_head``: vLLM then plans, pads and shares pages of exactly our
size (two payloads and two float32 scales a token and head) with no change to its planner, hybrid
models included. Both have to be asked for by flags; a guard before vLLM's other backends ends a
server that was asked for the patch without them.
"""

from __future__ import annotations

from types import ModuleType

from kernels_patch.adapters import attention_v1
from kernels_patch.adapters.attention_v1 import BACKEND
from kernels_patch.adapters.interface import check_installed
from kernels_patch.switches import RefusalError, stopping_the_server

BACKEND_FLAGS = "--attention-backend CUSTOM --kv-cache-dtype int8_per_token_head"
GUARDS = "kernels_patch.adapters.guards"

OVERRIDDEN = {
    **attention_v1.OVERRIDDEN,
    f"{BACKEND}:AttentionBackend.get_supported_kernel_block_sizes": (),
    f"{BACKEND}:AttentionBackend.get_kv_cache_shape": (
        "num_blocks",
        "block_size",
        "num_kv_heads",
        "head_size",
        "cache_dtype_str",
    ),
    f"{BACKEND}:AttentionBackend.get_kv_cache_stride_order": ("include_num_layers_dimension",),
    f"{BACKEND}:AttentionBackend.get_supported_head_sizes": ("cls",),
    f"{BACKEND}:AttentionBackend.supports_compute_capability": ("cls", "capability"),
    f"{BACKEND}:AttentionMetadataBuilder.build_for_cudagraph_capture": (
        "self",
        "common_attn_metadata",
    ),
    f"{BACKEND}:AttentionImpl.fused_rope_kvcache_supported": ("self",),
    f"{BACKEND}:AttentionImpl.do_rope_and_kv_cache_update": (
        "self",
        "layer",
        "query",
        "key",
        "value",
        "positions",
        "cos_sin_cache",
        "is_neox",
        "kv_cache",
        "layer_slot_mapping",
    ),
}
USED = {
    **attention_v1.USED,
    "vllm.config.model:ModelConfig": ("enable_sleep_mode",),
    "vllm.config.compilation:CompilationConfig": (
        "mode",
        "pass_config",
        "splitting_ops",
        "use_inductor_graph_partition",
        "compile_ranges_endpoints",
    ),
    "vllm.config.compilation:CompilationConfig.is_custom_op_enabled": ("op",),
    "vllm.config.compilation:PassConfig": (
        "fuse_rope_kvcache",
        "rope_kvcache_fusion_max_token_num",
    ),
    f"{BACKEND}:CommonAttentionMetadata": (
        "query_start_loc_cpu",
        "seq_lens",
        "seq_lens_cpu_upper_bound",
        "block_table_tensor",
        "causal",
    ),
    "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func": (
        "q",
        "k",
        "v",
        "max_seqlen_q",
        "cu_seqlens_q",
        "max_seqlen_k",
        "cu_seqlens_k",
        "softmax_scale",
        "causal",
        "out",
        "fa_version",
    ),
    "vllm.config.parallel:ParallelConfig.use_ubatching": (),
    "vllm.v1.worker.workspace:current_workspace_manager": (),
    "vllm.v1.worker.workspace:WorkspaceManager.get_simultaneous": ("self",),
    "vllm.v1.attention.backends.registry:register_backend": ("backend", "class_path", "is_mamba"),
    "vllm.model_executor.layers.attention.attention:unified_kv_cache_update": (
        "key",
        "value",
        "layer_name",
    ),
}


def register(adapter: str) -> None:
    """Put ``Backend`` of the module ``adapter`` under CUSTOM, and guards before all others: also
    before those of latent attention, or a model with it would be served by stock code unnoticed."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{adapter}.Backend")
    for member in AttentionBackendEnum:
        if member.value:  # the others are tags, and CUSTOM
            register_backend(member, f"{GUARDS}.{member.name}")


def load_backend(adapter: ModuleType) -> type:
    """The backend class, once the installed vLLM has been compared with ``adapter``."""
    with stopping_the_server():
        check_installed(adapter)
        try:  # vLLM would go on from an ImportError, and say no more than that there was one
            from kernels_patch.gpu.backend import Int8KVCudaBackend
        except ImportError as error:
            raise RefusalError(
                f"{error}: the kernels need Triton, NVRTC with its Python bindings and "
                "FlashAttention, which come with the CUDA wheels of PyTorch and vLLM; install those"
            ) from error
    return Int8KVCudaBackend
