"""One block against the arms that are up: warm-up, load pairs, tasks, fidelity.

Knows what is asked of whom in which order and what a run in progress holds (``RunState``); every
record is on disk as it comes. How servers come up and when a run is over is not known here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Protocol

from evalgate.errors import ServerAnswerError, ServerDiedError, SpecError
from evalgate.fidelity import (
    REPLAYED_ROUTES,
    Prompt,
    Reference,
    Setup,
    build_reference,
    measure_arm,
)
from evalgate.live import LiveArm, Phase
from evalgate.load import (
    WARMUP_SALT,
    LoadPrompt,
    build_prompts,
    compute_cache_salt,
    plan_pairs,
    select_warmup,
)
from evalgate.records import BASELINE, RequestRecord, Run
from evalgate.spec import PATCHES, Spec, parse_batched_tokens
from evalgate.stopping import Stopping, TimeLimit
from evalgate.store import RunWriter
from evalgate.tasks import Item, build_items
from evalgate.telemetry import MachineSampler, summarise_machine

FIDELITY_WORK = 1.5  # of a prompt read again, once for each route
OUTPUT_TOKEN_WORK = 30  # an output token costs about as much as this many prompt tokens


class Progress(Protocol):
    """What a run tells whoever watches; ``work`` is in prompt-token equivalents."""

    def begin(self, total_work: float) -> None: ...
    def extend(self, work: float) -> None: ...
    def say(self, text: str) -> None: ...
    def advance(self, work: float, text: str) -> None: ...


@dataclass
class Plan:
    """Prompts and items, built once with the first server's tokenizer."""

    prompts: list[LoadPrompt]
    items: list[Item]


@dataclass
class RunState:
    """A run in progress. ``done`` and ``excluded`` are the blocks that count and that do not.

    ``stopping`` says when a run ends that has no fixed number of blocks, ``limit`` how long this
    attempt at any other may take; ``block_s``: seconds of the finished blocks, which a stopping
    run's list is too.
    """

    spec: Spec
    writer: RunWriter
    record: Run
    arms: dict[str, LiveArm]
    progress: Progress
    notes: list[str]
    calibration: bool
    done: list[int] = field(default_factory=list)
    excluded: list[int] = field(default_factory=list)
    plan: Plan | None = None
    references: list[Reference] = field(default_factory=list)
    replayed: set[str] = field(default_factory=set)
    machine: list[dict[str, Any]] = field(default_factory=list)
    stopping: Stopping | None = None
    limit: TimeLimit | None = None
    block_s: list[float] = field(default_factory=list)

    def save(self, **changes: Any) -> None:
        """Write run.json as it stands now."""
        extra = {
            "completed_blocks": self.done,
            "excluded_blocks": self.excluded,
            "calibration": self.calibration,
            "notes": self.notes,
            "machine": summarise_machine(self.machine),
            **(
                {"sequential": self.stopping.to_json()}
                if self.stopping
                else {"block_s": [round(seconds, 3) for seconds in self.block_s]}
            ),
            **(changes.pop("extra", None) or {}),
        }
        arms = {name: live.build_record() for name, live in self.arms.items()}
        self.record = self.record.model_copy(update={"arms": arms, "extra": extra, **changes})
        self.writer.save_run(self.record)


def measure_block(
    state: RunState, live: dict[str, LiveArm], block: int, sampler: MachineSampler
) -> None:
    """Warm-up, load pairs, then tasks, against the arms that are up."""
    spec, progress = state.spec, state.progress
    if state.plan is None:
        progress.say("building prompts with the server's tokenizer")
        tokenizing = live.get(BASELINE) or next(iter(live.values()))
        state.plan = _build_plan(spec, tokenizing)
        for arm in state.arms.values():
            arm.as_messages = tokenizing.as_messages
        progress.begin(_compute_work(state))
    elif len(state.done) >= _count_known_blocks(state):
        progress.extend(_compute_load_work(state.plan, spec) * len(live))
    plan, run_id = state.plan, state.record.run_id

    for number, prompt in enumerate(select_warmup(plan.prompts, spec.schedule.warmup)):
        for name, arm in live.items():
            salt = compute_cache_salt(run_id, name, block, f"{WARMUP_SALT}{number}")
            record = _record_load(state, arm, prompt, number, "warmup", salt)
            if record.error is not None:
                raise ServerAnswerError(
                    f"the {name} server failed the warm-up request {prompt.prompt_id} "
                    f"({record.error.category}: {record.error.message}): mend that before hours "
                    "are spent, then continue with --resume"
                )
    _mark(live, "warm")

    pairs = plan_pairs(
        plan.prompts,
        list(live),
        repetitions=spec.schedule.repetitions,
        seed=spec.schedule.seed,
        block=block,
    )
    for pair in pairs:
        _sample_machine(state, live, block, pair.prompt.prompt_id, sampler)
        for name in pair.arms:
            what = f"{pair.prompt.prompt_id}/{pair.repetition}"
            salt = compute_cache_salt(run_id, name, block, what)
            _record_load(state, live[name], pair.prompt, pair.repetition, "measure", salt)
    _mark(live, "measured")

    if len(state.done) < spec.schedule.task_blocks:
        for number, item in enumerate(plan.items):
            names = list(live) if number % 2 == 0 else list(reversed(live))
            for name in names:
                salt = compute_cache_salt(run_id, name, block, f"task/{item.task}/{number}")
                record = live[name].send_sample(item, salt=salt)
                state.writer.append_sample(record)
                _stop_if_dead(record.error, name)
                progress.advance(_work(item.prompt_tokens, item.max_tokens), f"{item.task} {name}")
    for arm in live.values():
        arm.finish()
    if spec.fidelity is not None:
        _measure_fidelity(state, live, block)


