"""The plug-in's environment variables, parsed once; and the one way in which it stops a server.

``KERNELS_PATCH``        ``int8_kv`` asks for the INT8 KV cache; unset or empty: vLLM is untouched
``KERNELS_PATCH_IMPL``   ``native`` or ``torch`` forces one implementation; unset prefers native
``KERNELS_PATCH_FAULT``  a planted fault, see ``faults``

Standard library only: this is imported in every process of every vLLM server that has the package
installed, also when nothing was asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

SWITCH = "KERNELS_PATCH"
IMPL_SWITCH = "KERNELS_PATCH_IMPL"
FAULT_SWITCH = "KERNELS_PATCH_FAULT"
SCHEME = "int8_kv"
IMPLS = ("native", "torch")
REFUSED_EXIT_CODE = 78  # EX_CONFIG of sysexits.h


class RefusalError(Exception):
    """The patch was asked for and cannot serve; the message says why and what to do."""


def is_asked_for(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the INT8 KV cache is asked for. Raises RefusalError for an unknown scheme."""
    value = env.get(SWITCH, "")
    if value in ("", SCHEME):
        return value == SCHEME
    raise RefusalError(f"{SWITCH}={value!r} names no scheme: set it to {SCHEME!r} or unset it")


def forced_impl(env: Mapping[str, str] = os.environ) -> str | None:
    """The implementation that is forced, or None. Raises RefusalError for an unknown one."""
    value = env.get(IMPL_SWITCH, "")
    if value == "":
        return None
    if value in IMPLS:
        return value
    raise RefusalError(
        f"{IMPL_SWITCH}={value!r} is unknown: set it to native or torch, or unset it"
    )


def say(message: str) -> None:
    """Print one line to stderr. vLLM's logger may be configured away; stderr is always kept."""
    print(f"kernels_patch: {message}", file=sys.stderr, flush=True)


def stop_server(reason: str) -> NoReturn:
    """Say the reason and end this process at once, without unwinding.

    vLLM logs and drops an exception that a plug-in raises while it is being loaded and goes on as
    a stock server; only the end of the process cannot be dropped. Its parent sees the exit and
    stops the server.
    """
    say(f"refusing to start: {reason}")
    os._exit(REFUSED_EXIT_CODE)


@contextmanager
def stopping_the_server() -> Iterator[None]:
    """Turn any failure inside the block into the end of this process; its message is the reason."""
    try:
        yield
    except RefusalError as error:
        stop_server(str(error))
    except Exception as error:
        stop_server(f"{type(error).__name__}: {error}")
