"""What an evalgate that is gone left running: the mark on every process that it starts, and who
still carries it.

A launched server carries its owner twice. In its environment, which every child inherits but a
child that renames itself overwrites (vLLM's engine does, and the engine holds the memory); and in
the name of the folder that it runs in, which stays. Ends nothing.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

OWNER_VARIABLE = "EVALGATE_OWNER"
FOLDER_PREFIX = "evalgate-server-"


def build_owner() -> str:
    """Our process id and its start, as an id alone is used again."""
    return f"{os.getpid()}@{psutil.Process().create_time():.2f}"


def make_folder() -> str:
    """A new empty folder for one server to run in, named after its owner."""
    return tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{build_owner()}-")


def find_leftovers() -> list[int]:
    """Process ids of servers, and of what they started, whose evalgate is gone."""
    return sorted(
        process.pid
        for process in psutil.process_iter()
        if (owner := _find_owner(process)) is not None and not _is_alive(owner)
    )


def find_rivals() -> list[int]:
    """Process ids of other evalgates that have servers running now."""
    owners = {_find_owner(process) for process in psutil.process_iter()} - {None, build_owner()}
    return sorted(int(o.partition("@")[0]) for o in owners if o is not None and _is_alive(o))


def _find_owner(process: psutil.Process) -> str | None:
    """The owner that a process carries; None of a stranger, a zombie or another user's."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if owner := process.environ().get(OWNER_VARIABLE):
            return owner
        folder = Path(process.cwd()).name
    except psutil.Error:
        return None
    if not folder.startswith(FOLDER_PREFIX) or "@" not in folder:
        return None
    return folder.removeprefix(FOLDER_PREFIX).rpartition("-")[0]


def _is_alive(owner: str) -> bool:
    pid, _, start = owner.partition("@")
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" == start
    except (ValueError, psutil.Error):
        return False
