"""The shared library of the compiled kernels: found, typed, and tied to torch's threads.

A missing, stale or unloadable library is refused with ``NativeUnavailable``; nothing else is ever
served in its place. What the functions mean and which tensors they take is ``native``'s.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

import torch

from kernels_patch import build

_REBUILD = "run `python -m kernels_patch.build` (or install the package again)"

_I32, _I64, _PTR, _F32 = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_ROWS = (_PTR, _I64, _I64)
_CACHE = (_PTR, _I64, _I64, _I64, _I32, _I32, _I32)
_SIGNATURES = {
    "kp_source_hash": (ctypes.c_char_p, ()),
    "kp_n_sets": (_I32, ()),
    "kp_set_name": (ctypes.c_char_p, (_I32,)),
    "kp_set_supported": (_I32, (_I32,)),
    "kp_workspace_bytes": (_I64, ()),
    "kp_max_threads": (_I32, ()),
    "kp_write_kv": (_I32, (_I32, *_ROWS, *_ROWS, _I32, *_CACHE, _PTR, _I64)),
    "kp_decode": (
        _I32,
        (_I32, *_ROWS, _I32, *_CACHE, _PTR, _I64, _PTR, _I32, _I32, _F32, _I32, *_ROWS, _I32),
    ),
    "kp_write_and_decode": (
        _I32,
        (
            *(_I32, *_ROWS, _I32, *_ROWS, *_ROWS, *_CACHE),
            *(_PTR, _I64, _PTR, _I64, _PTR, _I32, _I32, _F32, _I32, *_ROWS),
        ),
    ),
    "kp_first_chunk": (
        _I32,
        (_I32, *(*_ROWS, _I32) * 3, _PTR, *(_I32,) * 4, _F32, *_ROWS, _I32),
    ),
    "kp_solve": (_I32, (_I32, *(_PTR,) * 6, _I32, _I32, _I32, _F32)),
    "kp_prefix": (
        _I32,
        (_I32, *_ROWS, _I32, *_CACHE, _PTR, _I64, _PTR, _PTR, _I32, _I32, _F32, _I32, *_ROWS, _I32),
    ),
}


class NativeUnavailable(Exception):  # noqa: N818 (a state of the machine, not a fault of the caller)
    """The compiled kernels cannot serve here; the message says why and what to do."""


@lru_cache
def load_library() -> ctypes.CDLL:
    """The package's own library. Raises NativeUnavailable."""
    return open_library(build.PACKAGE / build.LIBRARY)


def open_library(path: Path, package: Path = build.PACKAGE) -> ctypes.CDLL:
    """Open and type one library, built from ``package``. Raises NativeUnavailable when it
    is missing, was built from other sources or does not load."""
    if not path.exists():
        raise NativeUnavailable(
            f"the kernels were not compiled ({path.name} is missing; the build found no C++ "
            f"compiler?): {_REBUILD}"
        )
    try:
        ctypes.CDLL(find_openmp(), mode=ctypes.RTLD_GLOBAL)  # ours takes its symbols from there
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path.name} does not load ({error}): {_REBUILD}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise NativeUnavailable(f"{path.name} has no function {name}: {_REBUILD}")
        function.restype, function.argtypes = result, arguments
    if library.kp_source_hash().decode() != build.hash_sources(package):
        raise NativeUnavailable(f"{path.name} was built from other sources: {_REBUILD}")
    return library


def find_openmp() -> str:
    """Path of the OpenMP runtime that torch runs on. Raises NativeUnavailable.

    Other packages map private copies of one (sentencepiece does), so a name in the process's maps
    proves nothing: this is where the dynamic linker finds the symbol from torch's library on.
    """
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    found = _SymbolInfo()
    try:
        function = ctypes.CDLL(str(torch_cpu)).omp_get_max_threads
        if not ctypes.CDLL(None).dladdr(function, ctypes.byref(found)):
            raise OSError("dladdr does not know omp_get_max_threads")
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"no OpenMP runtime to share with torch: {error}") from error
    return os.fsdecode(found.path)


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of dlfcn.h."""

    _fields_ = (
        ("path", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )
