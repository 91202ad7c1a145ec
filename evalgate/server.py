"""One vLLM server that we launch: started, proven to be ours and ready, watched, and ended.

Knows processes, ports and logs; sends no load, and asks the server nothing but its model list. The
server runs below a ``supervisor`` process, which ends it when evalgate is gone.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from evalgate.errors import ServerDiedError, ServerError, ServerStartError, StorageError
from evalgate.leftovers import OWNER_VARIABLE, build_owner, make_folder
from evalgate.memory import GIB, Memory, check_memory, read_memory, select_used
from evalgate.memory import parse_memory_fraction as _parse_memory_fraction
from evalgate.redaction import redact_args, redact_env
from evalgate.server_log import explain_log, find_last_line
from evalgate.store import refuse_links

__all__ = ["LaunchPlan", "Server", "check_memory", "explain_log", "read_memory"]

VLLM_MODULE = "vllm.entrypoints.openai.api_server"
SUPERVISOR = Path(__file__).with_name("supervisor.py")
STOP_GRACE_S = 20.0  # vLLM ends within 3 s of SIGTERM; what has not by now will not
STOP_LIMIT_S = STOP_GRACE_S + 15.0
LAST_S = 5.0  # for killed processes to be gone
GPU_RELEASE_S = 30.0
GPU_SLACK_BYTES = GIB // 2  # what others may have taken meanwhile
POLL_S = 0.2
MAX_LOG_BYTES = 4 * 1024 * 1024  # the end of a log that is read for its cause


@dataclass(frozen=True)
class LaunchPlan:
    """What to launch. ``args`` and ``env`` are the spec's; ``port`` None takes a free one."""

    arm: str
    block: int
    python: str
    args: Sequence[str]
    env: dict[str, str]
    model_path: str
    model_name: str
    log_path: Path
    start_timeout_s: float
    host: str = "127.0.0.1"
    port: int | None = None
    module: str = VLLM_MODULE


