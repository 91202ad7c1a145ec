"""What evalgate reads of a server's own arguments.

vLLM takes "_" for "-" in a flag and "=" before a value, and the last of two equal flags. Knows no
spec and no server.
"""

from __future__ import annotations

from collections.abc import Sequence

TENSOR_FLAGS = ("--tensor-parallel-size", "-tp")
PIPELINE_FLAGS = ("--pipeline-parallel-size", "-pp")
DATA_FLAGS = ("--data-parallel-size", "-dp")


def find_value(args: Sequence[str], flags: Sequence[str]) -> str | None:
    """The value of a flag that goes by one of these names; None when it is not there."""
    found = None
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag.replace("_", "-") in flags:
            found = value if equals else (args[i + 1] if i + 1 < len(args) else "")
    return found


def parse_number(args: Sequence[str], flags: Sequence[str]) -> int | None:
    """A flag's value where it is a plain number, else None."""
    value = find_value(args, flags) or ""
    return int(value) if value.isdecimal() else None


def count_engines(args: Sequence[str]) -> int:
    """Engines of a server, each of which serves a part of the requests."""
    return max(parse_number(args, DATA_FLAGS) or 1, 1)


def count_workers(args: Sequence[str]) -> int:
    """Workers of one engine: ranks of tensor parallelism times pipeline stages."""
    sizes = (parse_number(args, flags) or 1 for flags in (TENSOR_FLAGS, PIPELINE_FLAGS))
    tensor, pipeline = (max(size, 1) for size in sizes)
    return tensor * pipeline
