"""Formulas against values worked out by hand (cases S1, S4, G3, G4, G6 and the source vectors)."""

import math

import numpy as np
import pytest

from evalgate import metrics

S = 1_000_000_000


def ns(*seconds: float) -> list[int]:
    return [round(s * S) for s in seconds]


def test_ttft_and_tpot_count_chunks_that_carried_tokens():
    chunks = ns(2.20, 2.22, 2.24)  # a role-only delta at 0.90 s is not among them
    assert metrics.compute_ttft_s(chunks) == pytest.approx(2.20)
    assert metrics.compute_tpot_s(chunks, 3) == pytest.approx(0.020)


def test_a_usage_only_chunk_does_not_stretch_tpot():
    assert metrics.compute_tpot_s(ns(1.00, 1.05), 2) == pytest.approx(0.05)


def test_tpot_is_absent_below_two_tokens_or_without_a_count():
    assert metrics.compute_tpot_s(ns(1.0), 1) is None
    assert metrics.compute_tpot_s(ns(1.0, 1.1), None) is None
    assert metrics.compute_tpot_s([], 5) is None


def test_nothing_streamed_has_no_latency():
    assert metrics.compute_ttft_s([]) is None
    assert metrics.compute_e2el_s([]) is None


def test_mean_of_requests_and_gap_weighted_tpot_are_different_numbers():
    first = metrics.compute_tpot_s(ns(0.1, 1.1), 11)
    second = metrics.compute_tpot_s(ns(0.1, 2.1), 101)
    assert (first + second) / 2 == pytest.approx(0.06)
    assert pytest.approx(0.02727, abs=1e-5) == (1.0 + 2.0) / (10 + 100)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([1, 2, 3, 4], 50, 2.5), ([1, 2, 3, 4], 99, 3.97), (range(1, 11), 90, 9.1), ([10], 99, 10)],
)
def test_percentiles_interpolate_linearly(values, percent, expected):
    assert metrics.compute_percentiles(list(values), [percent]) == [pytest.approx(expected)]


def test_percentile_of_nothing_is_absent():
    assert metrics.compute_percentiles([], [50, 99]) == [None, None]


def test_throughput_is_tokens_over_seconds():
    def compute(tokens, seconds):
        return metrics.compute_throughput(np.array(tokens, float), np.array(seconds, float))

    assert compute([128], [1.5441598830]) == pytest.approx(82.893, abs=5e-4)
    assert compute([10, 20], [1.0, 2.0]) == pytest.approx(10)
    assert compute([10, math.nan, 9], [1.0, 2.0, math.nan]) == pytest.approx(10)
    assert compute([], []) is None
    assert compute([5], [0.0]) is None


def test_weighted_throughput_of_the_source():
    weights = [0.20, 0.50, 0.30]
    before = metrics.compute_weighted([12.400507, 11.574609, 10.174793], weights)
    after = metrics.compute_weighted([12.606487, 12.319985, 11.403174], weights)
    assert before == pytest.approx(11.319844, abs=1e-6)
    assert after == pytest.approx(12.102242, abs=1e-6)
    assert (after / before - 1) * 100 == pytest.approx(6.91, abs=5e-3)


def test_weighted_value_is_absent_when_a_bucket_is():
    assert metrics.compute_weighted([1.0, None], [0.5, 0.5]) is None


def test_normalised_time_uses_the_given_length():
    absent = math.nan
    rows = [(2.0, 0.1, 11, 3.0), (2.0, absent, 1, 2.0), (2.0, absent, 2, absent),
            (absent, 0.1, 5, absent), (2.0, 0.1, absent, absent)]  # fmt: skip
    ttft_s, tpot_s, tokens, expected = np.array(rows).T
    found = metrics.compute_normalised_s(ttft_s, tpot_s, tokens)
    np.testing.assert_allclose(found, expected)


def test_latencies_of_many_requests_are_those_of_each():
    chunks = [[2_200_000_000, 2_220_000_000, 2_240_000_000], [900_000_000], [5, 5], []]
    tokens = [3, 1, 2, None]
    ends = np.array([[c[0], c[-1]] if c else [math.nan] * 2 for c in chunks]).T
    found = metrics.compute_latencies_s(*ends, np.array(tokens, dtype=float))
    each = [
        (metrics.compute_ttft_s(c), metrics.compute_tpot_s(c, n) or None, metrics.compute_e2el_s(c))
        for c, n in zip(chunks, tokens, strict=True)
    ]
    # The third has no time between its tokens, which has no logarithm: absent here.
    np.testing.assert_allclose(np.array(found).T, np.array(each, dtype=float))
    assert found[1][0] == pytest.approx(0.020)