class Server:
    """A launched server that proved ready. A context manager that stops it.

    ``command`` and ``env`` are as stored: secrets removed. ``pid`` is the supervisor's, the root
    of all the server's processes. ``cold_start_s`` runs from the launch to readiness.
    """

    def __init__(self, plan: LaunchPlan, port: int, supervisor: subprocess.Popen[bytes]) -> None:
        self.plan = plan
        self.port = port
        self.base_url = f"http://{plan.host}:{port}"
        self.pid = supervisor.pid
        self.command = redact_args(_build_command(plan, port))
        self.env = redact_env(plan.env)
        # The server wants it of everybody, also where it inherits it from our own environment.
        self.api_key = {**os.environ, **plan.env}.get("VLLM_API_KEY") or None
        self.started_at = datetime.now(UTC).isoformat()
        self.cold_start_s: float | None = None
        self._supervisor = supervisor
        self._log_start = 0
        self._folder: str | None = None
        self._noted: set[psutil.Process] = set()
        self._engines: set[psutil.Process] = set()
        self._memory_before: list[Memory] = []
        self._stopped = False

    @classmethod
    def launch(cls, plan: LaunchPlan, is_ready: Callable[[str], bool] | None = None) -> Server:
        """Start the server and wait until it is ready: its process alive, the port listened on by
        it and by nobody else, our model listed, and ``is_ready(base_url)`` true when given.

        Raises ServerStartError with the cause that the log names; nothing is left running then.
        Raises StorageError when the log cannot be written.
        """
        if shutil.which(plan.python) is None:
            raise ServerStartError(
                f"the {plan.arm} server cannot be started: there is no interpreter {plan.python}: "
                "set the arm's python to that of its build"
            )
        before = select_used(read_memory(), {**os.environ, **plan.env}, plan.args)
        if (fraction := _parse_memory_fraction(plan.args)) is not None:
            check_memory(before, fraction)
        hold = _hold_port(plan)
        with hold:
            port = hold.getsockname()[1]
            begun = time.monotonic()
            server = cls._spawn(plan, port)
            server._memory_before = before
            try:
                server._wait_until_ready(begun + plan.start_timeout_s, is_ready)
            except BaseException:
                server.stop()
                raise
        server.cold_start_s = round(time.monotonic() - begun, 3)
        return server

    @classmethod
    def _spawn(cls, plan: LaunchPlan, port: int) -> Server:
        env = {**os.environ, **plan.env, OWNER_VARIABLE: build_owner()}
        try:
            # Closed below, the child keeps its own.
            log = open(plan.log_path, "ab", opener=refuse_links)  # noqa: SIM115
        except OSError as exc:
            raise StorageError(
                f"cannot write the log {plan.log_path}: {exc.strerror}; choose a folder that can "
                "be written"
            ) from None
        with log:
            log_start = log.seek(0, os.SEEK_END)
            folder = make_folder()  # empty, as `python -m` makes the current folder importable
            watch = [sys.executable, "-I", str(SUPERVISOR), str(STOP_GRACE_S), folder]
            supervisor = subprocess.Popen(
                [*watch, *_build_command(plan, port)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = cls(plan, port, supervisor)
        server._log_start, server._folder = log_start, folder
        return server

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check_alive(self) -> None:
        """Raise ServerDiedError when the server, or an engine process of it, is gone."""
        status = self._supervisor.poll()
        dead = [process.pid for process in self._engines if not _is_alive(process)]
        if status is None and not dead:
            return
        what = f"exit status {status}" if status is not None else f"its process {dead[0]} is gone"
        last = find_last_line(self._read_log()) or "its log is empty"
        raise ServerDiedError(f"{self._name} died ({what}): {last}; see {self.plan.log_path.name}")

    def stop(self) -> None:
        """End every process of the server and see them gone, in bounded time. May be repeated.

        Raises ServerError naming the processes that would not end.
        """
        if self._stopped:
            return
        self._stopped = True
        self._note_processes()
        stdin = self._supervisor.stdin
        if stdin is not None:
            with suppress(OSError):
                stdin.close()  # tells the supervisor to end the server
        try:
            self._supervisor.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._note_processes()
            self._supervisor.kill()
            self._supervisor.wait()
        for process in filter(_is_alive, self._noted):
            with suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + LAST_S
        while any(map(_is_alive, self._noted)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self._folder is not None:  # still there when the supervisor was killed
            shutil.rmtree(self._folder, ignore_errors=True)
        left = [process.pid for process in self._noted if _is_alive(process)]
        if left:
            raise ServerError(f"{self._name} left processes that will not end: {left}: kill them")
        _wait_for_gpu(self._memory_before)

    @property
    def _name(self) -> str:
        return f"the {self.plan.arm} server (block {self.plan.block})"

    def _wait_until_ready(self, deadline: float, is_ready: Callable[[str], bool] | None) -> None:
        while True:
            status = self._supervisor.poll()
            if status is not None:
                raise ServerStartError(self._explain(f"ended with status {status}"))
            if self._is_listening() and self._serves_model():
                self._note_processes()
                if is_ready is None or is_ready(self.base_url):
                    return
            if time.monotonic() > deadline:
                raise ServerStartError(
                    self._explain(f"was not ready within {self.plan.start_timeout_s:g} s")
                )
            time.sleep(POLL_S)

    def _explain(self, what: str) -> str:
        log = self._read_log()
        cause = explain_log(log) or find_last_line(log) or "its log is empty"
        return f"{self._name} {what}: {cause} (see {self.plan.log_path.name})"

    def _is_listening(self) -> bool:
        """True when ours, and only ours, listens on the port.

        Another server that shares the port would answer a part of the requests, and one that took
        it would answer all of them, healthy as can be.
        """
        with socket.socket(_get_family(self.plan.host)) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((self.plan.host, self.port)) != 0:
                return False
        own = {process.pid for process in self._find_tree()}
        pids = _find_listeners(self.port)
        foreign = sorted(str(pid or "of another user") for pid in pids - own)
        if foreign:
            raise ServerStartError(
                f"{self._name} was given port {self.port}, but another process answers there "
                f"(process id {', '.join(foreign)}): end it, or start again for another port"
            )
        return bool(pids)

    def _serves_model(self) -> bool:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            answer = httpx.get(
                f"{self.base_url}/v1/models", headers=headers, timeout=5, trust_env=False
            )
            ids = [entry["id"] for entry in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False
        if self.plan.model_name not in ids:
            raise ServerStartError(
                f"{self._name} serves {', '.join(ids)}, not {self.plan.model_name!r}"
            )
        return True

    def _find_tree(self) -> list[psutil.Process]:
        """The supervisor and every process below it."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def _note_processes(self) -> None:
        """Remember who belongs to the server, so that none is lost when its parent is killed."""
        for process in self._find_tree()[1:]:
            self._noted.add(process)
            with suppress(psutil.Error):
                if any("VLLM::" in part for part in (process.name(), *process.cmdline()[:1])):
                    self._engines.add(process)

    def _read_log(self) -> str:
        try:
            with open(self.plan.log_path, "rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - MAX_LOG_BYTES))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""


def _build_command(plan: LaunchPlan, port: int) -> list[str]:
    flags = {
        "--model": plan.model_path,
        "--served-model-name": plan.model_name,
        "--host": plan.host,
        "--port": str(port),
    }
    pairs = [part for pair in flags.items() for part in pair]
    return [plan.python, "-m", plan.module, *pairs, *plan.args]


def _get_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _hold_port(plan: LaunchPlan) -> socket.socket:
    """A socket bound to the port and not listening, to be kept open until the server is ready.

    vLLM binds with SO_REUSEPORT, so it can bind beside it, while nobody without that option and no
    outgoing connection can take the port meanwhile.
    """
    hold = socket.socket(_get_family(plan.host))
    hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        hold.bind((plan.host, plan.port or 0))
    except OSError as exc:
        hold.close()
        holders = ", ".join(str(pid) for pid in _find_listeners(plan.port or 0)) or "unknown"
        raise ServerStartError(
            f"port {plan.port} on {plan.host} cannot be had ({exc.strerror}; process id: "
            f"{holders}): end what holds it, or let evalgate choose a port"
        ) from None
    return hold


def _find_listeners(port: int) -> set[int | None]:
    """Ids of the processes that listen on the port; None for one that we may not look into."""
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _wait_for_gpu(before: Sequence[Memory]) -> None:
    """Wait until the driver has given back what the server took of its GPUs, bounded.

    By free bytes: in a container the driver's process ids are not ours.
    """
    wanted = {m.device: m.free_bytes - GPU_SLACK_BYTES for m in before if m.device != "RAM"}
    deadline = time.monotonic() + GPU_RELEASE_S
    while wanted and time.monotonic() < deadline:
        if all(m.free_bytes >= wanted.get(m.device, 0) for m in read_memory()):
            return
        time.sleep(POLL_S)
