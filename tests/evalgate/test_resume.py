"""Runs that launch their servers, broken off and continued; stubs stand in vLLM's place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evalgate.commands import judge_measured
from evalgate.errors import InterruptedRunError, UsageError
from evalgate.run import execute, resume
from evalgate.spec import Spec, parse_spec
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


def test_a_spec_that_was_changed_on_disk_is_not_resumed(spec: Spec, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with pytest.raises(InterruptedRunError):
        execute(spec, folder, Interrupter("starting baseline"))
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"blocks": 1', '"blocks": 2'))
    with pytest.raises(UsageError, match="not the one it began with"):
        resume(folder, Interrupter())
