import pytest
import torch

from kernels_patch.plan import plan_step, route_of

TABLE = torch.arange(20, dtype=torch.int32).view(4, 5)


@pytest.mark.parametrize(
    ("query_len", "seq_len", "route"),
    [
        (512, 512, "first_chunk"),
        (2, 2, "first_chunk"),
        (1, 1, "decode"),
        (512, 1024, "prefix"),
        (2, 3, "prefix"),
        (1, 2, "decode"),
        (1, 513, "decode"),
    ],
)
def test_history_and_chunk_length_decide_the_route(query_len, seq_len, route):
    assert route_of(query_len, seq_len) == route


def test_a_mixed_step_is_split_by_route_with_rows_counted_from_each_batch():
    # requests: decode (1 of 9), prefix (3 of 10), decode (1 of 7), first chunk (2 of 2)
    batches = plan_step([0, 1, 4, 5, 7], [9, 10, 7, 2], TABLE)
    first, prefix, decode = batches
    assert [b.route for b in batches] == ["first_chunk", "prefix", "decode"]
    assert first.rows == slice(5, 7)
    assert prefix.rows == slice(1, 4)
    assert decode.rows.tolist() == [0, 4]
    assert decode.query_start_loc.tolist() == [0, 1, 2]
    assert decode.seq_lens.tolist() == [9, 7]
    assert decode.block_table.tolist() == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
    assert (first.num_requests, first.num_tokens) == (1, 2)
    assert (prefix.num_requests, prefix.num_tokens) == (1, 3)


def test_a_batch_of_decodes_is_a_slice_and_needs_no_gather():
    (batch,) = plan_step([0, 1, 2, 3, 4], [5, 6, 7, 8], TABLE)
    assert batch.rows == slice(0, 4)
    assert batch.num_tokens == 4


def test_a_padding_request_between_others_takes_no_route():
    (batch,) = plan_step([0, 1, 1, 2], [5, 0, 7], TABLE[:3])
    assert batch.rows == slice(0, 2)
    assert batch.seq_lens.tolist() == [5, 7]


def test_the_indices_have_the_type_that_the_kernels_take():
    (batch,) = plan_step([0, 3], [10], TABLE[:1])
    for tensor in (batch.query_start_loc, batch.seq_lens, batch.block_table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_a_query_longer_than_its_sequence_is_refused():
    with pytest.raises(ValueError, match="request 0 of the step has 4 query tokens in a sequence"):
        plan_step([0, 4], [3], TABLE[:1])
