"""A run from its first launch to its last: blocks, which servers are up, how it ends or goes on.

What happens inside a block is in ``block``; a verdict is not formed here.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from evalgate import __version__
from evalgate.block import Progress, RunState, measure_block
from evalgate.embedded import ensure_packaged_model
from evalgate.environment import list_changes, locate_python, read_environment
from evalgate.errors import EvalgateError, InterruptedRunError, StorageError, UsageError
from evalgate.live import LiveArm, utc_now
from evalgate.origin import forget_start, note_start, was_started_here
from evalgate.preflight import find_model_folder, find_obstacles
from evalgate.records import SCHEMA_VERSION, Run
from evalgate.spec import (
    BASELINE,
    PACKAGED_MODEL,
    Spec,
    build_calibration_spec,
    build_spec,
    compute_spec_sha256,
    render_spec,
    restore_secrets,
)
from evalgate.stopping import MIN_LAUNCHES, Stopping, TimeLimit, estimate_block_s
from evalgate.store import RunWriter, load_run
from evalgate.telemetry import MachineSampler


@dataclass(frozen=True)
class UntilDecided:
    """Blocks are added until no rule is open that more launches could decide, or the minutes end.

    ``first_look``: launches that the policy wants at least. ``open_rules`` looks at what lies in
    the folder and names the open rules.
    """

    max_minutes: float
    first_look: int
    open_rules: Callable[[Path], Sequence[str]]


def execute(
    spec: Spec,
    out_dir: Path,
    progress: Progress,
    *,
    calibrate: bool = False,
    notes: Sequence[str] = (),
    until: UntilDecided | None = None,
    limit: TimeLimit | None = None,
) -> Path:
    """Measure what ``spec`` asks for into ``out_dir`` (a new folder) and return it.

    With ``until`` the spec's number of blocks is the least; with ``limit`` no block is begun that
    would end later, but for the first, whose length is unknown. Raises EvalgateError; what was
    measured until then is on disk, with status ``failed``.
    """
    if calibrate:
        spec = build_calibration_spec(spec)
    resolved = render_spec(spec)
    notes = [*notes, *_warn(spec, out_dir, progress)]
    model_path = resolve_model(spec, progress)
    run = Run(
        schema_version=SCHEMA_VERSION,
        run_id=secrets.token_hex(8),
        name=spec.name,
        status="started",
        started_at=utc_now(),
        finished_at=None,
        spec=resolved,
        spec_sha256=compute_spec_sha256(resolved),
        evalgate_version=__version__,
        arms={},
    )
    note_start(run.run_id, run.spec_sha256)  # first, so that no kill comes in between
    writer = RunWriter.create(out_dir, run)
    state = _build_state(spec, model_path, writer, run, progress, notes, calibrate)
    state.limit = limit
    if until is not None:
        # Tasks and replay are evidence that no launch adds to: they are complete at each look.
        heavy = _count_heavy_blocks(spec)
        state.stopping = Stopping(
            limit=TimeLimit(until.max_minutes),
            first_look=max(spec.schedule.blocks, until.first_look, heavy, MIN_LAUNCHES),
            heavy_blocks=heavy,
            open_rules=lambda: until.open_rules(out_dir),
            block_s=state.block_s,
        )
    _run_blocks(state)
    return out_dir


def resume(
    out_dir: Path,
    progress: Progress,
    spec: Spec | None = None,
    open_rules: Callable[[Path], Sequence[str]] | None = None,
    limit: TimeLimit | None = None,
) -> Path:
    """Continue a run that did not come to its end; an unfinished block is repeated under a new
    number and stays on disk, excluded. ``open_rules`` as in ``UntilDecided``: needed for a run that
    began with it, without a use for any other. ``limit`` as in ``execute``.

    Raises UsageError when the run is complete, when it has minutes of its own, when ``spec`` is not
    the one it began with, when none is given and this user did not begin the run here, or when the
    build is another one now.
    """
    stored = load_run(out_dir)
    own = build_spec(stored.run.spec, f"{out_dir}: run.json: spec")
    extra = stored.run.extra or {}
    notes, calibration = extra.get("notes", []), extra.get("calibration", False)
    if spec is not None and calibration:
        spec = build_calibration_spec(spec)
    if spec is not None and compute_spec_sha256(render_spec(spec)) != stored.run.spec_sha256:
        raise UsageError(
            f"{out_dir} was started with another spec or policy (sha256 "
            f"{stored.run.spec_sha256[:12]}): name the spec, and the --policy, that it began with, "
            "or start a new run"
        )
    if stored.run.status == "complete":
        raise UsageError(f"{out_dir} is complete: there is nothing to resume")
    if limit is not None and "sequential" in extra:
        raise UsageError(
            f"{out_dir} was begun with --until-decided and goes on with the minutes that it has "
            "left: drop --max-minutes"
        )
    if compute_spec_sha256(stored.run.spec) != stored.run.spec_sha256:
        raise UsageError(f"{out_dir}: the spec in run.json is not the one it began with: run anew")
    if spec is None and not was_started_here(stored.run.run_id, stored.run.spec_sha256):
        raise UsageError(
            f"{out_dir} was not started by this user on this machine, as far as evalgate's cache "
            "knows, and resuming launches the programs and sends to the servers that it names: "
            f"name the spec that it is to follow (evalgate run SPEC.toml --resume {out_dir})"
        )
    own = spec or restore_secrets(own, os.environ)
    _check_same_build(stored.run, own, out_dir)
    warnings = _warn(own, out_dir, progress)
    model_path = resolve_model(own, progress)
    writer = RunWriter.reopen(out_dir)
    run = stored.run.model_copy(update={"status": "started", "finished_at": None})
    notes = list(dict.fromkeys([*notes, *warnings]))
    state = _build_state(own, model_path, writer, run, progress, notes, calibration)
    state.done = list(extra.get("completed_blocks", []))
    state.block_s, state.limit = list(extra.get("block_s", [])), limit
    seen = {r.block for r in stored.requests} | {s.block for s in stored.samples}
    for name, live in state.arms.items():
        if (arm := stored.run.arms.get(name)) is not None:
            seen |= {launch.block for launch in arm.launches}
            live.launches, live.server_version = list(arm.launches), arm.server_version
            live.evidence = [e for e in arm.evidence if e.block in state.done]
            if arm.launches:  # else nobody has asked its interpreter yet
                live.environment = arm.environment
    state.excluded = sorted(seen - set(state.done))
    state.replayed = {f.arm for f in stored.fidelity if f.block in state.done}
    if (begun := extra.get("sequential")) is not None:
        assert open_rules is not None, "handed in by every caller that resumes"
        state.stopping = Stopping.restore(begun, open_rules=lambda: open_rules(out_dir))
        state.block_s = state.stopping.block_s
    _run_blocks(state)
    return out_dir


def _check_same_build(run: Run, spec: Spec, out_dir: Path) -> None:
    """Raise UsageError when an arm's blocks to come would run on another build or machine than
    those that are stored: they would be averaged into one arm."""
    changes = (
        []
        if run.evalgate_version == __version__
        else [f"evalgate was {run.evalgate_version}, is {__version__}"]
    )
    for name, arm in run.arms.items():
        if arm.launches and name in spec.arms:
            python = locate_python(spec.arms[name].python)
            now = read_environment(python, spec.arms[name].env)
            changes += [f"{name}: {change}" for change in list_changes(arm.environment, now)]
    if changes:
        raise UsageError(
            f"{out_dir} cannot be resumed, as what it measured is not there any more "
            f"({'; '.join(changes)}): put it back, or start a new run"
        )


def _warn(spec: Spec, out_dir: Path, progress: Progress) -> list[str]:
    """What stands in the way of a good run; what stands in the way of any is raised."""
    warnings = find_obstacles(spec, out_dir)
    for warning in warnings:
        progress.say(f"warning: {warning}")
    return warnings


def resolve_model(spec: Spec, progress: Progress) -> str | None:
    """The folder or hub name to launch with; the packaged model is converted when it is asked for.

    Raises UsageError for a folder that is not there.
    """
    if spec.model.path == PACKAGED_MODEL and any(not arm.attached for arm in spec.arms.values()):
        progress.say("preparing the packaged model")
        return str(ensure_packaged_model())
    folder = find_model_folder(spec)
    return spec.model.path if folder is None else str(folder)


def _build_state(
    spec: Spec,
    model_path: str | None,
    writer: RunWriter,
    run: Run,
    progress: Progress,
    notes: list[str],
    calibration: bool,
) -> RunState:
    arms = {
        name: LiveArm(
            name=name,
            spec=spec,
            arm=arm,
            model_path=model_path,
            python=locate_python(arm.python),
            log_path=writer.log_path,
            run_id=run.run_id,
        )
        for name, arm in spec.arms.items()
    }
    return RunState(spec, writer, run, arms, progress, notes, calibration)


def _run_blocks(state: RunState) -> None:
    """Run blocks until there are enough of them; leave a true status behind on any end."""
    sampler = MachineSampler()
    try:
        state.save()
        block = max([*state.done, *state.excluded], default=-1) + 1
        while _wants_block(state):
            _check_time(state)
            started = time.monotonic()
            _run_block(state, block, sampler)
            state.done.append(block)
            state.block_s.append(time.monotonic() - started)
            state.save()
            block += 1
        state.save(status="complete", finished_at=utc_now())
        forget_start(state.record.run_id)
    except KeyboardInterrupt:
        _save_failure(state, "interrupted")
        raise InterruptedRunError(
            f"interrupted; what was measured is in {state.writer.path}: continue with "
            f"evalgate run --resume {state.writer.path}"
        ) from None
    except EvalgateError as exc:
        _save_failure(state, str(exc))
        raise
    except Exception as exc:
        _save_failure(state, f"internal error: {exc!r}")
        raise


def _wants_block(state: RunState) -> bool:
    if state.stopping is None:
        return len(state.done) < state.spec.schedule.blocks
    return state.stopping.wants_block(len(state.done), state.save, state.progress.say)


def _check_time(state: RunState) -> None:
    """Raise InterruptedRunError when another block would end after the time limit."""
    if state.limit is None or not state.block_s:
        return
    needed = estimate_block_s(state.block_s, _count_heavy_blocks(state.spec))
    left = max(state.limit.left_s, 0.0)
    if needed > left:
        raise InterruptedRunError(
            f"{len(state.done)} of {state.spec.schedule.blocks} launches of each arm are measured; "
            f"another takes about {needed / 60:.1f} minutes, and {left / 60:.1f} are left: "
            f"continue with evalgate run --resume {state.writer.path}"
        )


def _count_heavy_blocks(spec: Spec) -> int:
    """The first so many blocks hold the tasks and the replay too."""
    return spec.schedule.task_blocks if spec.tasks else int(spec.fidelity is not None)


def _save_failure(state: RunState, failure: str) -> None:
    """A disk that refused a record may refuse this too; the cause is what must be told then."""
    with suppress(StorageError):
        state.save(status="failed", finished_at=utc_now(), extra={"failure": failure})


def _run_block(state: RunState, block: int, sampler: MachineSampler) -> None:
    order = sorted(state.arms, key=lambda name: name != BASELINE)
    if len(state.done) % 2 == 1:
        order.reverse()
    _cool_down(state)
    if state.spec.schedule.mode == "resident":
        with _serving(state, order, block) as live:
            measure_block(state, live, block, sampler)
    else:
        for position, name in enumerate(order):
            if position:
                _cool_down(state)
            with _serving(state, [name], block) as live:
                measure_block(state, live, block, sampler)


def _cool_down(state: RunState) -> None:
    """A machine warmed by one launch clocks lower in the next; nothing is warm before the first."""
    seconds = state.spec.schedule.cooldown_s
    if seconds and state.machine:
        state.progress.say(f"cooling down for {seconds:g} s")
        time.sleep(seconds)


@contextmanager
def _serving(state: RunState, order: Sequence[str], block: int) -> Iterator[dict[str, LiveArm]]:
    """The named arms up, started one after the other: two at once spoil each other's memory
    profiling."""
    with ExitStack() as stack:
        live: dict[str, LiveArm] = {}
        for name in order:
            arm = state.arms[name]
            verb = "attaching to" if arm.arm.attached else "starting"
            state.progress.say(f"block {block}: {verb} {name}")
            live[name] = stack.enter_context(arm.serve(block))
        yield live
