"""How a step is cut into launches on a GPU; every expectation worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_patch.gpu.steps import PREFIX_UNPACKED, plan_runs


def plan(query_lens, seq_lens, short_len=8, scratch_tokens=10_000):
    starts = [0]
    for n in query_lens:
        starts.append(starts[-1] + n)
    return plan_runs(starts, seq_lens, short_len=short_len, scratch_tokens=scratch_tokens)


def shown(runs):
    return [
        (r.route, (r.requests.start, r.requests.stop), (r.rows.start, r.rows.stop), r.counts)
        for r in runs
    ]


def test_a_batch_of_decodes_is_one_run():
    runs = plan([1, 1, 1], [900, 33, 1])
    assert shown(runs) == [("decode", (0, 3), (0, 3), True)]
    assert runs[0].seq_lens == (900, 33, 1)


def test_a_prompt_of_one_token_is_a_decode_as_a_captured_graph_makes_it():
    assert [run.route for run in plan([1], [1])] == ["decode"]


def test_a_mixed_step_is_cut_where_the_route_changes():
    runs = plan([1, 1, 3, 40, 4096, 100], [70, 80, 503, 40, 8192, 4196])
    assert shown(runs) == [
        ("decode", (0, 2), (0, 2), True),
        ("prefix", (2, 3), (2, 5), True),
        ("first_chunk", (3, 4), (5, 45), True),
        ("prefix_unpacked", (4, 5), (45, 4141), True),
        ("prefix_unpacked", (5, 6), (4141, 4241), False),  # 8192 + 4196 exceed the scratch
    ]


def test_neighbours_share_the_scratch_while_it_holds_them():
    runs = plan([100, 100, 100], [4000, 5000, 1001], scratch_tokens=10_000)
    assert shown(runs) == [
        ("prefix_unpacked", (0, 2), (0, 200), True),
        ("prefix_unpacked", (2, 3), (200, 300), False),
    ]
    assert runs[0].query_lens == (100, 100)
    assert runs[0].num_tokens == 200


def test_short_chunks_share_a_launch_only_when_equally_long():
    assert shown(plan([4, 4, 3], [50, 60, 70])) == [
        ("prefix", (0, 2), (0, 8), True),
        ("prefix", (2, 3), (8, 11), False),
    ]


@pytest.mark.parametrize(("length", "route"), [(8, "prefix"), (9, "prefix_unpacked")])
def test_the_longest_chunk_that_is_read_from_the_pages(length, route):
    assert [run.route for run in plan([length], [500])] == [route]


def test_a_chunk_without_history_is_a_first_chunk_however_short():
    assert [run.route for run in plan([2], [2])] == ["first_chunk"]


def test_padding_is_left_out_and_parts_neighbours():
    runs = plan([1, 0, 1, 0], [70, 0, 80, 0])
    assert shown(runs) == [("decode", (0, 1), (0, 1), True), ("decode", (2, 3), (1, 2), False)]
    assert plan([0], [0]) == ()


def test_a_query_longer_than_its_sequence_is_refused():
    with pytest.raises(ValueError, match="request 1 of the step has 5 query tokens in a sequence"):
        plan([1, 5], [3, 4])


def test_a_sequence_that_the_scratch_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="request 0 has 10001 tokens, the scratch holds 10000"):
        plan([100], [10_001])


@given(
    batch=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), max_size=12),
    short_len=st.integers(1, 8),
)
def test_any_step_is_cut_without_gap_or_overlap_and_counted_once_a_route(batch, short_len):
    """(query tokens, history) of each request; the scratch holds the longest sequence, no more."""
    query_lens = [q for q, _ in batch]
    seq_lens = [q + history for q, history in batch]
    longest = max(seq_lens, default=0)
    runs = plan(query_lens, seq_lens, short_len=short_len, scratch_tokens=longest)
    members = [r for run in runs for r in range(run.requests.start, run.requests.stop)]
    assert members == [r for r, q in enumerate(query_lens) if q]
    token = 0
    for run in runs:
        assert run.rows.start == token
        assert run.num_tokens == sum(run.query_lens)
        assert run.query_lens == tuple(query_lens[run.requests])
        assert run.seq_lens == tuple(seq_lens[run.requests])
        token = run.rows.stop
        if run.route == "prefix":
            assert len(set(run.query_lens)) == 1
            assert 2 <= run.query_lens[0] <= short_len
        if run.route == PREFIX_UNPACKED:
            assert sum(run.seq_lens) <= longest
    assert token == sum(query_lens)
    routes = [run.route for run in runs]
    assert [run.counts for run in runs] == [r not in routes[:i] for i, r in enumerate(routes)]
