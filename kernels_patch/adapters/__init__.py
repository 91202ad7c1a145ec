"""One small module for each generation of vLLM: what is registered there, and on what it relies.

An adapter holds ``OVERRIDDEN`` (what vLLM calls on us, parameters in vLLM's order), ``USED`` (what
we read of vLLM's) and ``register()``. ``interface`` compares the first two with a vLLM that is
installed or unpacked; vLLM resolves the backend through the adapter's ``Backend``, which compares
before it answers, so that an upgrade that breaks the patch says so instead of serving nonsense.

Importing this package or an adapter imports nothing of vLLM.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from kernels_patch.switches import RefusalError

# Platform and series of vLLM -> the module here.
ADAPTERS = {
    ("cpu", "0.32"): "cpu_0_32",
    ("cuda", "0.26"): "cuda_0_26",
    ("cuda", "0.24"): "cuda_0_24",
}


def find_adapter(platform: str, version: str) -> ModuleType:
    """The adapter for vLLM's ``platform`` (``device_type``) and version.

    Raises RefusalError when there is none.
    """
    series = ".".join(version.split(".")[:2])
    name = ADAPTERS.get((platform, series))
    if name is not None:
        return import_module(f"{__name__}.{name}")
    served = [known for on, known in ADAPTERS if on == platform]
    if not served:
        raise RefusalError(
            f"the platform is {platform!r}, and this patch serves vLLM's CPU build and Hopper GPUs "
            "only: unset KERNELS_PATCH"
        )
    raise RefusalError(
        f"vLLM {version} is not supported on {platform}: the patch is built on the attention "
        f"interface of vLLM {', '.join(f'{series}.x' for series in served)}; install that version "
        "or unset KERNELS_PATCH"
    )
