"""A run directory on disk: written line by line while a run goes on, read back as records.

Knows files and their damage, not what is in them: records check themselves. Only the known file
names are opened, and only as plain files, so that a directory from someone else is data.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from evalgate.errors import EvidenceError, StorageError, UsageError
from evalgate.records import (
    FIDELITY_FILE,
    REFUSALS,
    REQUESTS_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    FidelityRecord,
    LineRecord,
    RequestRecord,
    Run,
    SampleRecord,
    StoredRun,
    find_decoder,
    parse_bytes,
    parse_line,
    parse_record,
    render_record,
)

TELEMETRY_FILE = "telemetry.jsonl"
LINE_FILES = (REQUESTS_FILE, SAMPLES_FILE, FIDELITY_FILE, TELEMETRY_FILE)

MAX_RUN_BYTES = 64 * 1024 * 1024
MAX_FILE_BYTES = 4 * 1024**3
MAX_LINE_BYTES = 64 * 1024 * 1024
READ_BYTES = 256 * 1024  # at once

R = TypeVar("R", bound=LineRecord)


class RunWriter:
    """The one writer of a run directory; every line is flushed as it comes.

    Raises StorageError when the disk is full, the folder read-only or the file gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, FileIO] = {}
        self._lock = _lock_folder(path)

    @classmethod
    def create(cls, path: Path, run: Run) -> RunWriter:
        """A new run in ``path``, which must not exist or be an empty folder."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = next(path.iterdir(), None)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{path} is not a folder: choose another results folder") from None
        except OSError as exc:
            raise _storage_error(path, exc) from None
        if taken is not None:
            raise UsageError(
                f"{path} already holds {taken.name}: choose another results folder, or continue "
                "it with --resume; nothing was overwritten"
            )
        writer = cls(path)
        writer.save_run(run)
        return writer

    @classmethod
    def reopen(cls, path: Path) -> RunWriter:
        """Go on writing a run; a line that a kill cut off is removed first."""
        if not (path / RUN_FILE).is_file():
            raise UsageError(f"no such run: {path} holds no {RUN_FILE}")
        writer = cls(path)
        for name in LINE_FILES:
            writer._cut_torn_line(name)
        return writer

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder, so that another process may resume it."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append_request(self, record: RequestRecord) -> None:
        self._append(REQUESTS_FILE, render_record(record))

    def append_sample(self, record: SampleRecord) -> None:
        self._append(SAMPLES_FILE, render_record(record))

    def append_fidelity(self, record: FidelityRecord) -> None:
        self._append(FIDELITY_FILE, render_record(record))

    def append_telemetry(self, sample: dict[str, Any]) -> None:
        self._append(TELEMETRY_FILE, json.dumps(sample, ensure_ascii=False, allow_nan=False))

    def save_run(self, run: Run) -> None:
        """Replace run.json in one step: a reader sees the old or the new one, never half.

        A status that ends the run lets go of the folder too.
        """
        temporary = self.path / f"{RUN_FILE}.tmp"
        try:
            with open(temporary, "wb", opener=refuse_links) as file:
                file.write(render_record(run).encode("utf-8", "replace") + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path / RUN_FILE)
        except OSError as exc:
            raise _storage_error(self.path / RUN_FILE, exc) from None
        if run.status != "started":
            self.close()

    def log_path(self, arm: str, block: int) -> Path:
        """Where the log of an arm's launch belongs; an arm's name cannot lead elsewhere."""
        return self.path / f"server-{re.sub(r'[^A-Za-z0-9._-]', '_', arm)}-{block}.log"

    def _append(self, name: str, line: str) -> None:
        try:
            if name not in self._files:
                # Unbuffered: each line is with the system at once, and closing cannot fail.
                self._files[name] = open(  # noqa: SIM115
                    self.path / name, "ab", buffering=0, opener=refuse_links
                )
            data = line.encode("utf-8", "replace") + b"\n"
            while data:  # a disk that fills up takes a part, and refuses the rest
                data = data[self._files[name].write(data) :]
        except OSError as exc:
            raise _storage_error(self.path / name, exc) from None

    def _cut_torn_line(self, name: str) -> None:
        try:
            with open(self.path / name, "r+b", opener=refuse_links) as file:
                size = file.seek(0, os.SEEK_END)
                keep, step = size, 64 * 1024
                while keep > 0:
                    start = max(0, keep - step)
                    file.seek(start)
                    newline = file.read(keep - start).rfind(b"\n")
                    keep = start if newline < 0 else start + newline + 1
                    if newline >= 0:
                        break
                file.truncate(keep)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise _storage_error(self.path / name, exc) from None


def load_run(path: Path) -> StoredRun:
    """Read a run directory.

    The last line of a run that is not complete may be torn by a kill and is left out then. Raises
    UsageError when there is no such run, EvidenceError naming file and line for anything else.
    """
    if not path.is_dir():
        raise UsageError(f"no such run: {path} is not a folder")
    if not (path / RUN_FILE).exists():
        raise UsageError(f"no such run: {path} holds no {RUN_FILE}")
    where = f"{path / RUN_FILE}"
    run = parse_record(Run, parse_bytes(_read_all(path / RUN_FILE), where), where)
    torn_allowed = run.status != "complete"
    return StoredRun(
        label=str(path),
        run=run,
        requests=_read_records(path / REQUESTS_FILE, RequestRecord, torn_allowed),
        samples=_read_records(path / SAMPLES_FILE, SampleRecord, torn_allowed),
        fidelity=_read_records(path / FIDELITY_FILE, FidelityRecord, torn_allowed),
    )


def _read_records(path: Path, kind: type[R], torn_allowed: bool) -> list[R]:
    """Every line as a record. Records hold no cycles, so the collector, which would go through
    all of them again and again while they pile up, rests meanwhile: half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return list(_read_lines(path, kind, torn_allowed))
    finally:
        if was_enabled:
            gc.enable()


