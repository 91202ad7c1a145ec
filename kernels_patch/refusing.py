"""What vLLM finds where it looks for a kind of attention or state that the patch does not serve.

Looking up ``RefusingBackend`` ends the process: vLLM resolves a backend's class only when a layer
of the model needs it.
"""

from __future__ import annotations

from typing import NoReturn

from kernels_patch.switches import stop_server


def __getattr__(name: str) -> NoReturn:
    if name != "RefusingBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stop_server(
        "the model has latent attention, state-space or linear-attention layers, and the patch "
        "serves plain attention only: unset KERNELS_PATCH for this model"
    )
