"""Compiles the C++ kernels into one shared library, and says which sources it was built from.

Run by the package's own build (``setup.py``, so by every ``pip install``), and by hand after a
change of the sources: ``python -m kernels_patch.build``. The library holds the kernels for every
instruction set of the architecture and the hash of the sources; ``library`` refuses one whose
hash is not that of the sources beside it. Standard library only: the build imports this file by
its path, before the package exists.

The library is linked against no OpenMP runtime on purpose: its symbols are taken from the one that
torch has loaded (``library``), so that a process has one pool of threads.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LIBRARY = "_native.so"
SOURCES = ("native.cpp", "tiles.cpp", "tiles.h")

_COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors wider than the base instruction set never cross a function boundary
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, *(f"-mavx512{x}" for x in ("f", "bw", "vl", "dq", "vnni")))
_X86_SETS = {"avx2": _AVX2, "avx512": (*_AVX512, "-mprefer-vector-width=512")}
_ARM_SETS = {"dotprod": ("-march=armv8.2-a+dotprod",)}
_SETS = {"x86_64": _X86_SETS, "AMD64": _X86_SETS, "aarch64": _ARM_SETS}


class BuildError(Exception):
    """The compiler is missing or failed; the message holds what it said."""


def hash_sources(package: Path = PACKAGE) -> str:
    """SHA-256 of the sources and of this file (which holds the flags), 64 hex digits."""
    digest = hashlib.sha256()
    for name in (*SOURCES, "build.py"):
        digest.update(name.encode() + b"\0" + (package / name).read_bytes() + b"\0")
    return digest.hexdigest()


def list_sets(machine: str) -> dict[str, tuple[str, ...]]:
    """Names of the instruction sets that are built for ``machine``, and the flags of each."""
    return {"portable": (), **_SETS.get(machine, {})}


def compile_library(
    target: Path,
    package: Path = PACKAGE,
    compiler: str | None = None,
    machine: str = platform.machine(),
) -> None:
    """Compile ``package``'s sources into ``target`` (replaced atomically).

    ``compiler`` builds for ``machine`` (as ``platform.machine`` names it); without one, that of
    this machine is found. Raises BuildError.
    """
    compiler = compiler or _find_compiler()
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch) / "native.o"]
        define = f'-DKP_SOURCE_HASH="{hash_sources(package)}"'
        _run(compiler, *_COMMON, define, "-c", package / "native.cpp", "-o", objects[0])
        for name, flags in list_sets(machine).items():
            objects.append(Path(scratch) / f"tiles_{name}.o")
            names = (f"-DKP_TILES=kp_tiles_{name}", f'-DKP_TILES_NAME="{name}"')
            source = package / "tiles.cpp"
            _run(compiler, *_COMMON, *flags, *names, "-c", source, "-o", objects[-1])
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            _run(compiler, "-shared", *objects, "-o", partial, "-lm")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        if shutil.which(name):
            return name
    raise BuildError(
        f"no C++ compiler ({wanted or 'g++, clang++, c++'}) on PATH: install one, or set CXX"
    )


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} exited with {done.returncode}:\n{done.stderr.strip()}")


if __name__ == "__main__":
    try:
        compile_library(PACKAGE / LIBRARY)
    except BuildError as error:
        sys.exit(f"kernels_patch was not built: {error}")
    print(f"built {PACKAGE / LIBRARY}")
