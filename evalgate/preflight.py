"""What every run asks before anything is launched or sent, and `evalgate doctor` asks too.

A check takes at most a moment, starts nothing and writes nothing. It returns what it found or
raises the error that the run would have ended with, only sooner. Knows no interpreter and no
network; ``doctor`` asks those.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from evalgate.arguments import parse_number
from evalgate.embedded import default_cache_root, find_packaged_gguf, locate_converted
from evalgate.environment import locate_python
from evalgate.errors import ServerStartError, StorageError, UsageError
from evalgate.leftovers import find_leftovers, find_rivals
from evalgate.load import check_context
from evalgate.memory import (
    GIB,
    Memory,
    check_memory,
    describe_holders,
    describe_memory,
    parse_memory_fraction,
    read_memory,
    select_used,
)
from evalgate.redaction import is_secret_variable
from evalgate.spec import PACKAGED_MODEL, PATCHES, ArmSpec, Spec
from evalgate.tasks import check_task

MIN_RESULTS_BYTES = 256 * 2**20  # records, logs and reports of a long run
MIN_CACHE_BYTES = 1536 * 2**20  # the packaged model in float32, and its scratch
SERVER_PREFIX = "VLLM_"
CONTEXT_FLAG = "--max-model-len"
KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"  # GiB
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")


@dataclass(frozen=True)
class Finding:
    """What a check found; ``message`` is a sentence, and says what to do unless all is well."""

    status: Literal["ok", "warning", "problem"]
    message: str


Check = Callable[[], Finding]


def list_quick_checks(spec: Spec, folder: Path) -> list[tuple[str, Check]]:
    """Checks by name, in the order in which they are best read. ``folder``: the run directory.

    Each raises EvalgateError for what would end the run.
    """
    checks: list[tuple[str, Check]] = [
        ("leftovers", check_leftovers),
        ("other runs", check_rivals),
        ("results folder", lambda: check_folder(folder)),
        ("lengths and tasks", lambda: check_asked(spec)),
    ]
    if any(not arm.attached for arm in spec.arms.values()):
        checks += [
            ("interpreters and paths", lambda: check_paths(spec)),
            ("inherited settings", lambda: check_inherited(spec, os.environ)),
            ("model", lambda: check_model(spec)),
            ("memory", lambda: check_room(spec, read_memory())),
            ("port", check_loopback),
        ]
    if spec.fidelity is not None:
        checks.append(("fidelity", lambda: check_texts(spec)))
    for name, arm in spec.arms.items():
        if arm.attached:
            checks.append((f"key of {name}", lambda arm=arm: check_key(arm)))
    return checks


def find_obstacles(spec: Spec, folder: Path) -> list[str]:
    """Make every quick check; what is worth a warning, as sentences. Raises the first problem."""
    found = [(name, check()) for name, check in list_quick_checks(spec, folder)]
    return [f"{name}: {finding.message}" for name, finding in found if finding.status != "ok"]


def check_leftovers() -> Finding:
    left = find_leftovers()
    if not left:
        return Finding("ok", "no earlier run left a process behind")
    pids = " ".join(map(str, left))
    return Finding(
        "warning",
        f"servers of an earlier evalgate still run and hold memory and processors (process ids: "
        f"{pids}): end them (kill {pids}), as they slow down what is measured",
    )


def check_rivals() -> Finding:
    """Is another evalgate at work? Its requests would be in our times, and ours in its."""
    rivals = find_rivals()
    if not rivals:
        return Finding("ok", "no other evalgate has a server running")
    return Finding(
        "warning",
        f"another evalgate measures on this machine now (process id {_list(rivals)}), and each "
        "slows down what the other measures: wait for its end",
    )


def _list(pids: list[int]) -> str:
    return ", ".join(map(str, pids))


def check_paths(spec: Spec) -> Finding:
    """Are the interpreters there, and would a server find what its arguments name? Raises
    UsageError.

    A server runs in an empty folder of its own. A PYTHONPATH that leads nowhere from there is not
    missed by anybody: the arm would be what is installed, not what is to be measured.
    """
    for name, arm in spec.arms.items():
        if arm.attached:
            continue
        python = locate_python(arm.python)
        if shutil.which(python) is None:
            raise UsageError(
                f"arms.{name}.python: there is no interpreter {python}: name that of its build"
            )
        values = [arg.partition("=")[2] if arg.startswith("--") else arg for arg in arm.args]
        loose = [value for value in values if value.startswith(("./", "../", "~"))]
        entries = arm.env.get("PYTHONPATH", "").split(os.pathsep)
        loose += [entry for entry in entries if entry and not os.path.isabs(entry)]
        if loose:
            raise UsageError(
                f"arms.{name}: {loose[0]!r} is a path from this folder, and a server runs in an "
                "empty one of its own: make it absolute"
            )
    return Finding("ok", "interpreters are there, and paths are absolute")


def check_inherited(spec: Spec, env: Mapping[str, str]) -> Finding:
    """Does our own environment ``env``, which every launched server inherits, decide what it is?

    Raises UsageError where it would patch an arm that is to be stock: both arms would be the
    candidate then, and no evidence would say so.
    """
    launched = {name: arm for name, arm in spec.arms.items() if not arm.attached}
    for patch in PATCHES.values():
        for name, arm in launched.items():
            if env.get(patch.switch) and arm.patch is None and patch.switch not in arm.env:
                raise UsageError(
                    f"{patch.switch}={env[patch.switch]} is set here, and the arm {name} would "
                    f"inherit it and be patched too: unset {patch.switch}"
                )
    stray = sorted(
        name
        for name in env
        if name.startswith(SERVER_PREFIX)
        and not is_secret_variable(name)
        and any(name not in arm.env for arm in launched.values())
    )
    if stray:
        return Finding(
            "warning",
            f"servers inherit {', '.join(stray)}, which no record keeps: unset them, or set them "
            "in the env of each arm, so that the run can be repeated",
        )
    return Finding("ok", "nothing that is set here decides what a server does")


def check_folder(folder: Path) -> Finding:
    """Can the run directory be written, and is there room? Raises StorageError."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"{place} is not a folder: choose another results folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write to {place}: choose a folder that can be written")
    return _check_free(place, MIN_RESULTS_BYTES, f"{folder} can be written")


