"""What a run asks before it starts: each obstacle named, with its value and what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from evalgate import preflight
from evalgate.errors import ServerStartError, StorageError, TaskDataError, UsageError
from evalgate.leftovers import make_folder
from evalgate.memory import GIB, Memory
from evalgate.preflight import (
    check_asked,
    check_folder,
    check_inherited,
    check_key,
    check_leftovers,
    check_loopback,
    check_model,
    check_paths,
    check_rivals,
    check_room,
    check_texts,
    find_model_folder,
    find_obstacles,
    parse_context,
)
from evalgate.spec import ArmSpec, Spec, build_spec


def make_spec(model: Path, *, args: tuple[str, ...] = (), **changes: Any) -> Spec:
    arm = {"args": ["--max-num-batched-tokens", "512", *args], "env": changes.pop("env", {})}
    return build_spec(
        {
            "name": "s",
            "model": {"name": "m", "path": str(model)},
            "arms": {"baseline": arm, "candidate": arm},
            "load": {
                "output_tokens": 24,
                "buckets": [{"name": "b", "min_tokens": 100, "max_tokens": 1001, "prompts": 1}],
            },
            **changes,
        },
        "spec",
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(GIB)  # a hole: no byte is written
    return folder


def test_prompt_and_answer_that_just_fit_the_context_are_well(model: Path) -> None:
    assert "1000 prompt and 24 output tokens fit" in check_asked(make_spec(model)).message


@pytest.mark.parametrize("args", [("--max-model-len", "1023"), ("--max-model-len=1023",)])
def test_a_bucket_beyond_the_context_is_refused_by_name(model: Path, args) -> None:
    with pytest.raises(UsageError, match=r"b: 1000 .* make 1024, the server's context is 1023"):
        check_asked(make_spec(model, args=args))


def test_the_models_own_limit_counts_where_none_is_set(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    with pytest.raises(UsageError, match="context is 512"):
        check_asked(make_spec(model))


def test_a_task_that_does_not_exist_is_refused_with_the_nearest(model: Path) -> None:
    for task in ({}, {"max_tokens": 8}):
        with pytest.raises(TaskDataError, match="retrieval"):
            check_asked(make_spec(model, tasks={"retreival": task}))


def test_tasks_are_checked_where_every_server_is_attached_to_too(model: Path) -> None:
    arms = {name: {"base_url": "http://127.0.0.1:9"} for name in ("baseline", "candidate")}
    with pytest.raises(TaskDataError, match="retrieval"):
        find_obstacles(make_spec(model, arms=arms, tasks={"retreival": {}}), model)


def test_task_data_that_cannot_be_read_is_refused(model: Path) -> None:
    spec = make_spec(model, tasks={"hotpotqa": {"data": "/no/such.jsonl", "max_tokens": 8}})
    with pytest.raises(TaskDataError, match=r"/no/such\.jsonl"):
        check_asked(spec)


def test_texts_that_the_load_cannot_give_are_named_before_the_run(model):
    asked = make_spec(model, fidelity={"samples": 2, "tokens": 16})
    found = check_texts(asked)
    assert found.status == "warning"
    assert "fidelity.samples is 2, and the load has 1 prompts" in found.message
    assert any(note.startswith("fidelity: ") for note in find_obstacles(asked, model / "run"))
    assert check_texts(make_spec(model, fidelity={"samples": 1})).status == "ok"
    assert check_texts(make_spec(model, fidelity={})).message == "1 texts"  # nobody asked for 8


@pytest.mark.parametrize(
    ("args", "context"),
    [(["--max-model-len", "16k"], None), (["--max_model_len", "7"], 7), ([], None)],
)
def test_the_context_is_read_from_the_arguments(args: list[str], context: int | None) -> None:
    assert parse_context(args) == context


def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none' does not exist"):
        check_model(make_spec(tmp_path / "none"))


@pytest.mark.parametrize(("mode", "fits"), [("resident", False), ("alternating", True)])
def test_memory_is_wanted_for_the_arms_that_are_up_at_once(model: Path, mode: str, fits) -> None:
    """Each takes 2 GiB of KV cache and 1 GiB of weights; 5 GiB are free."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    spec = make_spec(model, env=env, schedule={"mode": mode})
    ram = [Memory("RAM", 5 * GIB, 8 * GIB, (4711,))]
    if fits:
        assert "at least 3.00 GiB" in check_room(spec, ram).message
        return
    with pytest.raises(ServerStartError, match=r"least 6\.00 GiB.*process ids: 4711"):
        check_room(spec, ram)


def test_two_resident_servers_may_not_ask_for_more_than_one_gpu_has_free(model: Path) -> None:
    gpu = [Memory("GPU 0", 8 * GIB, 10 * GIB, (7,))]
    spec = make_spec(model, args=("--gpu-memory-utilization", "0.5"))
    with pytest.raises(ServerStartError, match=r"asks for 100%.*process ids: 7"):
        check_room(spec, gpu)


