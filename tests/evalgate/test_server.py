"""Launching: only our own, ready server is believed, and nothing of it is left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from stub_server import StubServer

from evalgate import server as server_module
from evalgate.client import Client
from evalgate.errors import ServerDiedError, ServerStartError, StorageError
from evalgate.memory import GIB, Memory, check_memory, find_leftovers, parse_memory_fraction
from evalgate.server import LaunchPlan, Server

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Each test ends with no process below this one that was not there before."""
    before = set(psutil.Process().children(recursive=True))
    yield
    psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=5)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_S", 0.02)
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.5)


def make_plan(tmp_path: Path, mode: str = "", **changes: Any) -> LaunchPlan:
    env = {"PYTHONPATH": str(HERE), "STUB_MODE": mode, **changes.pop("env", {})}
    return LaunchPlan(
        **{
            "arm": "baseline",
            "block": 0,
            "python": sys.executable,
            "args": ["--max-num-batched-tokens", "512"],
            "env": env,
            "model_path": "/models/m",
            "model_name": "m",
            "log_path": tmp_path / "server-baseline-0.log",
            "start_timeout_s": 20.0,
            "module": "stub_server",
            **changes,
        }
    )


def find_tree(server: Server) -> list[psutil.Process]:
    root = psutil.Process(server.pid)
    return [root, *root.children(recursive=True)]


def find_folder(tmp_path: Path) -> Path:
    """Where the stub says that it runs."""
    log = (tmp_path / "server-baseline-0.log").read_text()
    return Path(log.split("started in ")[1].strip())


def wait_for_death(server: Server) -> str:
    """What check_alive says once it notices, seconds at most."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            server.check_alive()
        except ServerDiedError as exc:
            return str(exc)
        time.sleep(0.02)
    raise AssertionError("still alive")


def test_a_launched_server_answers_and_ends_with_its_block(tmp_path: Path) -> None:
    with Server.launch(make_plan(tmp_path)) as server:
        tree = find_tree(server)
        server.check_alive()
        with Client(server.base_url, "m") as client:
            assert client.generate([1], 4).text == "AB"
        assert server.base_url == f"http://127.0.0.1:{server.port}"
        assert server.cold_start_s is not None
        assert 0 < server.cold_start_s < 20
        assert server.command[1:5] == ["-m", "stub_server", "--model", "/models/m"]
        assert server.command[-2:] == ["--max-num-batched-tokens", "512"]
    assert not any(process.is_running() for process in tree)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


def test_it_runs_in_an_empty_folder_that_goes_with_it(tmp_path: Path) -> None:
    with Server.launch(make_plan(tmp_path)):
        folder = find_folder(tmp_path)
        assert list(folder.iterdir()) == []
    assert not folder.exists()


def test_a_server_that_ignores_sigterm_is_killed_in_bounded_time(tmp_path: Path) -> None:
    server = Server.launch(make_plan(tmp_path, "stubborn"))
    tree, begun = find_tree(server), time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - begun < 5
    assert not any(process.is_running() for process in tree)


@pytest.mark.parametrize("kill_first", [False, True], ids=["stop", "after SIGKILL of the server"])
def test_a_detached_engine_does_not_survive(tmp_path: Path, kill_first: bool) -> None:
    server = Server.launch(make_plan(tmp_path, "children"))
    _, child, engine = find_tree(server)
    assert os.getsid(engine.pid) == engine.pid
    if kill_first:
        child.kill()
        assert "exit status 137" in wait_for_death(server)
        assert not engine.is_running()
    server.stop()
    assert not engine.is_running()


def test_killing_the_supervisor_leaves_nothing_after_stop(tmp_path: Path) -> None:
    server = Server.launch(make_plan(tmp_path, "children"))
    tree = find_tree(server)
    tree[0].kill()
    assert "exit status -9" in wait_for_death(server)
    server.stop()
    assert not any(map(server_module._is_alive, tree))
    assert not find_folder(tmp_path).exists()


LAUNCHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from test_server import make_plan
from evalgate.server import Server
server = Server.launch(make_plan(Path({tmp!r}), "children"))
print(server.pid, flush=True)
time.sleep(600)
"""


