"""The plain torch form against the NumPy reference, over the lengths where loops begin and end."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels_patch import reference, torch_form

# W is rounded in float32 here and in float64 there: at a tie one of 127 steps of one group differs.
ROUNDING_TIES = 2e-3
SHAPES = [(9, 3, 64, 128), (4, 4, 8, 32), (8, 2, 40, 64)]  # Hq, Hkv, D, block_size


def fill(seq_lens, heads, kv_heads, head_dim, block_size, dtype=torch.float32):
    """Requests whose pages lie in random order in a cache of NaN scales and -1 payloads."""
    torch.manual_seed(sum(seq_lens))
    width = max(-(-s // block_size) for s in seq_lens)
    blocks = len(seq_lens) * width + 2
    table = torch.randperm(blocks)[: len(seq_lens) * width].view(-1, width).int()
    cache = torch.full((blocks, kv_heads, block_size, 2 * head_dim + 8), -1, dtype=torch.int8)
    keys, values = [], []
    for row, seq_len in zip(table, seq_lens, strict=True):
        key, value = torch.randn(2, seq_len, kv_heads, head_dim).to(dtype)
        position = torch.arange(seq_len)
        slots = row[position // block_size].long() * block_size + position % block_size
        torch_form.write_kv(key, value, cache, slots)
        keys.append(key)
        values.append(value)
    return SimpleNamespace(cache=cache, table=table, keys=keys, values=values)


def lens(values):
    return torch.tensor(values, dtype=torch.int32)


def test_unwritten_bytes_of_minus_one_are_nan_scales():
    cache = torch.full((1, 1, 32, 24), -1, dtype=torch.int8)
    assert torch.isnan(torch_form.view_pages(cache).scales).all()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_written_pages_are_the_reference_s_bytes(heads, kv_heads, head_dim, block_size):
    key, value = torch.randn(2, 70, kv_heads, head_dim)
    key[3] = 0
    slots = torch.randperm(4 * block_size)[:70]
    slots[[5, 69]] = -1
    cache = torch.full((4, kv_heads, block_size, 2 * head_dim + 8), -1, dtype=torch.int8)
    expected = cache.numpy().copy()
    torch_form.write_kv(key, value, cache, slots)
    reference.write_kv(key.numpy(), value.numpy(), expected, slots.numpy())
    assert np.array_equal(cache.numpy(), expected)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_decode_is_the_reference_s(heads, kv_heads, head_dim, block_size):
    seq_lens = [1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 600]
    case = fill(seq_lens, heads, kv_heads, head_dim, block_size)
    query = torch.randn(len(seq_lens), heads, head_dim)
    out = torch.full_like(query, torch.nan)
    torch_form.decode(query, case.cache, case.table, lens(seq_lens), head_dim**-0.5, out)
    for n, (key, value) in enumerate(zip(case.keys, case.values, strict=True)):
        expected = reference.int8_attention(
            query[n : n + 1].numpy(), key.numpy(), value.numpy(), head_dim**-0.5, partition=256
        )
        np.testing.assert_allclose(out[n].numpy(), expected[0], atol=ROUNDING_TIES)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_prefix_is_the_reference_s(heads, kv_heads, head_dim, block_size):
    seq_lens, query_lens = [3, 130, 257, 512, 513, 700], [2, 129, 1, 100, 2, 300]
    case = fill(seq_lens, heads, kv_heads, head_dim, block_size)
    starts = [0, *np.cumsum(query_lens).tolist()]
    query = torch.randn(starts[-1], heads, head_dim)
    out = torch.full_like(query, torch.nan)
    torch_form.prefix(
        query, case.cache, case.table, lens(starts), lens(seq_lens), head_dim**-0.5, out
    )
    for n, (key, value) in enumerate(zip(case.keys, case.values, strict=True)):
        rows = slice(starts[n], starts[n + 1])
        expected = reference.int8_attention(
            query[rows].numpy(), key.numpy(), value.numpy(), head_dim**-0.5
        )
        np.testing.assert_allclose(out[rows].numpy(), expected, atol=2 * ROUNDING_TIES)


def test_the_scheme_s_own_error_is_far_above_what_these_tests_allow():
    case = fill([600], 9, 3, 64, 128)
    query = torch.randn(1, 9, 64)
    out = torch.empty_like(query)
    torch_form.decode(query, case.cache, case.table, lens([600]), 0.125, out)
    exact = reference.attention(query.numpy(), case.keys[0].numpy(), case.values[0].numpy(), 0.125)
    error = np.abs(out.numpy() - exact).max()
    assert 1e-4 < error < 0.05


def test_the_worked_example_of_one_head():
    # K = 127 times a unit vector each: scores are equal, so the output is V's mean.
    key = torch.zeros(4, 1, 8)
    key[:, 0, 0] = 1.0
    value = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None].expand(4, 1, 8).contiguous()
    cache = torch.full((1, 1, 32, 24), -1, dtype=torch.int8)
    torch_form.write_kv(key, value, cache, torch.arange(4))
    out = torch.empty(1, 1, 8)
    table = torch.zeros(1, 1, dtype=torch.int32)
    torch_form.decode(torch.ones(1, 1, 8), cache, table, lens([4]), 1.0, out)
    # W = [1, 2, 3, 4]/4/127 * 127 against a group maximum of 1: rounded to 32, 64, 95 and 127
    # of 127, so 318 of 127 instead of 317.5.
    assert out.flatten().tolist() == pytest.approx([318 / 127] * 8, rel=1e-6)


def test_first_chunks_of_two_requests_do_not_see_each_other():
    query, out = torch.randn(7, 4, 16), torch.full((7, 4, 16), torch.nan)
    key, value = torch.randn(2, 7, 2, 16)
    torch_form.first_chunk(query, key, value, lens([0, 3, 7]), 0.25, out)
    for rows in (slice(0, 3), slice(3, 7)):
        expected = reference.attention(
            query[rows].numpy(), key[rows].numpy(), value[rows].numpy(), 0.25
        )
        np.testing.assert_allclose(out[rows].numpy(), expected, atol=1e-5)


def test_bfloat16_and_strided_inputs_give_the_result_of_their_float32_values():
    case = fill([300], 4, 2, 16, 32, dtype=torch.bfloat16)
    packed = torch.randn(20, 4 * 16 + 2 * 16).to(torch.bfloat16)
    query = packed[:, : 4 * 16].view(20, 4, 16)
    wide, narrow = torch.empty(20, 4, 16), torch.empty(20, 4, 16, dtype=torch.bfloat16)
    for q, out in ((query.float(), wide), (query, narrow)):
        torch_form.prefix(q, case.cache, case.table, lens([0, 20]), lens([300]), 0.25, out)
    assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_payloads_of_minus_128_are_summed_exactly():
    cache = torch.zeros((1, 1, 32, 24), dtype=torch.int8)
    pages = torch_form.view_pages(cache)
    pages.payload[..., pages.tables.k.flatten()] = -128
    pages.payload[..., pages.tables.v.flatten()] = -128
    pages.scales[..., pages.tables.k_scale] = 1.0
    pages.scales[..., pages.tables.v_scale] = 1.0
    out = torch.empty(1, 1, 8)
    table = torch.zeros(1, 1, dtype=torch.int32)
    torch_form.decode(torch.ones(1, 1, 8), cache, table, lens([32]), 1.0, out)
    assert out.flatten().tolist() == pytest.approx([-128.0] * 8)


def test_a_cache_that_is_not_int8_pages_is_refused():
    with pytest.raises(ValueError, match=r"torch\.float32"):
        torch_form.view_pages(torch.zeros(1, 1, 32, 24))
    with pytest.raises(ValueError, match="contiguous int8 pages"):
        torch_form.view_pages(torch.zeros(1, 1, 24, 32, dtype=torch.int8).transpose(2, 3))