def test_servers_on_gpus_of_their_own_do_not_share_and_need_no_others(model: Path) -> None:
    gpus = [Memory(f"GPU {i}", free * GIB, 10 * GIB, ()) for i, free in enumerate((0, 8, 8))]
    arms = {
        name: {
            "args": ["--max-num-batched-tokens", "512", "--gpu-memory-utilization", "0.7"],
            "env": {"CUDA_VISIBLE_DEVICES": device},
        }
        for name, device in (("baseline", "1"), ("candidate", "2"))
    }
    assert check_room(make_spec(model, arms=arms), gpus).status == "ok"
    arms["candidate"]["env"]["CUDA_VISIBLE_DEVICES"] = "1"
    with pytest.raises(ServerStartError, match=r"GPU 1.*asks for 140%"):
        check_room(make_spec(model, arms=arms), gpus)
    one_after_the_other = {"schedule": {"mode": "alternating"}}
    assert check_room(make_spec(model, arms=arms, **one_after_the_other), gpus).status == "ok"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"python": "/no/python"}, "there is no interpreter /no/python"),
        ({"args": ["--chat-template", "./t.jinja"]}, r"'\./t\.jinja' is a path from this folder"),
        ({"args": ["--chat-template=../t.jinja"]}, r"'\.\./t\.jinja' is a path"),
        ({"env": {"PYTHONPATH": "/a:build/lib"}}, "'build/lib' is a path from this folder"),
    ],
)
def test_what_a_server_would_not_find_from_its_own_folder_is_refused(
    model: Path, changes: dict[str, Any], told: str
) -> None:
    batch = ["--max-num-batched-tokens", "512"]
    sound = {"args": batch, "env": {"PYTHONPATH": "/a:/b"}}
    arms = {"baseline": sound, "candidate": {**sound, **changes}}
    arms["candidate"]["args"] = [*batch, *changes.get("args", [])]
    with pytest.raises(UsageError, match=rf"arms\.candidate.*{told}"):
        check_paths(make_spec(model, arms=arms))
    assert check_paths(make_spec(model, arms={"baseline": sound, "candidate": sound}))


def test_a_model_folder_may_be_named_from_here(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent.parent)
    here = f"{model.parent.name}/{model.name}"
    assert find_model_folder(make_spec(Path(here))) == model
    assert find_model_folder(make_spec(Path("org/model"))) is None


def test_a_switch_in_our_own_shell_may_not_patch_the_baseline_too(model: Path) -> None:
    shell = {"KERNELS_PATCH": "int8_kv"}
    stock = {"args": ["--max-num-batched-tokens", "512"]}
    arms = {"baseline": stock, "candidate": {**stock, "patch": "int8_kv"}}
    with pytest.raises(UsageError, match=r"KERNELS_PATCH=int8_kv .* arm baseline .*: unset"):
        check_inherited(make_spec(model, arms=arms), shell)
    asked = {"baseline": {**stock, "env": shell}, "candidate": {**stock, "patch": "int8_kv"}}
    assert check_inherited(make_spec(model, arms=asked), shell).status == "ok"
    assert check_inherited(make_spec(model, arms=arms), {"KERNELS_PATCH": ""}).status == "ok"


def test_settings_that_servers_inherit_unrecorded_are_warned_of(model: Path) -> None:
    shell = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_API_KEY": "k", "HOME": "/h"}
    finding = check_inherited(make_spec(model), shell)
    assert finding.status == "warning"
    assert "VLLM_CPU_KVCACHE_SPACE, which no record keeps" in finding.message
    told = make_spec(model, env={"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert check_inherited(told, shell).status == "ok"


def test_a_results_folder_is_checked_before_it_is_made(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "a" / "b").status == "ok"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a folder"):
        check_folder(tmp_path / "file" / "r")


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere else
    with pytest.raises(StorageError, match="cannot write to"):
        check_folder(tmp_path / "r")


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MIN_RESULTS_BYTES", 2**62)
    with pytest.raises(StorageError, match="GiB free"):
        check_folder(tmp_path / "r")


def test_the_loopback_address_can_be_reached_here() -> None:
    assert check_loopback().status == "ok"


@pytest.mark.parametrize(
    ("base_url", "status"),
    [
        ("http://127.0.0.1:8000", "ok"),
        ("http://localhost:8000", "ok"),
        ("https://models.example", "ok"),
        ("http://models.example", "warning"),
    ],
)
def test_a_key_may_not_travel_in_the_open(monkeypatch, base_url: str, status: str) -> None:
    monkeypatch.setenv("A_KEY", "s3cret")
    finding = check_key(ArmSpec(base_url=base_url, api_key_env="A_KEY"))
    assert finding.status == status
    assert "s3cret" not in finding.message


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(UsageError, match="A_KEY is not set"):
        check_key(ArmSpec(base_url="http://x", api_key_env="A_KEY"))


def test_another_evalgate_at_work_is_a_warning() -> None:
    """The one that started these tests stands for it."""
    other = psutil.Process(os.getppid())
    owner = f"{other.pid}@{other.create_time():.2f}"
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    env = {**os.environ, "EVALGATE_OWNER": owner}
    with subprocess.Popen(sleep, env=env, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            finding = check_rivals()
        finally:
            server.kill()
    assert finding.status == "warning"
    assert str(other.pid) in finding.message.split("(")[1].split(")")[0]
    assert str(os.getpid()) not in finding.message


def test_a_process_that_lost_its_environment_is_known_by_its_folder(
    model: Path, tmp_path: Path
) -> None:
    """As vLLM's engine does, which writes its name over its environment."""
    code = "from evalgate.leftovers import make_folder; print(make_folder())"
    folder = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    own = make_folder()
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    processes = [
        subprocess.Popen(sleep, cwd=place, env={}, stdout=subprocess.PIPE)
        for place in (folder, own)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        finding = check_leftovers()
        assert finding.status == "warning"
        assert f"{processes[0].pid}" in finding.message
        assert f"{processes[1].pid}" not in finding.message
        assert any("leftovers" in line for line in find_obstacles(make_spec(model), tmp_path / "r"))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for place in (folder, own):
            os.rmdir(place)
