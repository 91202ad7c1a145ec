"""vLLM 0.32 on CPUs: the backend takes the place of the CPU's own."""

from __future__ import annotations

import sys

from kernels_patch.adapters import attention_v1
from kernels_patch.adapters.attention_v1 import BACKEND
from kernels_patch.adapters.interface import check_installed
from kernels_patch.switches import stopping_the_server

REFUSING_BACKEND = "kernels_patch.refusing.RefusingBackend"

OVERRIDDEN = {
    **attention_v1.OVERRIDDEN,
    f"{BACKEND}:AttentionBackend.get_supported_kernel_block_sizes": ("kv_cache_spec",),
    f"{BACKEND}:AttentionBackend.supported_kv_cache_layouts": ("cls",),
    f"{BACKEND}:AttentionBackend.customize_spec": ("cls", "spec"),
}
USED = {
    **attention_v1.USED,
    f"{BACKEND}:CommonAttentionMetadata": (
        "query_start_loc_cpu",
        "seq_lens",
        "block_table_tensor",
        "slot_mapping",
        "causal",
    ),
    "vllm.v1.kv_cache_interface:AttentionSpec": ("dtype", "state_content_bytes"),
    "vllm.v1.attention.backends.registry:register_backend": ("backend", "class_path", "is_mamba"),
    f"{BACKEND}:AttentionBackend": ("forward_includes_kv_cache_update",),
}


def register() -> None:
    """Take the place of the CPU's attention; let every other kind of state refuse by name.

    Without the second part a model with latent attention or state-space layers would be served by
    the stock code while the operator believes that it is patched.
    """
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        MambaAttentionBackendEnum,
        register_backend,
    )

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.Backend")
    register_backend(AttentionBackendEnum.CPU_MLA, REFUSING_BACKEND)
    register_backend(AttentionBackendEnum.AMX_MLA, REFUSING_BACKEND)
    for member in MambaAttentionBackendEnum:
        register_backend(member, REFUSING_BACKEND, is_mamba=True)


def __getattr__(name: str) -> type:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with stopping_the_server():
        check_installed(sys.modules[__name__])
        from kernels_patch.backend import Int8KVBackend

    return Int8KVBackend
