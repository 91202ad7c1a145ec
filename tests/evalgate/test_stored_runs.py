"""A stored run of every schema version is read and judged as it was when it was made."""

from __future__ import annotations

import json
import re

import pytest

from evalgate import cli
from evalgate.records import SCHEMA_VERSION
from evalgate.store import load_run


def test_there_is_a_stored_run_for_every_schema_version(root):
    found = {int(path.name.removeprefix("run_v")) for path in (root / "tests/data").glob("run_v*")}
    assert found == set(range(1, SCHEMA_VERSION + 1))


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_its_verdict_is_still_the_same(root, capsys, version):
    folder = root / "tests/data" / f"run_v{version}"
    was = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    code = cli._run(["gate", str(folder), "--format", "json"])
    now = json.loads(capsys.readouterr().out)
    assert code == was["exit_code"]
    assert now["status"] == was["status"]
    for new, old in zip(now["rules"], was["rules"], strict=True):
        assert new["name"] == old["name"]
        assert new["observed"] == pytest.approx(old["observed"])


def test_the_committed_example_is_readable_and_names_no_home(root, capsys):
    folder = root / "results" / "example"
    stored = load_run(folder)
    assert stored.run.status == "complete"
    assert cli._run(["gate", str(folder)]) in (0, 3)
    text = (folder / "run.json").read_text(encoding="utf-8")
    assert not re.search(r"/(root|home|tmp|work)/", text)