def launch_by_another_evalgate(folder: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process that has launched a server, and that server's supervisor."""
    script = textwrap.dedent(LAUNCHER.format(here=str(HERE), tmp=str(folder)))
    evalgate = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert evalgate.stdout is not None
    with evalgate.stdout as output:
        return evalgate, psutil.Process(int(output.readline()))


def test_no_server_outlives_a_killed_evalgate(tmp_path: Path) -> None:
    evalgate, root = launch_by_another_evalgate(tmp_path)
    tree = [root, *root.children(recursive=True)]
    assert len(tree) == 3
    evalgate.kill()
    evalgate.wait()
    _, alive = psutil.wait_procs(tree, timeout=25)
    assert alive == []
    assert not {process.pid for process in tree} & set(find_leftovers())


def test_what_outlives_evalgate_and_supervisor_is_known(tmp_path: Path) -> None:
    """Both killed in one blow: the server ends, a detached engine stays and is found."""
    evalgate, supervisor = launch_by_another_evalgate(tmp_path)
    server, engine = supervisor.children(recursive=True)
    evalgate.kill()
    supervisor.kill()
    evalgate.wait()
    try:
        psutil.wait_procs([supervisor, server], timeout=25)
        assert not any(map(server_module._is_alive, (supervisor, server)))
        assert {server.pid, engine.pid} & set(find_leftovers()) == {engine.pid}
    finally:
        engine.kill()
        os.rmdir(find_folder(tmp_path))


def test_a_failed_start_is_explained_from_the_log(tmp_path: Path) -> None:
    plan = make_plan(
        tmp_path, "fail", env={"STUB_TEXT": "vllm: error: unrecognized arguments: --no-such 3"}
    )
    with pytest.raises(ServerStartError) as caught:
        Server.launch(plan)
    assert str(caught.value) == (
        "the baseline server (block 0) ended with status 1: this vLLM does not know the arguments "
        "--no-such 3: correct the arm's args (see server-baseline-0.log)"
    )


def test_only_the_log_of_this_start_is_explained(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "fail", env={"STUB_TEXT": "OddError: now"})
    plan.log_path.write_text("vllm: error: unrecognized arguments: --before\n")
    with pytest.raises(ServerStartError, match="status 1: OddError: now"):
        Server.launch(plan)


def test_an_interpreter_that_is_not_there_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="there is no interpreter /no/python"):
        Server.launch(make_plan(tmp_path, python="/no/python"))


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"not ready within 0\.5 s"):
        Server.launch(make_plan(tmp_path, "mute", start_timeout_s=0.5))


def test_readiness_waits_for_the_callers_own_check(tmp_path: Path) -> None:
    answers = iter([False, False, True])
    with Server.launch(make_plan(tmp_path), lambda url: next(answers)):
        assert next(answers, None) is None


def test_another_model_on_our_port_is_refused(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, args=["--served-model-name", "other"])
    with pytest.raises(ServerStartError, match="serves other, not 'm'"):
        Server.launch(plan)


@pytest.mark.parametrize("mode", ["fail", "mute", ""])
def test_another_server_on_the_port_is_never_taken_for_ours(tmp_path: Path, mode: str) -> None:
    """It serves our model under SO_REUSEPORT, while ours exits, hangs, or listens beside it."""
    with StubServer("m") as other:
        plan = make_plan(tmp_path, mode, port=other.port)
        with pytest.raises(ServerStartError) as caught:
            Server.launch(plan)
        assert "process id" in str(caught.value) or "status 1" in str(caught.value)
        assert not any("completions" in path for path, _, _ in other.requests)
        with Client(other.base_url, "m") as client:
            assert client.read_model().id == "m"


def test_a_port_held_without_sharing_is_refused_by_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(ServerStartError, match=rf"port {port} .*process id: {os.getpid()}\)"):
            Server.launch(make_plan(tmp_path, port=port))


