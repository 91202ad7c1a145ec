"""The CI templates: they parse, what they call exists, and their exit code is the verdict's."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from evalgate import cli
from evalgate.spec import parse_spec
from evalgate.verdicts import REPORT_FILES, SHIPPED_POLICIES

CI = Path(__file__).resolve().parents[1] / "ci"

# Stands for evalgate: notes how it was called, makes the night's folder, answers the wanted code.
STUB = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done >> "$CALLS"
printf '\\n' >> "$CALLS"
[ "$1" = run ] || exit "${TREND_CODE:-0}"
mkdir -p "$4"
exit "$STUB_CODE"
"""


def run_nightly(folder: Path, code: int, **settings: str) -> tuple[int, str, list[list[str]]]:
    """Exit code, stderr and the calls of a night in which evalgate ends with ``code``."""
    stub = folder / "evalgate"
    stub.write_text(STUB)
    stub.chmod(0o755)
    results = folder / "results with a space"
    results.mkdir(exist_ok=True)
    calls = folder / "calls"
    calls.write_text("")
    env = {**os.environ, "EVALGATE": str(stub), "CALLS": str(calls), "STUB_CODE": str(code)}
    done = subprocess.run(
        ["sh", str(CI / "nightly.sh"), str(results)],
        env={**env, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [call.split("\n") for call in calls.read_text().split("\n\n") if call]
    return done.returncode, done.stderr, found


def test_the_script_is_plain_shell():
    done = subprocess.run(["sh", "-n", str(CI / "nightly.sh")], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 130])
def test_the_exit_code_is_the_verdicts(tmp_path, code):
    assert run_nightly(tmp_path, code)[0] == code


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (3, 0), (4, 4), (5, 5)])
def test_only_an_inconclusive_night_can_be_let_through(tmp_path, code, expected):
    found, told, _ = run_nightly(tmp_path, code, INCONCLUSIVE="pass")
    assert found == expected
    assert code != 3 or "INCONCLUSIVE" in told


def test_a_misspelt_choice_is_refused_before_a_night_is_spent(tmp_path):
    code, told, calls = run_nightly(tmp_path, 0, INCONCLUSIVE="ignore")
    assert (code, calls) == (2, [])
    assert "'ignore'" in told


def test_a_trend_that_fails_does_not_hide_the_verdict(tmp_path):
    assert run_nightly(tmp_path, 1, TREND_CODE="2")[0] == 1
    assert run_nightly(tmp_path, 0, TREND_CODE="2")[0] == 0


def test_every_call_is_one_that_evalgate_takes(tmp_path):
    pinned = tmp_path / "pinned.txt"
    pinned.write_text("20261129T020000Z\n")
    _, _, with_pin = run_nightly(tmp_path, 0, PINNED=str(pinned))
    _, _, without = run_nightly(tmp_path, 0)
    assert [call[0] for call in with_pin + without] == ["run", "trend"] * 2
    for name, *words in with_pin + without:
        cli.cli.commands[name].make_context(name, words)
    assert with_pin[1][with_pin[1].index("--pinned") + 1] == "20261129T020000Z"
    assert "--pinned" not in without[1]
    assert "--until-decided" in with_pin[0]


def test_the_workflow_parses_and_runs_the_script_and_uploads_each_report():
    flow = yaml.safe_load((CI / "github-nightly.yml").read_text(encoding="utf-8"))
    triggers = flow[True]  # YAML 1.1 reads the key `on` as a truth value
    assert triggers["schedule"][0]["cron"].count(" ") == 4
    steps = flow["jobs"]["gate"]["steps"]
    gates = [step for step in steps if "ci/nightly.sh" in step.get("run", "")]
    assert len(gates) == 1
    # Nothing may swallow the exit code, and the reports go up whatever it is.
    assert "continue-on-error" not in gates[0]
    assert "||" not in gates[0]["run"]
    (upload,) = [s for s in steps if s.get("uses", "").startswith("actions/upload-artifact@")]
    assert upload["if"] == "always()"
    uploaded = {line.rsplit("/", 1)[-1] for line in upload["with"]["path"].split()}
    assert set(REPORT_FILES.values()) <= uploaded


def test_the_workflows_own_lines_are_shell(tmp_path):
    flow = yaml.safe_load((CI / "github-nightly.yml").read_text(encoding="utf-8"))
    for step in flow["jobs"]["gate"]["steps"]:
        if "run" in step:
            done = subprocess.run(["sh", "-n"], input=step["run"], text=True, check=False)
            assert done.returncode == 0, step["name"]


def test_the_spec_is_one_and_takes_its_builds_from_the_environments_that_the_workflow_makes():
    spec = parse_spec((CI / "nightly.toml").read_text(encoding="utf-8"), "nightly.toml")
    assert spec.policy in SHIPPED_POLICIES
    flow = (CI / "github-nightly.yml").read_text(encoding="utf-8")
    for arm in spec.arms.values():
        assert f"{arm.python.removesuffix('/bin/python')}/bin/pip install" in flow
    pins = [line for line in (CI / "baseline.txt").read_text().splitlines() if line[:1] != "#"]
    assert pins
    assert all("==" in pin for pin in pins)


def test_the_page_names_every_file_and_its_command_lines_exist():
    page = (CI.parent / "docs" / "ci.md").read_text(encoding="utf-8")
    for path in CI.iterdir():
        assert f"`ci/{path.name}`" in page
    words = shlex.split(page.split("`evalgate ")[1].split("`")[0])
    cli.cli.commands[words[0]].make_context(words[0], words[1:])
