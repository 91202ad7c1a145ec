"""vLLM 0.26 on CUDA: the interface of ``cuda``, unchanged."""

from __future__ import annotations

import sys

from kernels_patch.adapters import cuda
from kernels_patch.adapters.cuda import OVERRIDDEN, USED
from kernels_patch.adapters.interface import check_installed
from kernels_patch.switches import stopping_the_server

__all__ = ["OVERRIDDEN", "USED", "register"]


def register() -> None:
    cuda.register(__name__)


def __getattr__(name: str) -> type:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with stopping_the_server():
        check_installed(sys.modules[__name__])
    from kernels_patch.gpu.backend import Int8KVCudaBackend

    return Int8KVCudaBackend