def test_the_port_is_held_until_the_server_is_ready(tmp_path: Path) -> None:
    hold = server_module._hold_port(make_plan(tmp_path))
    with hold, socket.socket() as rival, pytest.raises(OSError, match="in use"):
        rival.bind(("127.0.0.1", hold.getsockname()[1]))


def test_a_server_that_dies_says_so_with_its_last_words(tmp_path: Path) -> None:
    with Server.launch(make_plan(tmp_path, "die")) as server:
        with Client(server.base_url, "m") as client:
            assert client.generate([1], 4).error is not None
        assert "died (exit status 3): stub started in" in wait_for_death(server)


def test_secrets_are_not_in_what_is_stored(tmp_path: Path) -> None:
    args = ["--hf-token", "t0p", "--api-key=t0p", "--tokenizer", "tok"]
    env = {"HF_TOKEN": "t0p", "VLLM_API_KEY": "t0p", "OMP_NUM_THREADS": "1"}
    with Server.launch(make_plan(tmp_path, args=args, env=env)) as server:
        assert "t0p" not in " ".join(server.command)
        assert "t0p" not in server.env.values()
        assert server.env["OMP_NUM_THREADS"] == "1"
        assert server.command[-2:] == ["--tokenizer", "tok"]


def test_a_log_that_cannot_be_written_is_an_error_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write the log"):
        Server.launch(make_plan(tmp_path, log_path=tmp_path / "none" / "x.log"))


def test_too_little_free_memory_is_refused_with_its_holders() -> None:
    memory = Memory("GPU 0", int(31.44 * GIB), int(47.38 * GIB), (4711, 4712))
    with pytest.raises(
        ServerStartError,
        match=r"31\.44 of 47\.38 GiB free \(66\.4%\).*95%.*process ids: 4711, 4712",
    ):
        check_memory([memory], 0.95)
    check_memory([memory], 0.66)


def test_a_start_without_memory_is_refused_before_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "read_memory", lambda: [Memory("GPU 0", 1, 10, ())])
    plan = make_plan(tmp_path, args=["--gpu-memory-utilization", "0.9"])
    with pytest.raises(ServerStartError, match="asks for 90%"):
        Server.launch(plan)
    assert not plan.log_path.exists()


def test_gpus_that_the_server_does_not_see_need_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = [Memory("GPU 0", 0, 10 * GIB, ()), Memory("GPU 1", 10 * GIB, 10 * GIB, ())]
    monkeypatch.setattr(server_module, "read_memory", lambda: memories)
    args = ["--gpu-memory-utilization", "0.9"]
    with pytest.raises(ServerStartError, match="GPU 0 has 0"):
        Server.launch(make_plan(tmp_path, args=args))
    with Server.launch(make_plan(tmp_path, args=args, env={"CUDA_VISIBLE_DEVICES": "1"})):
        pass


def test_a_stop_waits_until_the_gpus_memory_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By free bytes, as in a container the driver names other process ids than ours."""
    free = [10 * GIB, 2 * GIB, 4 * GIB, 10 * GIB, 0]
    read = iter(free)
    monkeypatch.setattr(
        server_module, "read_memory", lambda: [Memory("GPU 0", next(read), 10 * GIB, ())]
    )
    Server.launch(make_plan(tmp_path)).stop()
    assert list(read) == [0]


@pytest.mark.parametrize(
    ("args", "fraction"),
    [
        (["--gpu-memory-utilization", "0.5"], 0.5),
        (["--gpu-memory-utilization=0.5"], 0.5),
        (["--max-model-len", "5"], None),
        (["--gpu-memory-utilization"], None),
        (["--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes=1G"], None),
    ],
)
def test_the_memory_share_is_read_from_the_arguments(
    args: list[str], fraction: float | None
) -> None:
    assert parse_memory_fraction(args) == fraction


def test_a_server_whose_evalgate_is_gone_is_found() -> None:
    env = {**os.environ, "EVALGATE_OWNER": "1@1.00"}
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    try:
        time.sleep(0.1)
        assert left.pid in find_leftovers()
    finally:
        left.kill()
        left.wait()
