"""INT8 KV-cache attention kernels, patched into a stock vLLM by a plug-in.

``layout`` <- {``reference``, ``fragment``, ``native`` (on ``library``), ``torch_form``} <-
{``dispatch``, ``unpaged``} <- ``backend`` <- ``adapters`` <- ``plugin``; ``gpu`` beside them holds
the kernels for Hopper and their backend. Nothing here knows evalgate: a spec names this package by
environment and flags only. Importing it imports nothing heavy; ``solve`` loads on use.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["solve"]


def __getattr__(name: str) -> Any:
    if name == "solve":
        from kernels_patch.unpaged import solve

        return solve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