def _check_free(place: Path, least_bytes: int, what: str) -> Finding:
    free = shutil.disk_usage(place).free
    if free < least_bytes:
        raise StorageError(
            f"{place} has {free / GIB:.2f} GiB free, {least_bytes / GIB:.2f} are wanted: free the "
            "disk or choose another folder"
        )
    return Finding("ok", f"{what}, {free / GIB:.1f} GiB are free")


def check_model(spec: Spec) -> Finding:
    """Is the model there, or can it be made? Raises UsageError, StorageError without room."""
    path = spec.model.path
    if path == PACKAGED_MODEL:
        source = find_packaged_gguf()
        target = locate_converted(source)
        if target.exists():
            return Finding("ok", f"the packaged model is converted in {target}")
        place = default_cache_root()
        while not place.exists():
            place = place.parent
        what = f"{source.name} is installed and will be converted"
        return _check_free(place, MIN_CACHE_BYTES, what)
    folder = find_model_folder(spec)
    if folder is None:
        return Finding("ok", f"{path} is a hub name: vLLM finds it in its cache or downloads it")
    return Finding("ok", f"{folder} exists")


def find_model_folder(spec: Spec) -> Path | None:
    """The model's folder (or file), None when ``model.path`` is a hub name, or unset.

    Raises UsageError for a folder that is not there.
    """
    path = spec.model.path
    if path == PACKAGED_MODEL:
        return locate_converted(find_packaged_gguf())
    if path is None:
        return None
    if not path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():
        return None
    folder = Path(path).expanduser()
    if not folder.exists():
        raise UsageError(f"model.path {path!r} does not exist: name an existing folder")
    return folder.resolve()


def check_asked(spec: Spec) -> Finding:
    """Are the tasks and their data there, and do prompts and answers fit --max-model-len, or the
    model's own limit? An attached server's is asked later. Raises UsageError."""
    launched = any(not arm.attached for arm in spec.arms.values())
    own = _read_model_limit(find_model_folder(spec)) if launched else None
    limits = {
        name: None if arm.attached else parse_context(arm.args) or own
        for name, arm in spec.arms.items()
    }
    for limit in limits.values():
        check_lengths(spec, limit)
    shown = ", ".join(f"{name} {limit or 'unknown'}" for name, limit in limits.items())
    longest = max(bucket.max_tokens - 1 for bucket in spec.load.buckets)
    return Finding(
        "ok",
        f"{longest} prompt and {spec.load.output_tokens} output tokens fit the context ({shown})",
    )


