"""The checker passes what is right, and fails what is wrong in each of the known ways."""

import numpy as np
import pytest

from kernels_patch import check, native
from kernels_patch.check import Case

CASE = Case("case", 4, 2, 32, 64, ((1, 300), (9, 140)))


class Altered:
    """The native kernels with one function replaced."""

    def __init__(self, **replaced):
        for name in ("write_kv", "first_chunk", "prefix", "decode"):
            setattr(self, name, replaced.get(name, getattr(native.load(), name)))


def check_all(implementation):
    return list(check.check_case(implementation, check.make_batch(CASE)))


def test_the_native_kernels_pass():
    assert all(result.passed for result in check_all(Altered()))


def test_a_writer_that_moves_one_byte_fails():
    def write_kv(key, value, kv_cache, slots):
        native.load().write_kv(key, value, kv_cache, slots)
        kv_cache.flatten()[12345] += 1

    results = check_all(Altered(write_kv=write_kv))
    assert not any(result.same_bytes for result in results)
    assert not any(result.passed for result in results)


def test_a_decode_that_leaves_out_the_last_token_fails():
    def decode(query, kv_cache, block_table, seq_lens, sm_scale, out):
        native.load().decode(query, kv_cache, block_table, seq_lens - 1, sm_scale, out)

    prefix, decode_result, _ = check_all(Altered(decode=decode))
    assert prefix.passed
    assert decode_result.median_error > check.MEDIAN_BOUND
    assert not decode_result.passed


def test_a_prefix_that_shows_a_query_the_future_fails():
    def prefix(query, kv_cache, block_table, query_start_loc, seq_lens, sm_scale, out):
        for request in range(len(seq_lens)):
            for row in range(query_start_loc[request], query_start_loc[request + 1]):
                one = slice(row, row + 1)
                table, length = block_table[request : request + 1], seq_lens[request : request + 1]
                native.load().decode(query[one], kv_cache, table, length, sm_scale, out[one])

    assert not check_all(Altered(prefix=prefix))[0].passed


def test_a_first_chunk_whose_first_token_sees_the_others_fails():
    def first_chunk(query, key, value, query_start_loc, sm_scale, out):
        native.load().first_chunk(query, key, value, query_start_loc, sm_scale, out)
        out[0] = value.mean(dim=0).repeat_interleave(2, dim=0)

    prefix, decode, first = check_all(Altered(first_chunk=first_chunk))
    assert prefix.passed
    assert decode.passed
    assert not first.passed


def test_an_output_of_nan_fails():
    results = check_all(Altered(decode=lambda *arguments: None))
    assert np.isnan(results[1].worst_error)
    assert not results[1].passed


def test_groups_of_another_size_fail():
    def decode(*arguments):
        native.load().decode(*arguments, group=64)

    assert not check_all(Altered(decode=decode))[1].passed


def test_every_shipped_case_has_a_name_of_its_own_and_the_quick_ones_are_among_them():
    names = [case.name for case in check.list_cases()]
    assert len(names) == len(set(names))
    assert {case.name for case in check.list_cases(quick=True)} < set(names)


def test_the_error_budget_separates_the_roundings():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=s) for s in ((4, 4, 64), (256, 2, 64), (256, 2, 64)))
    budget = check.compute_error_budget(*(x.astype(np.float32) for x in (q, k, v)), 0.125)
    assert set(budget) == {"q", "k", "v", "w", "all"}
    # Independent roundings add in squares.
    parts = sum(budget[name] ** 2 for name in "qkvw") ** 0.5
    assert budget["all"] == pytest.approx(parts, rel=0.15)
    assert 0.001 < budget["w"] < budget["all"] < 0.03
