"""The faults that are planted are caught, and a gate that misses one is told."""

from __future__ import annotations

import json

import pytest

from evalgate import faults, selftest
from evalgate.faults import FAULTS, STREAM_FAULTS, Fault, StreamFault
from evalgate.selftest import (
    POLICY,
    Finding,
    check_fault,
    check_stream,
    compute_exit_code,
    render_json,
    render_text,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    found = check_fault(fault, POLICY)
    assert found.caught, found.answer


@pytest.mark.parametrize("fault", STREAM_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_stream_is_no_answer(fault: StreamFault) -> None:
    found = check_stream(fault)
    assert found.caught, found.answer


def test_a_right_answer_for_another_reason_is_not_caught() -> None:
    (died,) = [f for f in FAULTS if f.name == "a server that died"]
    assert not check_fault(Fault("x", died.plant, "invalid", "prefix cache"), POLICY).caught
    assert not check_fault(Fault("x", died.plant, "fail"), POLICY).caught
    sound = check_stream(StreamFault("x", faults._CHUNK + faults._END, "truncated"))
    assert sound == Finding("x", False, "taken for an answer")


def test_a_gate_that_lets_everything_pass_is_told_by_every_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blind = selftest.judge_run

    def judge_blindly(stored, policy, calibration):
        verdict = blind(stored, policy, calibration)
        return type(verdict)("pass", [], [], [], [], {})

    monkeypatch.setattr(selftest, "judge_run", judge_blindly)
    found = [check_fault(fault, POLICY) for fault in FAULTS if fault.status != "refused"]
    assert [f.caught for f in found] == [True] + [False] * (len(found) - 1)
    text = render_text(found)
    assert text.startswith("right   nothing: the sound run itself")
    assert text.endswith(f"{len(found) - 1} not caught")
    assert text.count("MISSED  ") == len(found) - 1
    assert compute_exit_code(found) == json.loads(render_json(found))["exit_code"] == 1


def test_when_all_is_caught_the_exit_code_is_0() -> None:
    found = [Finding("sound", True, "pass"), Finding("a", True, "invalid: x")]
    assert compute_exit_code(found) == 0
    assert render_text(found).endswith("all 1 faults are caught")
