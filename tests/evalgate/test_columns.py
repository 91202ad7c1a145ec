"""Requests as arrays: what stands in a row, which times cannot be right, keys as numbers."""

import numpy as np
import pytest
from factories import make_request

from evalgate import columns
from evalgate.columns import (
    TimeFault,
    number,
    number_by_appearance,
    number_fields,
    number_keys,
    number_together,
    tabulate,
)

NS = 10**9


def find_fault(**changes):
    """The fault of one request between two sound ones."""
    records = [make_request(), make_request(**changes), make_request()]
    before, found, after = tabulate(records)[1].time_fault
    assert (before, after) == (TimeFault.NONE, TimeFault.NONE)
    return TimeFault(found)


def test_a_row_holds_what_the_record_holds():
    record = make_request(
        chunk_ns=[NS, 3 * NS, 5 * NS], end_ns=6 * NS, output_tokens=5, cached_tokens=7
    )
    values, facts = tabulate([make_request(output_tokens=0), record])
    row = [a[1] for a in (values.ttft_s, values.tpot_s, values.e2el_s, values.output_tokens)]
    assert row == [1.0, 1.0, 5.0, 5.0]  # TPOT: 4 s for the 4 tokens after the first
    assert row == [record.ttft_s, record.tpot_s, record.e2el_s, record.output_tokens]
    assert (facts.prompt_tokens[1], facts.cached_tokens[1], facts.output_tokens[1]) == (
        10_000,
        7,
        5,
    )
    assert not facts.failed[1]


def test_what_is_unknown_is_absent_and_what_is_nothing_is_not():
    records = [
        make_request(output_tokens=None, prompt_tokens=None, finish_reason=None, chunk_ns=[NS]),
        make_request(output_tokens=0, finish_reason="length", cached_tokens=0),
        make_request(error="timeout"),
    ]
    values, facts = tabulate(records)
    np.testing.assert_array_equal(facts.output_tokens, [np.nan, 0, np.nan])
    np.testing.assert_array_equal(facts.prompt_tokens, [np.nan, 10_000, 10_000])
    np.testing.assert_array_equal(facts.is_cut, [np.nan, 1, np.nan])
    np.testing.assert_array_equal(facts.failed, [False, False, True])
    np.testing.assert_array_equal(values.ttft_s, [1, np.nan, np.nan])
    assert np.isnan(values.output_tokens).all()


def test_a_request_that_failed_after_its_first_chunks_has_no_latency_and_no_fault():
    values, facts = tabulate([make_request(chunk_ns=[30, 10], output_tokens=2, error="truncated")])
    assert np.isnan(values.ttft_s).all()
    assert facts.time_fault.tolist() == [TimeFault.NONE]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, TimeFault.NONE),
        ({"chunk_ns": []}, TimeFault.NO_CHUNK),
        ({"chunk_ns": [], "output_tokens": 0}, TimeFault.NONE),
        ({"chunk_ns": [], "output_tokens": None}, TimeFault.NONE),
        ({"chunk_ns": [0, 10], "end_ns": 10}, TimeFault.NOT_AFTER_SENDING),
        ({"chunk_ns": [-5]}, TimeFault.NOT_AFTER_SENDING),
        ({"chunk_ns": [10, 30, 20], "end_ns": 40}, TimeFault.BACKWARDS),
        ({"chunk_ns": [10, 30, 20], "end_ns": 15}, TimeFault.BACKWARDS),  # the first that holds
        ({"chunk_ns": [10, 10, 20], "end_ns": 40}, TimeFault.NONE),
        ({"chunk_ns": [10, 10], "end_ns": 40}, TimeFault.NO_TIME),
        ({"chunk_ns": [10], "end_ns": 40}, TimeFault.NONE),
        ({"chunk_ns": [10, 20], "end_ns": 19}, TimeFault.ENDED_BEFORE),
        ({"chunk_ns": [10, 20], "end_ns": 20}, TimeFault.NONE),
        ({"chunk_ns": [10, 20], "end_ns": None}, TimeFault.NONE),
        ({"chunk_ns": [10, 20], "end_ns": 10**30}, TimeFault.NONE),
        ({"chunk_ns": [10, 20], "end_ns": -(10**30)}, TimeFault.ENDED_BEFORE),
        ({"chunk_ns": [2**53, 2**53 + 1], "end_ns": 2**53}, TimeFault.ENDED_BEFORE),  # exactly
    ],
)
def test_times_that_cannot_be_right_are_told_from_those_that_can(changes, fault):
    assert find_fault(**changes) == fault


def test_no_requests_are_no_rows():
    values, facts = tabulate([])
    assert (len(values.ttft_s), len(facts.failed)) == (0, 0)
    assert number_keys([number_fields([]), number_fields([])]).n == 0


def test_values_are_numbered_in_order_and_together():
    one, two = number(["b", "a", "b"]), number(["c", "b"])
    assert (one.distinct, one.place.tolist()) == (["a", "b"], [1, 0, 1])
    one, two = number_together([one, two])
    assert one.distinct == ["a", "b", "c"]
    assert (one.place.tolist(), two.place.tolist()) == ([1, 0, 1], [2, 1])
    assert two.find("b").tolist() == [False, True]
    assert two.find("z").tolist() == [False, False]


def test_numbers_by_appearance_start_with_the_first_that_appears():
    first, numbers = number_by_appearance(np.array([7, 3, 7, 9, 3]))
    assert (first.tolist(), numbers.tolist()) == ([0, 1, 3], [0, 1, 0, 2, 1])


@pytest.mark.parametrize("limit", [columns.MAX_INT64, 3])
def test_key_numbers_sort_as_the_keys_do(monkeypatch, limit):
    # With the small limit the numbers are packed together after each field.
    monkeypatch.setattr(columns, "MAX_INT64", limit)
    rng = np.random.default_rng(0)
    sides = [
        [
            make_request(
                block=int(block), bucket=f"b{bucket}", prompt_id=f"p{prompt}", repetition=int(rep)
            )
            for block, bucket, prompt, rep in rng.integers(0, 12, (60, 4))
        ]
        for _ in range(2)
    ]
    keys = number_keys([number_fields(side) for side in sides])
    every = sorted({r.key for side in sides for r in side})
    assert keys.n == len(every)
    for side, codes in zip(sides, keys.code, strict=True):
        assert [every[code] for code in codes] == [r.key for r in side]
