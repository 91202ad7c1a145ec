"""The NumPy scheme against values worked out by hand and against exact attention."""

import numpy as np
import pytest

from kernels_patch import reference
from kernels_patch.layout import PageLayout
from kernels_patch.reference import Rounding

SCALE = 0.125


def make_qkv(tokens=70, heads=4, kv_heads=2, dim=16, queries=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((queries, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def test_quantise_gives_the_values_worked_out_by_hand():
    q, scale = reference.quantise(np.array([[254.0, -254.0, 1.0, 3.0, 0.0], [0, 0, 0, 0, 0]]))
    assert scale.tolist() == [2.0, 0.0]
    assert q.tolist() == [[127, -127, 0, 2, 0], [0, 0, 0, 0, 0]]  # 0.5 and 1.5 round to even


def test_quantise_of_a_subnormal_row_is_zero_rather_than_a_division_by_zero():
    q, scale = reference.quantise(np.full((1, 4), 1e-44, dtype=np.float32))
    assert scale.tolist() == [0.0]
    assert q.tolist() == [[0, 0, 0, 0]]


def test_every_byte_of_a_page_belongs_to_one_token_and_field():
    layout = PageLayout(block_size=48, head_dim=24)
    tables = (layout.k_index, layout.v_index, layout.k_scale_index, layout.v_scale_index)
    owned = np.sort(np.concatenate([table.ravel() for table in tables]))
    assert owned.tolist() == list(range(layout.page_bytes))
    assert layout.page_bytes == 48 * (2 * 24 + 8)


def test_a_page_holds_bytes_where_the_layout_says():
    # Token 17, dimension 5 of D 8: K tile 1 (16 * 8 bytes), quad 1 (64), lane 1 (4), byte 1.
    layout = PageLayout(block_size=32, head_dim=8)
    assert layout.k_index[17, 5] == 128 + 64 + 4 + 1
    # V: after 256 bytes of K, quad of tokens 4 (32 bytes each), dimension 5 (4 bytes), byte 1.
    assert layout.v_index[17, 5] == 256 + 4 * 32 + 5 * 4 + 1
    assert layout.k_scale_index[17].tolist() == [512 + 68 + i for i in range(4)]
    assert layout.v_scale_index[17].tolist() == [640 + 68 + i for i in range(4)]


@pytest.mark.parametrize(("block_size", "head_dim"), [(0, 8), (24, 8), (32, 6), (32, 0)])
def test_a_layout_that_the_tiles_do_not_fit_is_refused(block_size, head_dim):
    with pytest.raises(ValueError, match="give a positive multiple"):
        PageLayout(block_size, head_dim)


def test_what_is_written_to_pages_out_of_order_is_read_back():
    _, key, value = make_qkv()
    cache = np.full((5, 2, 32, 2 * 16 + 8), -1, dtype=np.int8)
    table = np.array([4, 1, 2])
    token = np.arange(70)
    slots = table[token // 32] * 32 + token % 32
    slots[3] = -1  # padding: skipped
    reference.write_kv(key, value, cache, slots)
    k, k_scale, v, v_scale = reference.read_kv(cache, table, 70)
    written = np.arange(70) != 3
    for got, want in zip(
        (k, k_scale, v, v_scale),
        (*reference.quantise(key), *reference.quantise(value)),
        strict=True,
    ):
        np.testing.assert_array_equal(got[written], want[written])
    assert np.isnan(k_scale[3]).all()
    assert (k[3] == -1).all()


def test_attention_of_two_tokens_is_the_value_worked_out_by_hand():
    # Scores 0 and ln 3: weights 1/4 and 3/4. The first query sees the first token only.
    query = np.array([[[1.0]], [[np.log(3.0)]]])
    key = np.array([[[0.0]], [[1.0]]])
    value = np.array([[[4.0]], [[8.0]]])
    out = reference.attention(query, key, value, 1.0)
    np.testing.assert_allclose(out[:, 0, 0], [4.0, 7.0])


@pytest.mark.parametrize("partition", [None, 32, 64, 256])
def test_without_roundings_the_scheme_is_exact_attention(partition):
    q, k, v = make_qkv()
    exact = reference.attention(q, k, v, SCALE)
    none = Rounding(q=False, k=False, v=False, w=False)
    out = reference.int8_attention(q, k, v, SCALE, rounding=none, partition=partition)
    np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-7)


def test_prefix_and_decode_round_the_weights_alike():
    # The integers of a group do not change when all of its weights are divided by one number.
    q, k, v = make_qkv(tokens=300, queries=1)
    prefix = reference.int8_attention(q, k, v, SCALE)
    decode = reference.int8_attention(q, k, v, SCALE, partition=256)
    np.testing.assert_allclose(decode, prefix, atol=1e-12)


def test_smaller_groups_of_weights_round_less():
    q, k, v = make_qkv(tokens=1024, queries=2)
    v *= np.exp(np.random.default_rng(1).normal(size=(1024, 2, 1)) * 2)  # V of unequal size
    exact = reference.attention(q, k, v, SCALE)
    only_w = Rounding(q=False, k=False, v=False)
    errors = [
        np.abs(
            reference.int8_attention(q, k, v, SCALE, rounding=only_w, group=group) - exact
        ).mean()
        for group in (16, 32, 256)
    ]
    assert errors[0] < errors[1] < errors[2]


def test_a_large_v_scale_is_folded_before_the_sum_and_not_after():
    # One token with V of 1000 among tokens of 1: a single sV after the sum would lose all the rest.
    q, k, v = make_qkv(tokens=32, queries=1)
    v[7] *= 1000
    exact = reference.attention(q, k, v, SCALE)
    out = reference.int8_attention(q, k, v, SCALE)
    assert np.abs(out - exact).max() < 0.02 * np.abs(exact).max()
