"""Compiles a CUDA C++ file of this package with NVRTC and launches it (no shapes, no attention).

NVRTC and its Python bindings come with the CUDA wheels of PyTorch: no compiler has to be installed.
Constants are given as ``-D`` definitions; a compiled kernel is kept for the life of the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
        self._name = name
        self._shared_bytes = shared_bytes
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(
            driver.cuFuncSetAttribute(self._function, attribute, shared_bytes),
            f"reserving {shared_bytes} bytes of shared memory for {name}",
        )

    def launch_cooperative(
        self, grid: int, threads: int, arguments: ctypes.Structure, stream: int
    ) -> None:
        """Launch on ``stream`` (a raw handle) with all CTAs resident, or raise CudaError.

        ``arguments`` is the kernel's only parameter.
        """
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _checked(
            driver.cuLaunchCooperativeKernel(
                self._function, grid, 1, 1, threads, 1, 1, self._shared_bytes, stream,
                ctypes.addressof(pointers),
            ),
            f"launching {self._name}",
        )  # fmt: skip


@dataclass(frozen=True)
class Build:
    """One compilation: ``path`` with ``definitions`` for ``arch`` (``sm_90``)."""

    path: Path
    definitions: tuple[tuple[str, int], ...]
    arch: str = "sm_90"


_cubins: dict[Build, bytes] = {}


def compile_all(builds: Iterable[Build]) -> None:
    """Compile what is not compiled yet, side by side: NVRTC takes some 4 s and leaves the GIL."""
    missing = list(dict.fromkeys(build for build in builds if build not in _cubins))
    with ThreadPoolExecutor() as pool:
        _cubins.update(zip(missing, pool.map(_compile, missing), strict=True))


def load(build: Build, name: str, shared_bytes: int) -> Kernel:
    """Compile (once a process) and load function ``name`` into the current context."""
    if build not in _cubins:
        _cubins[build] = _compile(build)
    return Kernel(_cubins[build], name, shared_bytes)


def _compile(build: Build) -> bytes:
    name = build.path.name
    program = _checked(
        nvrtc.nvrtcCreateProgram(build.path.read_bytes(), name.encode(), 0, [], []),
        f"reading {name}",
    )
    options = [b"-std=c++17", f"--gpu-architecture={build.arch}".encode()]
    options += [f"-D{key}={value}".encode() for key, value in build.definitions]
    outcome = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if outcome[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "reading the log's size")
        _checked(nvrtc.nvrtcGetProgramLog(program, log), "reading the log")
        raise CudaError(f"{name} does not compile with {build.definitions}:\n{log.decode()}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "reading the code's size")
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin), "reading the code")
    return cubin


def _checked(outcome: tuple[Any, ...], doing: str) -> Any:
    code, *values = outcome
    if int(code) != 0:
        raise CudaError(f"{doing} failed: {code!r}")
    return values[0] if values else None
