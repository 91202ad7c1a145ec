"""Which unfinished runs this user began here, and with which spec: whose word a resume may take.

A results folder says of itself what its maker wrote, and resuming it launches the interpreters,
and sends keys to the servers, that its run.json names. So the proof lies outside of it: a small
file for each unfinished run in evalgate's cache folder, this user's own. Knows no spec but by its
digest.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from evalgate.embedded import default_cache_root

FOLDER = "started"
_RUN_ID = re.compile(r"[0-9a-f]{16}")  # as we make them: a stranger's may be a path
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def note_start(run_id: str, spec_sha256: str) -> None:
    """Remember a run that is about to begin.

    A cache that cannot be written stops no run; it has to be resumed with its spec then.
    """
    path = _locate(run_id)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "w", encoding="ascii", opener=_open_own) as file:
            file.write(spec_sha256)


def forget_start(run_id: str) -> None:
    """A run that is complete is not resumed any more."""
    with suppress(OSError):
        _locate(run_id).unlink()


def was_started_here(run_id: str, spec_sha256: str) -> bool:
    """True when this user began the run, and with this very spec.

    A file that somebody else owns or may write proves nothing.
    """
    if not _RUN_ID.fullmatch(run_id):
        return False
    try:
        with open(_locate(run_id), "rb", opener=_open_own) as file:
            status = os.fstat(file.fileno())
            ours = status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
            return ours and file.read(len(spec_sha256) + 1) == spec_sha256.encode()
    except OSError:
        return False


def _locate(run_id: str) -> Path:
    return default_cache_root() / FOLDER / run_id


def _open_own(path: str, flags: int) -> int:
    """An opener for a file of this user alone; a link is not followed, a pipe not waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