def _measure_fidelity(state: RunState, live: dict[str, LiveArm], block: int) -> None:
    """Replay the baseline's own output in every arm once in a run; the baseline's answers are kept
    for the arms that are up without it."""
    if state.replayed >= state.arms.keys():
        return
    if BASELINE in live and not state.references:
        setup = _build_setup(state, live, block)
        for prompt in _select_fidelity_prompts(state):
            state.progress.say(f"fidelity: the baseline's output of {prompt.sample_id}")
            state.references.append(build_reference(live[BASELINE].client, prompt, setup))
    for name, arm in live.items():
        if not state.references or name in state.replayed:
            continue
        setup = _build_setup(state, live, block)
        for reference in state.references:
            for record in measure_arm(name, arm.client, reference, setup):
                arm.check_alive()
                state.writer.append_fidelity(record)
                state.progress.advance(
                    FIDELITY_WORK * record.prompt_tokens, f"fidelity {record.route} {name}"
                )
        state.replayed.add(name)


def _select_fidelity_prompts(state: RunState) -> list[Prompt]:
    """Load prompts, evenly spread over all buckets."""
    assert state.plan is not None, "prompts are built before anything is sent"
    assert state.spec.fidelity is not None, "asked for by the spec alone"
    prompts = state.plan.prompts
    count = min(state.spec.fidelity.samples, len(prompts))
    chosen = [prompts[int((i + 0.5) * len(prompts) / count)] for i in range(count)]
    return [Prompt(p.prompt_id, p.item.prompt_ids) for p in chosen]


def _build_setup(state: RunState, live: dict[str, LiveArm], block: int) -> Setup:
    spec, run_id = state.spec, state.record.run_id
    chunk_tokens = parse_batched_tokens(next(iter(live.values())).arm.args)
    if spec.fidelity is None or chunk_tokens is None:
        raise SpecError("fidelity needs launched arms with a known --max-num-batched-tokens")
    return Setup(
        block=block,
        tokens=spec.fidelity.tokens,
        chunk_tokens=chunk_tokens,
        salt=lambda arm, text: compute_cache_salt(run_id, arm, block, f"fidelity/{text}"),
        report_rpcs={
            name: PATCHES[arm.arm.patch].report_rpc
            for name, arm in live.items()
            if arm.arm.patch is not None
        },
    )


def _build_plan(spec: Spec, arm: LiveArm) -> Plan:
    tokenizer = arm.tokenizer
    prompts = build_prompts(spec, tokenizer, arm.max_model_len)
    slices = [(bucket.min_tokens, bucket.max_tokens) for bucket in spec.load.buckets]
    items: list[Item] = []
    for name, task in spec.tasks.items():
        items += build_items(
            name,
            task,
            tokenizer,
            lengths=slices,
            max_model_len=arm.max_model_len,
            seed=spec.schedule.seed,
        )
    return Plan(prompts, items)


def _record_load(
    state: RunState, arm: LiveArm, prompt: LoadPrompt, repetition: int, phase: Phase, salt: str
) -> RequestRecord:
    record = arm.send_load(prompt, repetition, phase=phase, salt=salt)
    state.writer.append_request(record)
    _stop_if_dead(record.error, arm.name)
    work = _work(prompt.prompt_tokens, state.spec.load.output_tokens)
    state.progress.advance(work, f"{phase} {prompt.prompt_id} {arm.name}")
    return record


def _stop_if_dead(error: Any, arm: str) -> None:
    if error is not None and error.category == "server_died":
        raise ServerDiedError(f"the {arm} server died: {error.message}")


def _mark(live: dict[str, LiveArm], point: str) -> None:
    for arm in live.values():
        arm.mark(point)


def _sample_machine(
    state: RunState, live: dict[str, LiveArm], block: int, prompt_id: str, sampler: MachineSampler
) -> None:
    own = [os.getpid(), *(arm.server.pid for arm in live.values() if arm.server is not None)]
    sample = sampler.sample(own)
    state.machine.append(sample)
    state.writer.append_telemetry({"block": block, "prompt_id": prompt_id, **sample})


def _work(prompt_tokens: int, output_tokens: int) -> float:
    return prompt_tokens + OUTPUT_TOKEN_WORK * output_tokens


def _count_known_blocks(state: RunState) -> int:
    """Blocks that are sure to come; a run that adds some tells of each as it begins."""
    return state.stopping.first_look if state.stopping else state.spec.schedule.blocks


def _compute_load_work(plan: Plan, spec: Spec) -> float:
    """Work of one block of one arm, without tasks and replay."""
    schedule, out = spec.schedule, spec.load.output_tokens
    warm = select_warmup(plan.prompts, schedule.warmup)
    load = sum(_work(p.prompt_tokens, out) for p in plan.prompts) * schedule.repetitions
    return load + sum(_work(p.prompt_tokens, out) for p in warm)


def _compute_work(state: RunState) -> float:
    """Work of the whole run, for the progress bar's estimate of the time left."""
    plan, spec = state.plan, state.spec
    assert plan is not None, "prompts are built before anything is announced"
    blocks = _count_known_blocks(state)
    tasks = sum(_work(i.prompt_tokens, i.max_tokens) for i in plan.items)
    work = _compute_load_work(plan, spec) * blocks + tasks * min(spec.schedule.task_blocks, blocks)
    if spec.fidelity is not None and plan.prompts:
        mean_tokens = sum(p.prompt_tokens for p in plan.prompts) / len(plan.prompts)
        work += spec.fidelity.samples * len(REPLAYED_ROUTES) * FIDELITY_WORK * mean_tokens
    return len(state.arms) * work
