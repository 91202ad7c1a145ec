"""Runs that launch their servers, broken off and continued; stubs stand in vLLM's place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from evalgate import run as run_module
from evalgate.errors import InterruptedRunError, UsageError
from evalgate.measure import judge_measured
from evalgate.run import execute, resume
from evalgate.spec import Spec, compute_spec_sha256, parse_spec
from evalgate.store import load_run

HERE = Path(__file__).parent


class Interrupter:
    """Progress that is interrupted when it is told ``at``."""

    def __init__(self, at: str | None = None) -> None:
        self._at = at

    def begin(self, total_work: float) -> None: ...

    def advance(self, work: float, text: str) -> None: ...

    def say(self, text: str) -> None:
        if self._at is not None and self._at in text:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    """Two arms whose interpreter finds, under vLLM's name, the stub."""
    package = tmp_path / "stand_in" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text("import stub_server\n\nstub_server.main()\n")
    timing = json.dumps({"pieces": 3, "ttft_s": 0.01, "tpot_s": 0.06})
    arm = f"""
args = ["--max-num-batched-tokens", "512"]
[arms.NAME.env]
PYTHONPATH = "{tmp_path / "stand_in"}:{HERE}"
STUB_MODE = "timed"
STUB_TIMING = '{timing}'
HF_TOKEN = "t0p"
"""
    arms = "".join(
        f"[arms.{name}]{arm.replace('NAME', name)}" for name in ("baseline", "candidate")
    )
    return parse_spec(
        f"""
name = "launched"
[model]
name = "m"
path = "{tmp_path}"
{arms}
[schedule]
warmup = 1
[load]
output_tokens = 4
[[load.buckets]]
name = "b"
min_tokens = 1200
max_tokens = 2000
prompts = 2
""",
        "spec",
    )


def test_a_run_broken_off_between_two_launches_goes_on_to_a_valid_verdict(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r"
    with pytest.raises(InterruptedRunError):
        execute(spec, folder, Interrupter("starting candidate"))
    assert load_run(folder).run.arms["candidate"].environment.cpu is None
    with pytest.raises(UsageError, match="export HF_TOKEN"):
        resume(folder, Interrupter())
    monkeypatch.setenv("HF_TOKEN", "t0p")
    resume(folder, Interrupter())
    stored = load_run(folder)
    assert stored.run.arms["candidate"].environment == stored.run.arms["baseline"].environment
    verdict = json.loads(judge_measured(stored, folder, None, "json").text)
    assert verdict["invalid_reasons"] == []
    for file in folder.iterdir():
        assert "t0p" not in file.read_text(), file
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_strangers_run_launches_nothing_unless_the_spec_is_named(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r"
    with pytest.raises(InterruptedRunError):
        execute(spec, folder, Interrupter("starting baseline"))
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "of another machine"))
    monkeypatch.setenv("HF_TOKEN", "t0p")
    with pytest.raises(
        UsageError, match=r"not started by this user.*evalgate run SPEC\.toml --res"
    ):
        resume(folder, Interrupter())
    assert list(folder.glob("server-*")) == []
    resume(folder, Interrupter(), spec)
    assert load_run(folder).run.status == "complete"


def test_a_run_of_ours_with_another_spec_in_it_is_a_strangers(spec: Spec, tmp_path: Path) -> None:
    """A stranger may send back a folder of ours, its spec and its digest made anew."""
    folder = tmp_path / "r"
    with pytest.raises(InterruptedRunError):
        execute(spec, folder, Interrupter("starting baseline"))
    path = folder / "run.json"
    run = json.loads(path.read_text())
    run["spec"]["arms"]["candidate"]["args"] += ["--flag"]
    run["spec_sha256"] = compute_spec_sha256(run["spec"])
    path.write_text(json.dumps(run))
    with pytest.raises(UsageError, match="not started by this user"):
        resume(folder, Interrupter())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: run["arms"]["baseline"]["environment"]["packages"].update(vllm="0.1"),
         "baseline: vllm was 0.1, is not there"),
        (lambda run: run.update(evalgate_version="0.0.1"), "evalgate was 0.0.1, is "),
    ],
)  # fmt: skip
def test_a_run_whose_build_was_changed_meanwhile_is_not_continued(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, told: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "t0p")
    folder = tmp_path / "r"
    with pytest.raises(InterruptedRunError):
        execute(spec, folder, Interrupter("starting candidate"))
    path = folder / "run.json"
    run = json.loads(path.read_text())
    change(run)
    path.write_text(json.dumps(run))
    with pytest.raises(UsageError, match=told):
        resume(folder, Interrupter())
    assert json.loads(path.read_text()) == run


def test_a_server_that_wants_the_key_of_our_own_shell_is_given_it(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launched vLLM inherits VLLM_API_KEY and then refuses whoever does not send it."""
    monkeypatch.setenv("VLLM_API_KEY", "t0p-k3y")
    folder = tmp_path / "r"
    execute(spec, folder, Interrupter())
    assert load_run(folder).run.status == "complete"
    for file in folder.iterdir():
        assert "t0p-k3y" not in file.read_text(), file


def test_an_unforeseen_error_leaves_a_run_that_says_failed(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "measure_block", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        execute(spec, tmp_path / "r", Interrupter())
    stored = load_run(tmp_path / "r").run
    assert stored.status == "failed"
    assert "ZeroDivisionError" in stored.extra["failure"]


def test_an_interpreter_named_from_here_serves_from_its_own_folder(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `.venv-baseline/bin/python` of ci/nightly.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "venv").symlink_to(Path(sys.executable).parent.parent)
    python = f"venv/bin/{Path(sys.executable).name}"
    arms = {name: arm.model_copy(update={"python": python}) for name, arm in spec.arms.items()}
    execute(spec.model_copy(update={"arms": arms}), tmp_path / "r", Interrupter())
    assert load_run(tmp_path / "r").run.status == "complete"


def test_a_spec_that_was_changed_on_disk_is_not_resumed(spec: Spec, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with pytest.raises(InterruptedRunError):
        execute(spec, folder, Interrupter("starting baseline"))
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"blocks": 1', '"blocks": 2'))
    with pytest.raises(UsageError, match="not the one it began with"):
        resume(folder, Interrupter())
