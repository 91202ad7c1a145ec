"""What is wrong with a value from outside, in one sentence: which key, which value, what to do.

Pydantic finds the fault; the words are ours. Records that are stored one a line are msgspec
structs, which are read five times faster but say less of what they refuse: ``build_model`` gives
the pydantic model of the same keys and types. No file and no record is known here.
"""

from __future__ import annotations

import difflib
import functools
import operator
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
MAX_SHOWN_CHARS = 120


@functools.cache
def build_model(kind: type[msgspec.Struct]) -> type[BaseModel]:
    """The pydantic model of a struct: the same name, keys, types and defaults, as strict.

    What pydantic alone must know of a type stands in its ``Annotated``, beside msgspec's ``Meta``.
    """
    hints = get_type_hints(kind, include_extras=True)
    fields: dict[str, Any] = {
        f.name: (_translate(hints[f.name]), ... if f.required else f.default)
        for f in msgspec.structs.fields(kind)
    }
    return create_model(kind.__name__, __config__=STRICT, **fields)


def _translate(annotation: Any) -> Any:
    """The annotation with models in place of structs."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return build_model(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_translate, get_args(annotation)))
    return annotation


def describe_validation_error(exc: ValidationError, kind: type[BaseModel]) -> str:
    """The first fault of a pydantic error as one sentence: which key, which value, what to do."""
    faults = exc.errors()
    # A misspelt key shows up twice, as missing and as unknown: the second says what to do.
    first = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    path = ".".join(str(p) for p in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(
            str(first["loc"][-1]), _known_keys(kind, first["loc"][:-1]), n=1
        )
        return f"unknown key {path!r}" + (f", did you mean {near[0]!r}?" if near else "")
    if first["type"] == "missing":
        return f"key {path!r} is missing"
    if first["type"] == "value_error":
        return (f"{path}: " if path else "") + str(first["ctx"]["error"])
    return f"{path or 'the value'} is {show_value(first.get('input'))}: {first['msg']}"


def show_value(value: Any) -> str:
    """A value from outside as an error message shows it, its end left out where it is long."""
    return shorten(repr(value))


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def _known_keys(kind: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys of the model that lies at ``path`` inside ``kind``."""
    for part in path:
        # A list index or a free dictionary key leads to the model that is already in hand.
        if part in kind.model_fields:
            kind = _find_model(kind.model_fields[str(part)].annotation) or kind
    return list(kind.model_fields)


def _find_model(annotation: Any) -> type[BaseModel] | None:
    """The first model inside an annotation such as ``dict[str, Model]`` or ``Model | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_find_model(inner) for inner in getattr(annotation, "__args__", ()))
    return next((model for model in found if model is not None), None)
