"""What commands make of folders; the stored run of tests/data stands for a night."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from factories import make_run, make_spec, simulate_requests

from evalgate.commands import compare_builds, judge_again, show_trend
from evalgate.errors import UsageError
from evalgate.measure import measure
from evalgate.store import RunWriter

STORED = Path(__file__).parent.parent / "data" / "run_v1"


def store_night(folder: Path, name: str) -> None:
    """A night of this name, 20261101 being the first of November."""
    shutil.copytree(STORED, folder / name)
    path = folder / name / "run.json"
    run = json.loads(path.read_text())
    run["started_at"] = f"{name[:4]}-{name[4:6]}-{name[6:]}T02:00:00Z"
    path.write_text(json.dumps(run))


def test_a_trend_names_what_it_left_out_and_why(tmp_path: Path) -> None:
    for name in ("20261101", "20261102", "20261103"):
        store_night(tmp_path, name)
    path = tmp_path / "20261102" / "run.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    trend = json.loads(show_trend(str(tmp_path), None, "json").text)
    assert [night["name"] for night in trend["nights"]] == ["20261101", "20261103"]
    (skipped,) = trend["skipped"]
    assert skipped.startswith("20261102: ")
    assert "99" in skipped


def test_runs_of_another_model_in_the_folder_are_no_nights_of_this_one(tmp_path: Path) -> None:
    for name in ("20261101", "20261102"):
        store_night(tmp_path, name)
    path = tmp_path / "20261101" / "run.json"
    run = json.loads(path.read_text())
    for arm in run["arms"].values():
        arm["model"] = "another"
    path.write_text(json.dumps(run))
    trend = json.loads(show_trend(str(tmp_path), None, "json").text)
    assert trend["pinned"] == "20261102"
    assert trend["others"] == ["20261101"]


def test_a_run_is_no_folder_of_nights() -> None:
    with pytest.raises(UsageError, match="is a run: name the folder that holds it"):
        show_trend(str(STORED), None, "text")


def store_run(folder: Path, *, tpot_change: float = 0.0, **run: Any) -> Path:
    """A run of three launches of each arm, judged by the default policy."""
    writer = RunWriter.create(folder, make_run(spec=make_spec(blocks=3), **run))
    for record in simulate_requests(tpot_change=tpot_change):
        writer.append_request(record)
    writer.close()
    return folder


def compare_arms(folder: Path, **options: Any) -> dict[str, Any]:
    values = {"policy": None, "allow": [], "calibration": None, "kind": "json", **options}
    return json.loads(compare_builds(f"{folder}:baseline", f"{folder}:candidate", **values).text)


def test_a_gain_that_attention_cannot_give_is_flagged_under_the_default_policy_too(
    tmp_path: Path,
) -> None:
    profile = tmp_path / "kernels.csv"
    profile.write_text("Name,Calls,TotalDurationNs\npaged_attention,1,40000\ngemm,1,960000\n")
    folder = store_run(tmp_path / "r", tpot_change=-0.3)
    (said,) = [
        w for w in compare_arms(folder, profile=str(profile))["warnings"] if "attention is" in w
    ]
    assert "attention is 4.000 % of kernel time" in said
    assert "more than attention can give" in said
    assert "(rule throughput " in said


def test_a_trace_that_was_cut_off_is_no_interrupt(tmp_path: Path) -> None:
    """gzip tells of it by EOFError, which a command line takes for the end of its user."""
    profile = tmp_path / "trace.json.gz"
    profile.write_bytes(gzip.compress(b'{"traceEvents": []}' * 50)[:30])
    with pytest.raises(UsageError, match=r"trace\.json\.gz.*cannot be read.*Kineto"):
        compare_arms(store_run(tmp_path / "r"), profile=str(profile))


def change_arms(folder: Path, **changes: Any) -> None:
    path = folder / "run.json"
    run = json.loads(path.read_text())
    for arm in run["arms"].values():
        arm.update(changes)
    path.write_text(json.dumps(run))


def test_a_calibration_of_another_machine_is_warned_of_and_of_another_model_refused(
    tmp_path: Path,
) -> None:
    folder = store_run(tmp_path / "r")
    noise = store_run(tmp_path / "noise", extra={"calibration": True})
    assert not any("set-up" in w for w in compare_arms(folder, calibration=str(noise))["warnings"])
    stored = json.loads((noise / "run.json").read_text())
    environment = stored["arms"]["baseline"]["environment"]
    change_arms(noise, environment={**environment, "cpu": "another"})
    for answer in (
        compare_arms(folder, calibration=str(noise)),
        json.loads(judge_again(str(folder), None, str(noise), "json").text),
    ):
        (said,) = [w for w in answer["warnings"] if "another set-up" in w]
        assert "cpu another there" in said
    # A driver or a tokenizer does not make another noise; a vllm that is not known may.
    installed = {"torch": environment["packages"]["torch"], "tokenizers": "9"}
    change_arms(noise, environment={**environment, "driver": "9", "packages": installed})
    (said,) = [w for w in compare_arms(folder, calibration=str(noise))["warnings"] if "set-up" in w]
    assert "(vllm unknown there, 0.32.0 here)" in said
    change_arms(noise, model="another")
    with pytest.raises(UsageError, match="measured the model 'another'"):
        judge_again(str(folder), None, str(noise), "json")


def test_a_calibration_that_broke_off_is_no_yardstick(tmp_path: Path) -> None:
    folder = store_run(tmp_path / "r")
    noise = store_run(tmp_path / "noise", extra={"calibration": True}, status="failed")
    with pytest.raises(UsageError, match="is 'failed': resume it"):
        judge_again(str(folder), None, str(noise), "json")


def test_a_policy_beside_a_resume_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"drop --policy, .*evalgate gate r --policy nightly"):
        measure(
            spec=None,
            out=None,
            resume_dir="r",
            calibrate=False,
            calibration=None,
            policy="nightly",
            until_decided=False,
            max_minutes=None,
            kind="text",
        )
