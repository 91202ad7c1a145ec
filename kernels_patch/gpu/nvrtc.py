"""Compiles a CUDA C++ file of this package with NVRTC and launches it (no shapes, no attention).

NVRTC and its Python bindings come with the CUDA wheels of PyTorch: no compiler has to be installed.
Constants are given as ``-D`` definitions; a compiled kernel is kept for the life of the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cuda.bindings import driver, nvrtc


class CudaError(RuntimeError):
    """A call of NVRTC or of the CUDA driver failed; the message holds its name and its log."""


class Kernel:
    """One compiled function; ``shared_bytes`` of dynamic shared memory are reserved for it."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        self._module = _checked(driver.cuModuleLoadData(cubin), f"loading {name}")
        self._function = _checked(
            driver.cuModuleGetFunction(self._module, name.encode()), f"finding {name}"
        )
        self._shared_bytes = shared_bytes
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(
            driver.cuFuncSetAttribute(self._function, attribute, shared_bytes),
            f"reserving {shared_bytes} bytes of shared memory for {name}",
        )

    def launch(self, grid: int, threads: int, arguments: ctypes.Structure, stream: int) -> None:
        """Launch on ``stream`` (a raw handle); ``arguments`` is the kernel's only parameter."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _checked(
            driver.cuLaunchKernel(
                self._function, grid, 1, 1, threads, 1, 1, self._shared_bytes, stream,
                ctypes.addressof(pointers), 0,
            ),
            "launching",
        )  # fmt: skip


@cache
def compile_cubin(path: Path, definitions: tuple[tuple[str, int], ...], arch: str) -> bytes:
    """The machine code of ``path`` for ``arch`` (``sm_90``); raises CudaError with the log."""
    source = path.read_bytes()
    program = _checked(
        nvrtc.nvrtcCreateProgram(source, path.name.encode(), 0, [], []), f"reading {path.name}"
    )
    options = [b"-std=c++17", f"--gpu-architecture={arch}".encode()]
    options += [f"-D{name}={value}".encode() for name, value in definitions]
    outcome = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if outcome[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "reading the log's size")
        _checked(nvrtc.nvrtcGetProgramLog(program, log), "reading the log")
        raise CudaError(f"{path.name} does not compile with {definitions}:\n{log.decode()}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "reading the code's size")
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin), "reading the code")
    return cubin


def load(
    path: Path, name: str, definitions: Mapping[str, int], shared_bytes: int, arch: str
) -> Kernel:
    """Compile (once a process) and load ``name`` of ``path`` into the current context."""
    return Kernel(compile_cubin(path, tuple(definitions.items()), arch), name, shared_bytes)


def _checked(outcome: tuple[Any, ...], doing: str) -> Any:
    code, *values = outcome
    if int(code) != 0:
        raise CudaError(f"{doing} failed: {code!r}")
    return values[0] if values else None
