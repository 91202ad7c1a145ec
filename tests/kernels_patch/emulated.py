"""The compiled kernels of another processor as Python functions, run under an emulator.

``cross_compile`` builds the library and ``emulated.cpp`` for 64-bit Arm; ``EmulatedKernels`` has
the four functions that ``kernels_patch.check`` knows, and starts one process for each call.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels_patch import build, native

COMPILER, EMULATOR, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
HERE = Path(__file__).parent


def find_missing_tool() -> str | None:
    """The first tool that emulation needs and this machine lacks."""
    return next((tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None), None)


def compile_program(source: Path, target: Path, *flags: str, compiler: str = COMPILER) -> Path:
    """Compile one test program."""
    command = (compiler, "-std=c++17", "-O2", "-Wno-psabi", *flags, source, "-o", target)
    subprocess.run([str(x) for x in command], check=True)
    return target


def cross_compile(folder: Path) -> tuple[Path, Path]:
    """The program and the library for 64-bit Arm, made in ``folder``."""
    library = folder / "native_arm.so"
    build.compile_library(library, compiler=COMPILER, machine="aarch64")
    # The library takes OpenMP's functions from its process, here as beside torch.
    flags = ("-fopenmp", "-Wl,--no-as-needed")
    return compile_program(HERE / "emulated.cpp", folder / "emulated", *flags), library


def run_emulated(*command: str | Path, cpu: str = "max", stdin: bytes = b"") -> bytes:
    """Standard output of an Arm program on an emulated ``cpu``."""
    emulator = (EMULATOR, "-cpu", cpu, "-L", SYSROOT, *command)
    done = subprocess.run([str(x) for x in emulator], input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@dataclass(frozen=True)
class EmulatedKernels:
    """Kernels of one instruction set; see ``native.NativeKernels`` for the functions."""

    program: Path
    library: Path
    isa: str

    def write_kv(self, key, value, kv_cache, slot_mapping):
        written = self._call(
            "write_kv", key=key, value=value, kv_cache=kv_cache, slots=slot_mapping
        )
        kv_cache.copy_(written.view(torch.int8).view(kv_cache.shape))

    def first_chunk(self, query, key, value, query_start_loc, sm_scale, out):
        given = {"query": query, "key": key, "value": value, "starts": query_start_loc}
        out.copy_(self._call("first_chunk", sm_scale, **given).view(out.dtype).view(out.shape))

    def prefix(self, query, kv_cache, block_table, query_start_loc, seq_lens, sm_scale, out):
        given = {"query": query, "kv_cache": kv_cache, "table": block_table, "lengths": seq_lens}
        rows = self._call("prefix", sm_scale, starts=query_start_loc, **given)
        out.copy_(rows.view(out.dtype).view(out.shape))

    def decode(self, query, kv_cache, block_table, seq_lens, sm_scale, out):
        given = {"query": query, "kv_cache": kv_cache, "table": block_table, "lengths": seq_lens}
        out.copy_(self._call("decode", sm_scale, **given).view(out.dtype).view(out.shape))

    def _call(
        self,
        name: str,
        sm_scale: float = 1.0,
        *,
        query: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        kv_cache: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The answer's bytes, uint8."""
        rows = key if query is None else query
        cache_shape = (0, key.shape[1], 0) if kv_cache is None else kv_cache.shape[:3]
        n_blocks, n_kv_heads, block_size = cache_shape
        one_a_request = starts[1:] if lengths is None and starts is not None else lengths
        header = struct.pack(
            "8qd",
            native._TYPES[rows.dtype],
            rows.shape[1],
            n_kv_heads,
            rows.shape[2],
            n_blocks,
            block_size,
            0 if one_a_request is None else len(one_a_request),
            0 if table is None else table.shape[1],
            sm_scale,
        )
        arrays = (query, key, value, kv_cache, slots, table, starts, lengths)
        stdin = header + b"".join(map(_pack, arrays))
        answer = run_emulated(self.program, self.library, self.isa, name, stdin=stdin)
        return torch.frombuffer(bytearray(answer), dtype=torch.uint8)


def _pack(array: torch.Tensor | None) -> bytes:
    raw = b"" if array is None else array.contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("q", len(raw)) + raw
