"""vLLM 0.26 on CUDA: the interface of ``cuda``, unchanged."""

from __future__ import annotations

import sys

from kernels_patch.adapters import cuda
from kernels_patch.adapters.cuda import OVERRIDDEN, USED

__all__ = ["OVERRIDDEN", "USED", "register"]


def register() -> None:
    cuda.register(__name__)


def __getattr__(name: str) -> type:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return cuda.load_backend(sys.modules[__name__])
