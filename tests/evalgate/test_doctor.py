"""The doctor: what an interpreter, a plug-in, a server and a machine answer, and its exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from stub_server import StubServer

from evalgate import cli, doctor
from evalgate.doctor import (
    Diagnosis,
    check_attached,
    check_clocks,
    check_kernels,
    check_packages,
    check_plugin,
    compute_exit_code,
    diagnose,
    render_json,
    render_text,
)
from evalgate.errors import ServerError, ServerStartError, UsageError
from evalgate.preflight import Finding
from evalgate.spec import ArmSpec, Patch, Spec, build_spec


def make_attached(base_url: str, max_tokens: int = 2000) -> Spec:
    buckets = [{"name": "b", "min_tokens": 10, "max_tokens": max_tokens, "prompts": 1}]
    return build_spec(
        {
            "name": "s",
            "model": {"name": "stub"},
            "arms": {"baseline": {"base_url": base_url}},
            "load": {"output_tokens": 8, "buckets": buckets},
        },
        "spec",
    )


def make_patch(plugin: str = "p", **changes: Any) -> Patch:
    return Patch(
        **{
            "args": (),
            "env": {},
            "switch": "S",
            "report_rpc": "r",
            "plugin": plugin,
            "check": (),
            **changes,
        }
    )


def install_plugin(folder: Path, body: str) -> ArmSpec:
    """An entry point called ``p`` in vLLM's group, on an arm's PYTHONPATH."""
    (folder / "a_plugin.py").write_text(f"import os, sys\n\ndef register():\n    {body}\n")
    info = folder / "a_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\np = a_plugin:register\n")
    return ArmSpec(env={"PYTHONPATH": str(folder)})


def test_a_plug_in_is_loaded_as_vllm_does(tmp_path: Path) -> None:
    arm = install_plugin(tmp_path, "assert os.environ['ASKED'] == '1'")
    assert check_plugin(arm, make_patch(env={"ASKED": "1"})).status == "ok"


def test_a_plug_in_that_refuses_says_why(tmp_path: Path) -> None:
    arm = install_plugin(
        tmp_path, "print('p: refusing to start: odd CPU', file=sys.stderr); os._exit(78)"
    )
    finding = check_plugin(arm, make_patch())
    assert finding == Finding("problem", "p does not load: p: refusing to start: odd CPU")


def test_a_plug_in_that_is_not_installed_is_named(tmp_path: Path) -> None:
    finding = check_plugin(install_plugin(tmp_path, "pass"), make_patch("other"))
    assert finding.status == "problem"
    assert "entry point other is not installed" in finding.message


def test_a_plug_in_that_vllm_is_told_to_leave_out_is_a_problem(tmp_path: Path) -> None:
    arm = install_plugin(tmp_path, "pass")
    kept = arm.model_copy(update={"env": {**arm.env, "VLLM_PLUGINS": "q"}})
    assert "VLLM_PLUGINS='q'" in check_plugin(kept, make_patch()).message


@pytest.mark.parametrize(("code", "status"), [("print('fine')", "ok"), ("exit('bad')", "problem")])
def test_the_kernels_own_check_decides(code: str, status: str) -> None:
    finding = check_kernels(ArmSpec(), make_patch(check=("-c", code)))
    assert finding.status == status
    assert {"ok": "fine", "problem": "bad"}[status] in finding.message


def test_an_interpreter_that_does_not_answer_is_named() -> None:
    with pytest.raises(ServerStartError, match="/no/python"):
        check_plugin(ArmSpec(python="/no/python"), make_patch())


def test_an_interpreter_without_vllm_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_packages", lambda *_: {"python": "3.11.7"})
    finding = check_packages(ArmSpec())
    assert finding.status == "problem"
    assert finding.message.startswith(f"{sys.executable} has no vLLM (python 3.11.7)")


def test_an_attached_server_is_asked_and_generates_nothing() -> None:
    with StubServer(max_model_len=4096) as stub:
        finding = check_attached(make_attached(stub.base_url), ArmSpec(base_url=stub.base_url))
        assert not any("completions" in path for path, _, _ in stub.requests)
    assert "serves stub (vLLM 0.0.0+stub, context: 4096 tokens)" in finding.message


def test_prompts_beyond_an_attached_servers_context_are_refused() -> None:
    with StubServer(max_model_len=1000) as stub, pytest.raises(UsageError, match="context is 1000"):
        check_attached(make_attached(stub.base_url), ArmSpec(base_url=stub.base_url))


def test_a_server_that_is_not_there_is_refused() -> None:
    with pytest.raises(ServerError, match="no answer"):
        check_attached(make_attached("http://127.0.0.1:9"), ArmSpec(base_url="http://127.0.0.1:9"))


def test_a_clock_that_is_held_down_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"throttle_reasons": 0x44, "sm_clock_mhz": 900}
    monkeypatch.setattr(doctor.MachineSampler, "sample", lambda *_: {"gpus": [gpu]})
    finding = check_clocks()
    assert finding.status == "warning"
    assert "GPU 0: power cap, GPU 0: temperature (hardware)" in finding.message


def test_the_command_prints_every_check_and_exits_0_when_a_run_could_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with StubServer(max_model_len=4096) as stub:
        text = f"""
name = "s"
[model]
name = "stub"
[arms.baseline]
base_url = "{stub.base_url}"
[[load.buckets]]
name = "b"
min_tokens = 10
max_tokens = 2000
prompts = 1
"""
        (tmp_path / "spec.toml").write_text(text)
        assert cli._run(["doctor", "spec.toml", "--format", "json"]) == 0
        (tmp_path / "spec.toml").write_text(text.replace("2000", "9000"))
        assert cli._run(["doctor", "spec.toml", "--format", "json"]) == 1
    captured = capsys.readouterr()
    assert '"name": "server of baseline",\n   "status": "problem"' in captured.out
    assert "checking server of baseline" in captured.err
    assert list(tmp_path.iterdir()) == [tmp_path / "spec.toml"]


def test_a_failed_check_does_not_keep_the_others_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LOAD_S", 0.01)
    found = diagnose(make_attached("http://127.0.0.1:9"), tmp_path / "r")
    by_name = {d.name: d.finding.status for d in found}
    assert by_name["server of baseline"] == "problem"
    assert by_name["results folder"] == "ok"
    assert compute_exit_code(found) == 1


def test_warnings_alone_leave_the_exit_code_0() -> None:
    found = [Diagnosis("a", Finding("ok", "x")), Diagnosis("b", Finding("warning", "y: end z"))]
    assert compute_exit_code(found) == 0
    assert render_text(found).splitlines() == [
        "ok       a  x",
        "warning  b  y: end z",
        "",
        "1 warning",
    ]
    assert json.loads(render_json(found)) == {
        "schema_version": 1,
        "exit_code": 0,
        "checks": [
            {"name": "a", "status": "ok", "message": "x"},
            {"name": "b", "status": "warning", "message": "y: end z"},
        ],
    }
