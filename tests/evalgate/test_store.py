"""Run directories: what is written comes back, damage is named, nothing is overwritten."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

from evalgate import store
from evalgate.errors import EvidenceError, StorageError, UsageError
from evalgate.records import (
    RequestError,
    RequestRecord,
    Run,
    SampleRecord,
)
from evalgate.store import RunWriter, load_run

RUN = Run(
    schema_version=1,
    run_id="0123",
    name="n",
    status="started",
    started_at="2026-01-01T00:00:00Z",
    finished_at=None,
    spec={"name": "n"},
    spec_sha256="00",
    evalgate_version="0.1.0",
    arms={},
)


def make_request(prompt_id: str = "p0", **changes: Any) -> RequestRecord:
    return RequestRecord(
        **{
            "arm": "baseline",
            "block": 0,
            "bucket": "b",
            "prompt_id": prompt_id,
            "repetition": 0,
            "phase": "measure",
            "started_at": "2026-01-01T00:00:00Z",
            "prompt_tokens": 5,
            "output_tokens": 2,
            "cached_tokens": None,
            "chunk_ns": [10, 20],
            "end_ns": 21,
            "finish_reason": "stop",
            "output_sha256": "00",
            "output_text": "h\u00e9\u2028\n",
            "error": None,
            **changes,
        }
    )


def make_sample() -> SampleRecord:
    return SampleRecord(
        arm="baseline",
        block=0,
        task="retrieval",
        task_version=1,
        sample_id="s",
        prompt_sha256="00",
        prompt_tokens=5,
        output_text="x",
        output_tokens=1,
        finish_reason="stop",
        prediction="x",
        references=["x"],
        score=1.0,
        flags=[],
        error=None,
    )


def write_run(path: Path, status: str = "complete") -> None:
    with RunWriter.create(path, RUN) as writer:
        writer.append_request(make_request("p0"))
        writer.append_request(make_request("p1"))
        writer.save_run(RUN.model_copy(update={"status": status}))


def test_what_is_written_comes_back_in_order(tmp_path: Path) -> None:
    failed = make_request(
        "p1", chunk_ns=[], end_ns=None, error=RequestError(category="timeout", message="m")
    )
    with RunWriter.create(tmp_path / "a" / "run", RUN) as writer:
        writer.append_request(make_request("p0"))
        writer.append_request(failed)
        writer.append_sample(make_sample())
        writer.append_telemetry({"load1": 0.5})
    stored = load_run(tmp_path / "a" / "run")
    assert stored.run == RUN
    assert stored.requests == [make_request("p0"), failed]
    assert stored.samples == [make_sample()]
    assert stored.fidelity == []
    assert (tmp_path / "a" / "run" / "telemetry.jsonl").read_text() == '{"load1": 0.5}\n'


def test_every_line_is_on_disk_as_it_comes(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", RUN)
    writer.append_request(make_request())
    assert load_run(tmp_path / "run").requests == [make_request()]
    writer.close()


def test_an_empty_folder_is_taken_and_a_used_one_is_not(tmp_path: Path) -> None:
    write_run(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=r"already holds .*nothing was overwritten"):
        RunWriter.create(tmp_path, RUN)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    for path in (tmp_path / "f", tmp_path / "f" / "run"):
        with pytest.raises(UsageError, match="is not a folder"):
            RunWriter.create(path, RUN)


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    with (
        RunWriter.create(tmp_path / "run", RUN),
        pytest.raises(UsageError, match="another evalgate"),
    ):
        RunWriter.reopen(tmp_path / "run")


def test_a_run_that_ended_can_be_taken_up_again(tmp_path: Path) -> None:
    first = RunWriter.create(tmp_path / "run", RUN)
    first.save_run(RUN.model_copy(update={"status": "failed"}))
    with RunWriter.reopen(tmp_path / "run") as second:
        second.append_request(make_request())
    assert len(load_run(tmp_path / "run").requests) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunWriter.create(tmp_path / "run", RUN) as writer:
        monkeypatch.setattr(store, "refuse_links", lambda path, flags: os.open("/dev/full", flags))
        with pytest.raises(StorageError, match=r"samples\.jsonl: No space left on device; free"):
            writer.append_sample(make_sample())


def test_a_folder_that_cannot_be_made_is_one_clear_sentence() -> None:
    with pytest.raises(StorageError, match="cannot write /proc/none"):
        RunWriter.create(Path("/proc/none/run"), RUN)


def test_a_failed_save_leaves_the_old_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        raise OSError(28, "No space left on device")

    with RunWriter.create(tmp_path / "run", RUN) as writer:
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError):
            writer.save_run(RUN.model_copy(update={"status": "complete"}))
    assert load_run(tmp_path / "run").run.status == "started"


def test_a_log_stays_in_its_folder(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", RUN) as writer:
        assert writer.log_path("baseline", 3).name == "server-baseline-3.log"
        assert writer.log_path("../../x y", 0).parent == tmp_path / "run"


def test_a_run_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="no such run"):
            load_run(path)


@pytest.mark.parametrize("status", ["started", "failed"])
def test_a_torn_last_line_of_an_unfinished_run_is_left_out(tmp_path: Path, status: str) -> None:
    write_run(tmp_path / "run", status)
    with open(tmp_path / "run" / "requests.jsonl", "ab") as file:
        file.write('{"arm": "bas\u00e9'.encode()[:-1])
    assert [r.prompt_id for r in load_run(tmp_path / "run").requests] == ["p0", "p1"]


def test_a_torn_last_line_of_a_complete_run_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with open(tmp_path / "run" / "requests.jsonl", "ab") as file:
        file.write(b'{"arm": "bas')
    with pytest.raises(EvidenceError, match=r"requests\.jsonl line 3: not JSON"):
        load_run(tmp_path / "run")


def test_damage_before_the_last_line_is_an_error_in_any_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "started")
    file = tmp_path / "run" / "requests.jsonl"
    file.write_bytes(b"{}x\n" + file.read_bytes())
    with pytest.raises(EvidenceError, match="line 1: not JSON"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("torn", [b'{"arm": "b', b"x" * 200_000])
def test_resuming_removes_the_torn_line_and_writes_on(tmp_path: Path, torn: bytes) -> None:
    write_run(tmp_path / "run", "started")
    with open(tmp_path / "run" / "requests.jsonl", "ab") as file:
        file.write(torn)
    with RunWriter.reopen(tmp_path / "run") as writer:
        writer.append_request(make_request("p2"))
    assert [r.prompt_id for r in load_run(tmp_path / "run").requests] == ["p0", "p1", "p2"]


def test_resuming_a_file_that_is_one_torn_line_empties_it(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "started")
    (tmp_path / "run" / "requests.jsonl").write_bytes(b'{"arm')
    RunWriter.reopen(tmp_path / "run").close()
    assert (tmp_path / "run" / "requests.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"arm": NaN}\n', "NaN is not allowed"),
        (b"\xff\n", "not UTF-8"),
        (b"[" * 100_000 + b"\n", "line 3"),
        (b"\n", "not JSON"),
        (b"{}\n", "is missing"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, message: str) -> None:
    write_run(tmp_path / "run")
    with open(tmp_path / "run" / "requests.jsonl", "ab") as file:
        file.write(line)
    with pytest.raises(EvidenceError, match=r"requests\.jsonl line 3") as caught:
        load_run(tmp_path / "run")
    assert message in str(caught.value)


def test_a_foreign_schema_version_is_refused_by_number(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 7}))
    with pytest.raises(EvidenceError, match=r"schema_version is 7.*reads version 1"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("name", ["run.json", "requests.jsonl"])
def test_links_and_pipes_are_not_followed(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "secret").write_text("password\n")
    file = tmp_path / "run" / name
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(EvidenceError, match="a link is not followed") as caught:
        load_run(tmp_path / "run")
    assert "password" not in str(caught.value)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(EvidenceError, match="not a plain file"):
        load_run(tmp_path / "run")


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    monkeypatch.setattr(store, "MAX_LINE_BYTES", 50)
    with pytest.raises(EvidenceError, match="longer than 50 bytes"):
        load_run(tmp_path / "run")
    monkeypatch.setattr(store, "MAX_RUN_BYTES", 50)
    with pytest.raises(EvidenceError, match="at most 50 bytes"):
        load_run(tmp_path / "run")


def test_half_a_surrogate_pair_does_not_stop_a_run(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", RUN) as writer:
        writer.append_telemetry({"text": "a\ud83d"})
    assert (tmp_path / "run" / "telemetry.jsonl").read_text() == '{"text": "a?"}\n'


def test_a_link_in_the_folder_does_not_lead_a_writer_out_of_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    with RunWriter.create(tmp_path / "r", RUN) as writer:
        for name in ("requests.jsonl", "run.json.tmp"):
            (tmp_path / "r" / name).symlink_to(outside)
        with pytest.raises(StorageError, match=r"requests\.jsonl"):
            writer.append_request(make_request())
        with pytest.raises(StorageError, match=r"run\.json"):
            writer.save_run(RUN)
    assert outside.read_bytes() == b"mine"


def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "r", RUN) as writer:
        for name in ("requests.jsonl", "run.json.tmp"):
            os.mkfifo(tmp_path / "r" / name)
        with pytest.raises(StorageError, match=r"requests\.jsonl"):
            writer.append_request(make_request())
        with pytest.raises(StorageError, match=r"run\.json"):
            writer.save_run(RUN)


def test_reading_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    write_run(tmp_path / "r")
    load_run(tmp_path / "r")
    assert gc.isenabled()
