"""Texts replayed against a toy model on a real socket that counts its routes as it runs them."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import pytest
from stub_server import Answer, StubServer

from evalgate.client import Client
from evalgate.errors import ServerAnswerError
from evalgate.fidelity import Prompt, Setup, build_reference, measure_arm, measure_fidelity
from evalgate.records import FidelityRecord, parse_json, parse_record, render_record
from evalgate.replay import (
    FORCING_FOLDER,
    Text,
    build_launch_additions,
    compute_expected_tokens,
    read_counted_tokens,
    select_indices,
)

CHUNK = 8
RPC = "route_report"
END = 0


class ToyModel(StubServer):
    """After token t the tokens t+1, t+2, t+3 have log-probability -0.5, -1.5, -2.5.

    Token 20 is followed by the end. ``shift`` is added to the log-probability of t+1 from position
    ``shift_from`` of the sequence on: below -1 another token becomes the most likely one.
    """

    def __init__(self, **faults: Any) -> None:
        super().__init__(reply=self._complete)
        self.shift: float = faults.get("shift", 0.0)
        self.shift_from: int = faults.get("shift_from", 0)
        self.forces: bool = faults.get("forces", True)
        self.falls_back: bool = faults.get("falls_back", False)
        self.cached: int = faults.get("cached", 0)
        self.counted: Counter[str] = Counter()
        self.rpc[RPC] = [{"tokens": {}}]

    def say(self, token: int, position: int) -> dict[int, float]:
        """Log-probabilities of what follows ``token`` at ``position``."""
        shift = self.shift if position >= self.shift_from else 0.0
        first = END if token == 20 else token + 1
        return {first: -0.5 + shift, token + 2: -1.5, token + 3: -2.5}

    def count(self, read: int, steps: int) -> None:
        """One engine step after the other, as a scheduler with chunks of 8 would run them."""
        position = 0
        while position < read:
            length = min(CHUNK, read - position)
            route = "decode" if length == 1 else "prefix" if position else "first_chunk"
            if self.falls_back and route != "first_chunk":
                route = "fallback"
            self.counted[route] += length
            position += length
        for _ in range(steps):
            self.counted["decode"] += 1
        self.rpc[RPC] = [{"tokens": dict(self.counted)}]

    def _complete(self, body: dict[str, Any]) -> Answer:
        prompt, output, top = list(body["prompt"]), [], []
        forced = (body.get("vllm_xargs") or {}).get("forced_token_ids", [])
        while len(output) < body["max_tokens"]:
            sequence = prompt + output
            options = self.say(sequence[-1], len(sequence) - 1)
            token = max(options, key=options.__getitem__)
            if self.forces and len(output) < len(forced):
                token = forced[len(output)]
            output.append(token)
            best = sorted(options, key=options.__getitem__)[-body.get("logprobs", 0) :]
            kept = {token, *best}
            top.append({f"token_id:{t}": options.get(t, -9.0) for t in kept})
            if token == END and not body.get("ignore_eos"):
                break
        self.count(len(prompt), len(output) - 1)
        choice: dict[str, Any] = {"token_ids": output, "logprobs": {"top_logprobs": top}}
        if "prompt_logprobs" in body:
            pairs = pairwise(prompt)
            choice["prompt_logprobs"] = [None] + [
                {str(t): {"logprob": v} for t, v in {after: -9.0, **self.say(t0, i)}.items()}
                for i, (t0, after) in enumerate(pairs)
            ]
        usage = {"prompt_tokens_details": {"cached_tokens": self.cached}}
        answer = json.dumps({"choices": [choice], "usage": usage})
        return Answer([answer.encode()], content_type="application/json")


@contextmanager
def serving(**models: ToyModel) -> Iterator[dict[str, Client]]:
    with ExitStack() as stack:
        yield {
            arm: stack.enter_context(Client(stack.enter_context(model).base_url, model.model))
            for arm, model in models.items()
        }


def make_setup(tokens: int = 5, counting: Sequence[str] = ()) -> Setup:
    return Setup(
        block=0,
        tokens=tokens,
        chunk_tokens=CHUNK,
        salt=lambda arm, what: f"{arm}/{what}",
        report_rpcs=dict.fromkeys(counting, RPC),
    )


def measure(
    prompt_ids: Sequence[int] = range(1, 7), tokens: int = 5, **models: ToyModel
) -> dict[tuple[str, str], FidelityRecord]:
    """Records of one prompt by (arm, route); every arm but the baseline counts its routes."""
    counting = [arm for arm in models if arm != "baseline"]
    with serving(**models) as arms:
        records = list(
            measure_fidelity(arms, [Prompt("t0", prompt_ids)], make_setup(tokens, counting))
        )
    return {(r.arm, r.route): r for r in records}


def test_the_baseline_measured_against_itself_is_the_yardstick_of_zero():
    records = measure(baseline=ToyModel())
    assert records.keys() == {("baseline", "decode"), ("baseline", "prefix")}
    for record in records.values():
        assert record.error is None
        assert (record.mean_gap, record.worst_gap, record.top1_agreement) == (0, 0, 1)


def test_each_route_holds_the_positions_that_it_makes():
    # Prompt 1..6, output 7..11. Decode makes output tokens 1..4. In one prompt of 11 tokens the
    # first chunk reads sequence positions 0..7 and so makes tokens up to position 8; output tokens
    # 3 and 4, at positions 9 and 10, are made by the chunk with history.
    records = measure(baseline=ToyModel(), candidate=ToyModel())
    assert records["candidate", "decode"].positions == 4
    assert records["candidate", "prefix"].positions == 2
    assert list(records["candidate", "prefix"].extra["buckets"]) == ["0-15"]
    assert records["candidate", "decode"].prompt_tokens == 6


def test_a_change_is_seen_in_both_routes():
    # Output token i is made at sequence position 5 + i: from position 9 on, only i = 4 is shifted.
    records = measure(baseline=ToyModel(), candidate=ToyModel(shift=-1.2, shift_from=9))
    decode, prefix = records["candidate", "decode"], records["candidate", "prefix"]
    assert decode.mean_gap == pytest.approx(1.2 / 4)
    assert prefix.mean_gap == pytest.approx(1.2 / 2)
    assert decode.worst_gap == prefix.worst_gap == pytest.approx(1.2)
    assert decode.top1_agreement == 0.75
    assert prefix.top1_agreement == 0.5
    assert decode.first_divergence == prefix.first_divergence == 4
    assert decode.margin_at_divergence == pytest.approx(1.0)
    assert decode.extra["mean_change"] == pytest.approx(-1.2 / 4)
    assert records["baseline", "decode"].mean_gap == 0


def test_the_counters_of_an_arm_are_kept_as_proof():
    records = measure(baseline=ToyModel(), candidate=ToyModel())
    assert records["candidate", "decode"].extra["tokens_by_route"] == {
        "first_chunk": 6,
        "decode": 4,
    }
    assert records["candidate", "prefix"].extra["tokens_by_route"] == {
        "first_chunk": 8,
        "prefix": 3,
    }
    assert "tokens_by_route" not in records["baseline", "decode"].extra


def test_a_fallback_gives_an_error_and_no_agreement():
    record = measure(baseline=ToyModel(), candidate=ToyModel(falls_back=True))[
        "candidate", "prefix"
    ]
    assert record.error.category == "scoring"
    assert "counted fallback 3, first_chunk 8 tokens" in record.error.message
    assert "needs first_chunk 8, prefix 3" in record.error.message
    assert (record.positions, record.mean_gap, record.top1_agreement) == (0, None, None)
    assert record.extra["tokens_by_route"] == {"first_chunk": 8, "fallback": 3}


def test_a_server_that_forces_nothing_is_told_from_one_that_agrees():
    # Shifted from position 7 on, it goes its own way after the first two output tokens, 7 and 8.
    arm = ToyModel(forces=False, shift=-1.2, shift_from=7)
    record = measure(baseline=ToyModel(), candidate=arm)["candidate", "decode"]
    assert record.error.category == "http"
    assert "the first 2 of them as given" in record.error.message
    assert "--logits-processors evalgate_forced_tokens:ForcedTokens" in record.error.message


def test_a_value_that_is_no_number_is_an_error():
    records = measure(baseline=ToyModel(), candidate=ToyModel(shift=math.nan))
    for route in ("decode", "prefix"):
        assert records["candidate", route].error.category == "scoring"
        assert "a log-probability is nan" in records["candidate", route].error.message
        assert records["candidate", route].top1_agreement is None


def test_a_baseline_that_fails_leaves_an_error_for_every_arm_and_route():
    records = measure(baseline=ToyModel(cached=4), candidate=ToyModel())
    assert len(records) == 4
    for record in records.values():
        assert record.error.message.startswith("no reference from the baseline: 4 prompt tokens")
        assert record.positions == 0


def test_an_arm_that_is_gone_leaves_an_error_of_its_own():
    with serving(baseline=ToyModel()) as arms:
        reference = build_reference(arms["baseline"], Prompt("t0", [1, 2, 3]), make_setup(8))
        with StubServer() as gone:
            address = gone.base_url
        with Client(address, "stub") as client:
            (decode, prefix) = measure_arm("candidate", client, reference, make_setup(8))
    for record in (decode, prefix):
        assert record.error.category == "connect"
        assert address in record.error.message


def test_a_text_inside_the_first_chunk_has_no_prefix_record():
    assert measure(range(1, 4), tokens=5, baseline=ToyModel()).keys() == {("baseline", "decode")}


def test_an_output_of_one_token_has_no_decode_record():
    # Token 20 is followed by the end at once; the prompt's 12 tokens leave it to a prefix chunk.
    records = measure(range(9, 21), baseline=ToyModel())
    assert records.keys() == {("baseline", "prefix")}
    assert records["baseline", "prefix"].positions == 1


def test_the_end_token_is_forced_too_and_does_not_stop_the_replay():
    record = measure(range(10, 19), tokens=9, baseline=ToyModel())["baseline", "decode"]
    assert record.error is None
    assert record.extra["output_tokens"] == 3  # 19, 20 and the end


def test_no_two_requests_share_a_cache_salt():
    baseline, candidate = ToyModel(), ToyModel()
    measure(baseline=baseline, candidate=candidate)
    salts = [
        body["cache_salt"]
        for model in (baseline, candidate)
        for path, body, _ in model.requests
        if path == "/v1/completions"
    ]
    assert len(salts) == len(set(salts)) == 6
    # vLLM refuses any other salt: none of @ / \ NUL, at most 128 characters.
    assert all(re.fullmatch(r"[\w-]{1,128}", salt) for salt in salts)


def test_a_record_survives_its_line_of_json():
    record = measure(baseline=ToyModel(), candidate=ToyModel(shift=-1.2))["candidate", "decode"]
    line = render_record(record)
    assert parse_record(FidelityRecord, parse_json(line, "line 1"), "line 1") == record


@pytest.mark.parametrize(
    ("route", "prompt", "output", "expected"),
    [
        ("decode", 6, 5, [1, 2, 3, 4]),
        ("decode", 6, 1, []),
        ("prefix", 6, 5, [3, 4]),
        ("prefix", 8, 3, [1, 2]),  # the first chunk's last token makes output token 0
        ("prefix", 9, 3, [0, 1, 2]),
        ("prefix", 2, 5, []),
    ],
)
def test_positions_by_route(route, prompt, output, expected):
    assert select_indices(route, Text(range(prompt), range(output)), CHUNK) == expected


@pytest.mark.parametrize(
    ("route", "prompt", "output", "expected"),
    [
        ("decode", 6, 5, {"first_chunk": 6, "decode": 4}),
        ("decode", 20, 5, {"first_chunk": 8, "prefix": 12, "decode": 4}),
        ("decode", 17, 5, {"first_chunk": 8, "prefix": 8, "decode": 5}),  # a last chunk of one
        ("decode", 1, 5, {"decode": 5}),
        ("prefix", 6, 5, {"first_chunk": 8, "prefix": 3}),
        ("prefix", 6, 3, {"first_chunk": 8, "decode": 1}),
        ("prefix", 2, 3, {"first_chunk": 5}),
    ],
)
def test_tokens_that_a_replay_costs(route, prompt, output, expected):
    text = Text(range(prompt), range(output))
    assert compute_expected_tokens(route, text, CHUNK) == Counter(expected)


def test_counters_that_cannot_be_read_are_an_error():
    with serving(baseline=ToyModel()) as arms:
        arms["baseline"].call_rpc(RPC)
        with pytest.raises(ServerAnswerError, match="HTTP 404"):
            read_counted_tokens(arms["baseline"], "no_such_report")


def test_a_launch_gets_the_processor_and_keeps_its_own_path():
    args, env = build_launch_additions({"PYTHONPATH": "/mine"})
    assert args[:2] == ["--logits-processors", "evalgate_forced_tokens:ForcedTokens"]
    assert env == {"PYTHONPATH": os.pathsep.join([str(FORCING_FOLDER), "/mine"])}
    assert build_launch_additions({})[1] == {"PYTHONPATH": str(FORCING_FOLDER)}
    assert (FORCING_FOLDER / "evalgate_forced_tokens.py").is_file()