def _read_lines(path: Path, kind: type[R], torn_allowed: bool) -> Iterator[R]:
    """Parsed lines of a file; nothing when the file does not exist.

    A decoder reads sound lines; what it refuses goes to ``parse_line``, which knows why.
    """
    decode = find_decoder(kind).decode
    file = _open_plain(path, MAX_FILE_BYTES)
    if file is None:
        return
    with file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise EvidenceError(f"{path} line {number} is longer than {MAX_LINE_BYTES} bytes")
            try:
                parsed = decode(line)
            except REFUSALS:
                try:
                    parsed = parse_line(kind, line, f"{path} line {number}")
                except EvidenceError:
                    if torn_allowed and not line.endswith(b"\n"):
                        return
                    raise
            yield parsed


def _read_all(path: Path) -> bytes:
    file = _open_plain(path, MAX_RUN_BYTES)
    if file is None:
        raise EvidenceError(f"{path} is gone")
    with file:
        return file.read(MAX_RUN_BYTES + 1)


def _open_plain(path: Path, max_bytes: int) -> BinaryIO | None:
    """The file, or None when there is none; links, devices and pipes are refused."""
    try:
        # A pipe would make a plain open wait for ever.
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise EvidenceError(
            f"{path} cannot be read ({exc.strerror}); a link is not followed"
        ) from None
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
        os.close(number)
        raise EvidenceError(f"{path} is not a plain file of at most {max_bytes} bytes")
    return os.fdopen(number, "rb", buffering=READ_BYTES)


def refuse_links(path: str, flags: int) -> int:
    """An opener: a folder from someone else may hold a link that leads out of it, or a pipe that
    would be waited for without end."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _lock_folder(path: Path) -> int | None:
    """Hold the folder: two writers would mix their lines. None where locks do not exist."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        raise _storage_error(path, exc) from None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise UsageError(f"{path} is being written by another evalgate: wait for it") from None
    except OSError:  # some network file systems have no locks
        os.close(number)
        return None
    return number


def _storage_error(path: Path, exc: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {exc.strerror or exc}; free the disk or choose a folder that can be "
        "written"
    )
