"""NVIDIA's management library when it is there (package nvidia-ml-py and a driver), else None."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def open_nvml() -> Iterator[Any | None]:
    """The initialised ``pynvml`` module for the length of the block, None without GPU or package.

    An NVML error inside the block is the caller's: a card that answers in part is worth knowing.
    """
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
