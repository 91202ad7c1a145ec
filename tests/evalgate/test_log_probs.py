"""Gaps, agreement and divergence, worked out by hand; and what may never pass as agreement."""

from __future__ import annotations

import math

import pytest

from evalgate.errors import EvidenceError
from evalgate.log_probs import Trace, build_trace, compute_fidelity, split_by_position

BASELINE = Trace(
    indices=[1, 2, 3, 4],
    log_probs=[-0.1, -0.2, -0.3, -0.4],
    top1=[7, 8, 9, 10],
    margins=[2.0, 1.5, 0.25, 3.0],
)


def make_arm(log_probs, top1):
    return Trace([1, 2, 3, 4], log_probs, top1, [1.0] * 4)


def test_an_arm_equal_to_the_baseline_has_no_gap_and_no_divergence():
    found = compute_fidelity(BASELINE, BASELINE)
    assert (found.positions, found.mean_gap, found.p99_gap, found.worst_gap) == (4, 0, 0, 0)
    assert found.top1_agreement == 1
    assert found.first_divergence is None
    assert found.margin_at_divergence is None
    assert found.worst_margin is None


def test_gaps_are_absolute_and_the_change_keeps_its_sign():
    # Changes: +0.1, -0.2, 0, -0.5.
    found = compute_fidelity(BASELINE, make_arm([0.0, -0.4, -0.3, -0.9], [7, 8, 9, 10]))
    assert found.mean_gap == pytest.approx(0.2)
    assert found.worst_gap == pytest.approx(0.5)
    assert found.mean_change == pytest.approx(-0.15)
    # Sorted gaps 0, 0.1, 0.2, 0.5: rank 0.99 * 3 = 2.97 lies 0.97 of the way from 0.2 to 0.5.
    assert found.p99_gap == pytest.approx(0.2 + 0.97 * 0.3)


def test_divergence_is_told_with_the_baselines_margin_there():
    found = compute_fidelity(BASELINE, make_arm(BASELINE.log_probs, [7, 8, 99, 99]))
    assert found.top1_agreement == 0.5
    assert found.first_divergence == 3
    assert found.margin_at_divergence == 0.25  # a near tie ...
    assert found.worst_margin == 3.0  # ... but a later flip is none


@pytest.mark.parametrize(
    "arm",
    [
        Trace([], [], [], []),
        Trace([1, 2, 3], [0.0] * 3, [7, 8, 9], [1.0] * 3),
        Trace([2, 3, 4, 5], [0.0] * 4, [7, 8, 9, 10], [1.0] * 4),
    ],
)
def test_traces_of_other_positions_are_not_compared(arm):
    with pytest.raises(EvidenceError, match="replay the same text in both"):
        compute_fidelity(BASELINE, arm)


def test_nothing_is_no_agreement():
    nothing = Trace([], [], [], [])
    with pytest.raises(EvidenceError, match="0 and 0 positions"):
        compute_fidelity(nothing, nothing)


def test_a_trace_takes_the_most_likely_token_and_its_lead():
    trace = build_trace([1, 2], [5, 6], [{5: -1.0, 3: -0.5}, {6: -3.0, 4: -1.25, 9: -1.0}])
    assert trace == Trace([1, 2], [-1.0, -3.0], [3, 9], [0.5, 0.25])


def test_of_two_equally_likely_tokens_the_lower_id_is_first_in_every_arm():
    one = build_trace([0], [5], [{8: -1.0, 5: -1.0}])
    other = build_trace([0], [5], [{5: -1.0, 8: -1.0}])
    assert one == other == Trace([0], [-1.0], [5], [0.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_an_error_and_never_agreement(value):
    with pytest.raises(EvidenceError, match=f"output position 4: a log-probability is {value}"):
        build_trace([3, 4], [5, 5], [{5: -1.0, 3: -0.5}, {5: -1.0, 3: value}])


@pytest.mark.parametrize("options", [{5: -1.0}, {3: -0.5, 4: -1.0}, {}])
def test_a_position_without_the_forced_token_or_a_second_one_is_an_error(options):
    with pytest.raises(EvidenceError, match=r"output position 2: .* token 5"):
        build_trace([2], [5], [options])


def test_positions_split_where_outputs_get_longer():
    indices = [1, 15, 16, 63, 64, 256, 2000]
    trace = Trace(indices, [-float(i) for i in indices], indices, [1.0] * 7)
    pieces = split_by_position(trace)
    assert {name: piece.indices for name, piece in pieces.items()} == {
        "0-15": [1, 15],
        "16-63": [16, 63],
        "64-255": [64],
        "256-1023": [256],
        "1024-": [2000],
    }
    assert pieces["16-63"].log_probs == [-16.0, -63.0]
    assert split_by_position(Trace([70], [0.0], [1], [0.0])).keys() == {"64-255"}
