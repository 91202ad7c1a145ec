"""vLLM's way in: the entry point of the group ``vllm.general_plugins``.

vLLM calls ``register`` in the API server, in the engine core, in every worker and in the process
that inspects a model's architecture, possibly twice in one process. Unless ``KERNELS_PATCH`` is
set it returns at once and imports nothing beyond the standard library.

It knows neither routes nor kernels nor vLLM's interface: it lets the adapter for the platform and
the version put its backend where vLLM looks for attention.
"""

from __future__ import annotations

from kernels_patch.switches import forced_impl, is_asked_for, stopping_the_server


def register() -> None:
    """Register the INT8 KV backend, or end the process when it is asked for and cannot be had."""
    with stopping_the_server():
        if not is_asked_for():
            return
        forced_impl()
        from kernels_patch.faults import planted_fault

        planted_fault()
        import vllm
        from vllm.platforms import current_platform

        from kernels_patch.adapters import find_adapter

        find_adapter(current_platform.device_type, vllm.__version__).register()
