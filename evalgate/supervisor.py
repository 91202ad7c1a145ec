"""The small process between evalgate and one server, so that no server outlives evalgate.

Started as ``python supervisor.py GRACE_S FOLDER COMMAND...`` in a session of its own, with a pipe
as standard input that evalgate never writes to. It runs COMMAND in FOLDER and waits for the first
of: the command ends; the pipe closes, because evalgate asked or is gone, SIGKILL included;
a SIGTERM. Then it ends every process that came from the command, and removes FOLDER. Orphans of a
killed server come back to it as their reaper (Linux), so a detached engine process cannot hide.
Killed itself, it takes the command with it (Linux: a SIGTERM). It exits with the command's status,
128 + n for a signal n.

Imports nothing of evalgate: it is run by path.
"""

from __future__ import annotations

import ctypes
import select
import shutil
import signal
import subprocess
import sys
import time

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.2
LAST_S = 5.0


def main() -> int:
    grace_s, folder, command = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: stopping.append(number))
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            preexec_fn=lambda: set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        while child.poll() is None and not stopping:
            if select.select([sys.stdin], [], [], POLL_S)[0]:
                break
        end_child(child, grace_s)
        end_rest()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def set_process_option(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_child(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ask the server to end, as it ends its own children best; insist after ``grace_s``."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def end_rest() -> None:
    """Kill what is left below us until nothing is, as a dying process may still start others."""
    deadline = time.monotonic() + LAST_S
    while time.monotonic() < deadline:
        rest = psutil.Process().children(recursive=True)
        alive = [process for process in rest if is_alive(process)]
        if not alive:
            return
        for process in alive:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(alive, timeout=0.5)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main())