def check_texts(spec: Spec) -> Finding:
    """Has the load as many prompts as [fidelity] asks for texts? Each gives one, its answer."""
    assert spec.fidelity is not None, "asked for where there is a [fidelity]"
    prompts = sum(bucket.prompts for bucket in spec.load.buckets)
    if "samples" in spec.fidelity.model_fields_set and spec.fidelity.samples > prompts:
        return Finding(
            "warning",
            f"fidelity.samples is {spec.fidelity.samples}, and the load has {prompts} prompts, "
            f"which give one text each: {prompts} are measured; raise prompts in [[load.buckets]]",
        )
    return Finding("ok", f"{min(spec.fidelity.samples, prompts)} texts")


def check_lengths(spec: Spec, max_model_len: int | None) -> None:
    """Raise UsageError for the first bucket or task whose prompt and answer do not fit."""
    for bucket in spec.load.buckets:
        check_context(bucket.name, bucket.max_tokens - 1, spec.load.output_tokens, max_model_len)
    lengths = [(bucket.min_tokens, bucket.max_tokens) for bucket in spec.load.buckets]
    for name, task in spec.tasks.items():
        check_task(name, task, lengths, max_model_len)


def parse_context(args: list[str]) -> int | None:
    """--max-model-len of a server's arguments, None when it is not a plain number there."""
    return parse_number(args, (CONTEXT_FLAG,))


def _read_model_limit(folder: Path | None) -> int | None:
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        limit = config.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return limit if type(limit) is int else None


def check_room(spec: Spec, memories: list[Memory]) -> Finding:
    """Is there memory for the arms that are up at once? Raises ServerStartError with its holders.

    On GPUs: the shares that the arms ask for. On the CPU: KV cache and weights, a lower bound.
    """
    launched = [arm for arm in spec.arms.values() if not arm.attached]
    shown = "; ".join(describe_memory(memory) for memory in memories)
    if memories and memories[0].device == "RAM":
        weights = _compute_weight_bytes(find_model_folder(spec))
        needs = [_compute_kv_bytes(arm) + weights for arm in launched]
        need = sum(needs) if spec.schedule.mode == "resident" else max(needs)
        if need > memories[0].free_bytes:
            raise ServerStartError(
                f"{shown}, and KV cache and weights take at least {need / GIB:.2f} GiB: end what "
                f"holds it ({describe_holders(memories[0])}), or lower {KV_SPACE_VARIABLE}"
            )
        return Finding("ok", f"{shown}; KV cache and weights take at least {need / GIB:.2f} GiB")
    shares: dict[str, float] = {}
    for arm in launched:
        fraction = parse_memory_fraction(arm.args) or 0.0
        for memory in select_used(memories, {**os.environ, **arm.env}, arm.args):
            before = shares.get(memory.device, 0.0)
            together = spec.schedule.mode == "resident"
            shares[memory.device] = before + fraction if together else max(before, fraction)
    for memory in memories:
        check_memory([memory], shares.get(memory.device, 0.0))
    return Finding("ok", shown)


def _compute_kv_bytes(arm: ArmSpec) -> int:
    space = {**os.environ, **arm.env}.get(KV_SPACE_VARIABLE, "")
    return int(float(space) * GIB) if space.replace(".", "", 1).isdigit() else 0


def _compute_weight_bytes(model: Path | None) -> int:
    if model is None or not model.is_dir():
        return 0
    return sum(f.stat().st_size for f in model.iterdir() if f.suffix in WEIGHT_SUFFIXES)


def check_loopback() -> Finding:
    """Can a server on the loopback address be reached? Raises ServerStartError."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2.0):
                return Finding("ok", "a free port on 127.0.0.1 can be had and reached")
    except OSError as exc:
        raise ServerStartError(
            f"no server can be reached on 127.0.0.1 ({exc}): allow loopback connections"
        ) from None


def check_key(arm: ArmSpec) -> Finding:
    """Is an attached arm's key there, and would it travel in the open? Raises UsageError."""
    if arm.api_key_env is None:
        return Finding("ok", "none is asked for")
    if not os.environ.get(arm.api_key_env):
        raise UsageError(f"{arm.api_key_env} is not set: export the key, or drop api_key_env")
    address = urlsplit(arm.base_url or "")
    if address.scheme == "http" and address.hostname not in _find_own_addresses():
        return Finding(
            "warning",
            f"the key in {arm.api_key_env} travels unencrypted to {address.hostname}: use https",
        )
    return Finding("ok", f"{arm.api_key_env} is set")


def _find_own_addresses() -> set[str]:
    addresses = psutil.net_if_addrs().values()
    return {"localhost", *(entry.address for entries in addresses for entry in entries)}
