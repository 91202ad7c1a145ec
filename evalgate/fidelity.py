"""Token fidelity: the baseline's own output replayed in every arm, and how far the arms lie apart.

The baseline answers a prompt once, greedily, with log-probabilities: that is the reference. Every
arm then replays the text through decode and apart from that through prefix chunks; the baseline
too, and its second pass is the yardstick: what one arm differs from itself. An arm that counts its
routes must have run exactly the tokens of the replay on them, else the record is an error.

Knows the order of requests and the record. How a route is asked for is in ``replay``, the numbers
in ``log_probs``; what a gap means is judged elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evalgate.client import Client
from evalgate.errors import EvalgateError, EvidenceError, ServerAnswerError, ServerError
from evalgate.log_probs import Fidelity, Trace, compute_fidelity, split_by_position
from evalgate.records import BASELINE, FidelityRecord, TaskError
from evalgate.replay import (
    Text,
    answer_greedily,
    compute_expected_tokens,
    read_counted_tokens,
    replay_text,
    select_indices,
)
from evalgate.routes import DECODE, PREFIX, merge_forms

REPLAYED_ROUTES = (DECODE, PREFIX)
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Prompt:
    """A prompt in token ids to take an output of. ``sample_id`` is its own within a run."""

    sample_id: str
    prompt_ids: Sequence[int]


@dataclass(frozen=True)
class Setup:
    """What holds for all replays of a block.

    tokens        most tokens of an output; prompt + tokens + 1 must fit the server's context
    chunk_tokens  --max-num-batched-tokens of the arms
    salt          (arm, text) to a cache salt; equal salts would let the prefix cache answer
    report_rpcs   arm to the worker call that counts its routes (``spec.Patch.report_rpc``); an arm
                  that is not named counts none
    """

    block: int
    tokens: int
    chunk_tokens: int
    salt: Callable[[str, str], str]
    report_rpcs: Mapping[str, str]
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True)
class Reference:
    """The baseline's output for one prompt and what it said of it, by route; or why there is none.

    A route that makes no position of the output has no trace.
    """

    sample_id: str
    text: Text
    traces: Mapping[str, Trace]
    error: TaskError | None = None


def measure_fidelity(
    arms: Mapping[str, Client], prompts: Sequence[Prompt], setup: Setup
) -> Iterator[FidelityRecord]:
    """Records of every arm, prompt by prompt, as they come; all arms are up, one is the baseline.

    Where one server is up at a time, keep what ``build_reference`` gives while the baseline is up
    and call ``measure_arm`` for each arm in its turn.
    """
    for prompt in prompts:
        reference = build_reference(arms[BASELINE], prompt, setup)
        for arm, client in arms.items():
            yield from measure_arm(arm, client, reference, setup)


def build_reference(client: Client, prompt: Prompt, setup: Setup) -> Reference:
    """Have the baseline answer the prompt, and read its answer again in prefix chunks.

    Never raises for what the server does: see ``Reference.error``.
    """

    def salt(what: str) -> str:
        return setup.salt(BASELINE, f"{prompt.sample_id}/reference/{what}")

    text = Text(prompt.prompt_ids, [])
    traces: dict[str, Trace] = {}
    try:
        text, said = answer_greedily(
            client, prompt.prompt_ids, setup.tokens, salt("answer"), setup.timeout_s
        )
        if select_indices(DECODE, text, setup.chunk_tokens):
            traces[DECODE] = said
        if select_indices(PREFIX, text, setup.chunk_tokens):
            traces[PREFIX] = replay_text(
                client, PREFIX, text, setup.chunk_tokens, salt(PREFIX), setup.timeout_s
            )
    except (ServerError, EvidenceError) as exc:
        return Reference(prompt.sample_id, text, {}, _describe(exc))
    return Reference(prompt.sample_id, text, traces)


def measure_arm(
    arm: str, client: Client, reference: Reference, setup: Setup
) -> Iterator[FidelityRecord]:
    """One record for each route of the reference; for every route when the reference failed.

    A one-token output has no decode record, a text inside the first chunk no prefix record.
    """
    for route in REPLAYED_ROUTES:
        if reference.error is not None:
            message = f"no reference from the baseline: {reference.error.message}"
            error = TaskError(category=reference.error.category, message=message)
            yield _build_record(arm, reference, route, setup, None, error, {})
        elif route in reference.traces:
            yield _measure_route(arm, client, reference, route, setup)


def _measure_route(
    arm: str, client: Client, reference: Reference, route: str, setup: Setup
) -> FidelityRecord:
    extra: dict[str, Any] = {"output_tokens": len(reference.text.output_ids)}
    fidelity = error = None
    try:
        trace = _replay_counted(arm, client, reference, route, setup, extra)
        fidelity = compute_fidelity(reference.traces[route], trace)
        extra |= _build_details(fidelity, reference.traces[route], trace)
    except (ServerError, EvidenceError) as exc:
        error = _describe(exc)
    return _build_record(arm, reference, route, setup, fidelity, error, extra)


def _replay_counted(
    arm: str,
    client: Client,
    reference: Reference,
    route: str,
    setup: Setup,
    extra: dict[str, Any],
) -> Trace:
    """Replay; what the arm counted meanwhile goes into ``extra``.

    Raises EvidenceError when that is not what was asked for.
    """
    salt = setup.salt(arm, f"{reference.sample_id}/{route}")
    args = (client, route, reference.text, setup.chunk_tokens, salt, setup.timeout_s)
    rpc = setup.report_rpcs.get(arm)
    if rpc is None:
        return replay_text(*args)
    before = read_counted_tokens(client, rpc)
    trace = replay_text(*args)
    counted = read_counted_tokens(client, rpc) - before
    expected = compute_expected_tokens(route, reference.text, setup.chunk_tokens)
    extra["tokens_by_route"] = dict(counted)
    if merge_forms(counted) != expected:
        raise EvidenceError(
            f"the {arm} server counted {_list(counted)} tokens where the replay through {route} "
            f"needs {_list(expected)}: see its log for a fallback, and let nobody else ask it"
        )
    return trace


def _build_details(fidelity: Fidelity, baseline: Trace, trace: Trace) -> dict[str, Any]:
    """What the record has no key for: the sign of the change, the widest flip, and the same
    figures by position in the output."""
    pieces = zip(
        split_by_position(baseline).items(), split_by_position(trace).values(), strict=True
    )
    return {
        "mean_change": fidelity.mean_change,
        "worst_margin": fidelity.worst_margin,
        "buckets": {name: asdict(compute_fidelity(own, other)) for (name, own), other in pieces},
    }


def _build_record(
    arm: str,
    reference: Reference,
    route: str,
    setup: Setup,
    fidelity: Fidelity | None,
    error: TaskError | None,
    extra: dict[str, Any],
) -> FidelityRecord:
    return FidelityRecord(
        arm=arm,
        block=setup.block,
        sample_id=reference.sample_id,
        route=route,
        prompt_tokens=len(reference.text.prompt_ids),
        positions=fidelity.positions if fidelity else 0,
        mean_gap=fidelity.mean_gap if fidelity else None,
        p99_gap=fidelity.p99_gap if fidelity else None,
        worst_gap=fidelity.worst_gap if fidelity else None,
        top1_agreement=fidelity.top1_agreement if fidelity else None,
        first_divergence=fidelity.first_divergence if fidelity else None,
        margin_at_divergence=fidelity.margin_at_divergence if fidelity else None,
        error=error,
        extra=extra or None,
    )


def _describe(exc: EvalgateError) -> TaskError:
    """What failed, as a record says it. An answer that cannot be used is ours to explain."""
    if isinstance(exc, ServerAnswerError):
        return TaskError(category="http", message=str(exc))
    category = "connect" if isinstance(exc, ServerError) else "scoring"
    return TaskError(category=category, message=str(exc))


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{route} {n}" for route, n in sorted(counts.items())) or "no"
