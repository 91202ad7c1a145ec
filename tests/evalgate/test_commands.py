"""What commands make of folders; the stored run of tests/data stands for a night."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from evalgate.commands import show_trend
from evalgate.errors import UsageError

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
