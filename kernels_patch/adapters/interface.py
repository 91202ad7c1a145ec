"""Does a vLLM still have the interface that an adapter was written for? (no adapter, no kernel)

Names are ``module:Qualified.name``. A function is described by its parameters, a class by its
annotated fields. ``read_installed`` asks a vLLM that can be imported, ``read_source`` parses one
that is only unpacked.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from kernels_patch.switches import RefusalError

Reader = Callable[[str], tuple[str, ...] | None]


def find_differences(adapter: ModuleType, read: Reader) -> list[str]:
    """What is no longer as ``adapter`` expects it, a sentence each; [] when all is.

    Overridden functions must have exactly the parameters that ours take; what is only used must
    have at least those that we give or read.
    """
    found = []
    for name, expected in adapter.OVERRIDDEN.items():
        actual = read(name)
        if actual is None:
            found.append(f"{name} is gone")
        elif actual != expected:
            found.append(f"{name} takes {', '.join(actual)} and not {', '.join(expected)}")
    for name, expected in adapter.USED.items():
        actual = read(name)
        if actual is None:
            found.append(f"{name} is gone")
        elif missing := [part for part in expected if part not in actual]:
            found.append(f"{name} has no {', '.join(missing)}")
    return found


def check_installed(adapter: ModuleType) -> None:
    """Raise RefusalError when the installed vLLM differs from what ``adapter`` was written for."""
    if found := find_differences(adapter, read_installed):
        raise RefusalError(
            f"this vLLM is not the one that {adapter.__name__} was written for: {'; '.join(found)}"
        )


def read_installed(name: str) -> tuple[str, ...] | None:
    """Parameters or fields of an object of the installed vLLM; None when it is not there."""
    module, _, path = name.partition(":")
    try:
        found: object = import_module(module)
        for part in path.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError):
        return None
    if isinstance(found, type):
        return tuple(inspect.get_annotations(found))
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    return tuple(inspect.signature(found).parameters) if callable(found) else ()


def read_source(root: Path) -> Reader:
    """A reader of the vLLM whose package folder lies in ``root``."""

    def read(name: str) -> tuple[str, ...] | None:
        module, _, path = name.partition(":")
        file = root.joinpath(*module.split(".")).with_suffix(".py")
        if not file.exists():
            file = root.joinpath(*module.split("."), "__init__.py")
        if not file.exists():
            return None
        node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
        for part in path.split("."):
            inner = [n for n in getattr(node, "body", []) if getattr(n, "name", None) == part]
            if not inner:
                return None
            node = inner[-1]
        if isinstance(node, ast.ClassDef):
            fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
            return tuple(field.id for field in fields if isinstance(field, ast.Name))
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            return tuple(argument.arg for argument in plain)
        return ()

    return read
