"""Whose word a resume may take: a note outside of the folder, of this user alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evalgate.origin import FOLDER, forget_start, note_start, was_started_here

RUN, SPEC = "0123456789abcdef", "5" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_run_is_known_by_its_id_and_its_spec_until_it_is_forgotten() -> None:
    assert not was_started_here(RUN, SPEC)
    note_start(RUN, SPEC)
    assert was_started_here(RUN, SPEC)
    assert not was_started_here(RUN, "6" * 64)
    assert not was_started_here("f" * 16, SPEC)
    forget_start(RUN)
    assert not was_started_here(RUN, SPEC)
    forget_start(RUN)  # twice does no harm


def test_a_note_that_others_may_write_proves_nothing(cache: Path) -> None:
    note_start(RUN, SPEC)
    (cache / FOLDER / RUN).chmod(0o660)
    assert not was_started_here(RUN, SPEC)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_note_of_another_user_proves_nothing(cache: Path) -> None:
    note_start(RUN, SPEC)
    os.chown(cache / FOLDER / RUN, 65534, 65534)
    assert not was_started_here(RUN, SPEC)


def test_a_link_a_pipe_and_a_folder_prove_nothing(cache: Path, tmp_path: Path) -> None:
    note_start(RUN, SPEC)
    note = cache / FOLDER / RUN
    note.rename(tmp_path / "note")
    note.symlink_to(tmp_path / "note")
    assert not was_started_here(RUN, SPEC)
    note.unlink()
    os.mkfifo(note, 0o600)
    assert not was_started_here(RUN, SPEC)
    note.unlink()
    note.mkdir()
    assert not was_started_here(RUN, SPEC)


def test_an_id_that_is_a_path_leads_nowhere(cache: Path) -> None:
    note_start(RUN, SPEC)
    (cache / "planted").write_text(SPEC)
    (cache / "planted").chmod(0o600)
    assert not was_started_here("../planted", SPEC)


def test_a_cache_that_cannot_be_written_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "file"))
    note_start(RUN, SPEC)
    assert not was_started_here(RUN, SPEC)
