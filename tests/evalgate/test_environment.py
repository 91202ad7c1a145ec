"""What an arm ran on: asked of its own interpreter, absent things None."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evalgate import environment
from evalgate.environment import (
    list_changes,
    locate_python,
    read_environment,
    read_git,
    read_gpu,
    read_packages,
)
from evalgate.errors import ServerStartError
from evalgate.records import Environment


def test_versions_come_from_the_arms_interpreter(tmp_path: Path) -> None:
    info = tmp_path / "flash_attn-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 9.8.7\n")
    packages = read_packages(sys.executable, {"PYTHONPATH": str(tmp_path)})
    assert packages["flash-attn"] == "9.8.7"
    assert packages["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "flash-attn" not in read_packages(sys.executable)


def test_the_current_folder_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert "python" in read_packages(sys.executable)


def test_an_interpreter_is_found_from_any_folder_and_its_link_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server runs in a folder of its own, and a virtual environment is a link."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/h")
    (tmp_path / "python").symlink_to(sys.executable)
    assert locate_python("./python") == f"{tmp_path}/python"
    assert locate_python("venv/bin/python") == f"{tmp_path}/venv/bin/python"
    assert locate_python("~/venv/bin/python") == "/h/venv/bin/python"
    assert locate_python("python3") == "python3"
    assert locate_python(None) == sys.executable


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_an_interpreter_that_cannot_be_asked_is_named(python: str) -> None:
    with pytest.raises(ServerStartError, match=f"interpreter '{python}'.*set the arm's python"):
        read_packages(python)


def test_git_state_is_commit_and_dirtiness(tmp_path: Path) -> None:
    assert read_git(tmp_path) is None

    def git(*args: str) -> str:
        name = ["-c", "user.name=t", "-c", "user.email=t@t"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *name, *args], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "m")
    commit = git("rev-parse", "HEAD")
    assert read_git(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "f").write_text("2")
    assert read_git(tmp_path) == {"commit": commit, "dirty": True}


def test_nvidia_smi_is_asked_where_the_library_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpu() == (["NVIDIA H200, 143771 MiB"], "570.1")
    tool.unlink()
    assert read_gpu() == (None, None)


def test_this_machine_gives_a_record(tmp_path: Path) -> None:
    record = read_environment(sys.executable, project=tmp_path)
    assert record.cpu is not None
    assert "cores" in record.cpu
    assert record.git is None
    assert set(record.packages) <= {*environment.PACKAGES, "python"}


def make_environment(**changes: object) -> Environment:
    values = {"gpu": ["H200"], "driver": "570", "cpu": "c", "packages": {"vllm": "1"}, "git": None}
    return Environment(**values | changes)


def test_changes_of_a_build_are_told_with_both_values() -> None:
    before = make_environment(git={"commit": "a", "dirty": False})
    assert list_changes(before, before) == []
    now = make_environment(
        gpu=None, packages={"vllm": "2", "torch": "3"}, git={"commit": "b", "dirty": False}
    )
    assert list_changes(before, now) == [
        "gpu was H200, is not there",
        "torch was not there, is 3",
        "vllm was 1, is 2",
        "git commit was a, is b",
    ]


def test_work_on_files_and_another_folder_are_no_change_of_the_build() -> None:
    before = make_environment(git={"commit": "a", "dirty": False})
    assert list_changes(before, make_environment(git={"commit": "a", "dirty": True})) == []
    assert list_changes(before, make_environment(git=None)) == []
