"""The GPU page layout, and that decode.cu's lanes find their tokens in it (NumPy, no GPU)."""

import numpy as np
import pytest

from kernels_patch.gpu.layout import UnitLayout


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (64, 128), (64, 256), (784, 256)])
def test_every_byte_of_a_page_belongs_to_exactly_one_element(block_size, head_dim):
    layout = UnitLayout(block_size, head_dim)
    scales = [
        (index[:, None] + np.arange(4)).ravel()
        for index in (layout.k_scale_index, layout.v_scale_index)
    ]
    used = np.concatenate([layout.k_index.ravel(), layout.v_index.ravel(), *scales])
    assert np.array_equal(np.sort(used), np.arange(layout.page_bytes))


def test_bytes_worked_out_by_hand():
    layout = UnitLayout(block_size=32, head_dim=128)
    assert layout.unit_bytes == 16 * 128 * 2 + 2 * 64 == 4224
    assert layout.page_bytes == 32 * (2 * 128 + 8)
    # Token 17 is row 1 of unit 1; dimension 70 is byte 6 of the second run of 64 dimensions.
    assert layout.k_index[17, 70] == 4224 + 16 * 64 + 1 * 64 + 6
    assert layout.v_index[17, 70] == 4224 + 16 * 128 + 70 * 16 + 1
    assert layout.k_scale_index[17] == 4224 + 32 * 128 + 4
    assert layout.v_scale_index[17] == 4224 + 32 * 128 + 64 + 4


def test_a_page_costs_what_the_planner_is_told():
    assert UnitLayout(64, 256).bytes_per_token == 520
    assert 4 * UnitLayout(64, 256).bytes_per_token == 2080


@pytest.mark.parametrize(("block_size", "head_dim"), [(0, 256), (24, 256), (64, 0), (64, 96)])
def test_sizes_that_do_not_fit_the_unit_are_refused_by_value(block_size, head_dim):
    with pytest.raises(ValueError, match=r"is (0|24|96): give a positive multiple of"):
        UnitLayout(block_size, head_dim)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """mma.m16n8k32 by lanes. a [32 lanes, 4 registers, 4 bytes], b [32, 2, 4] -> c [32, 4].

    Operand and accumulator places are those of the PTX manual: with g, t = divmod(lane, 4), A's
    register i holds row g + 8 (i % 2), columns 4t + 16 (i / 2) onwards; B's register i rows
    4t + 16 i onwards of column g; C rows g, g, g + 8, g + 8 and columns 2t, 2t + 1, 2t, 2t + 1.
    """
    matrix_a, matrix_b = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(4):
            matrix_a[g + 8 * (i % 2), 4 * t + 16 * (i // 2) + np.arange(4)] = a[lane, i]
        for i in range(2):
            matrix_b[4 * t + 16 * i + np.arange(4), g] = b[lane, i]
    c = matrix_a @ matrix_b
    lanes = [(divmod(lane, 4)) for lane in range(32)]
    return np.array(
        [[c[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)] for g, t in lanes], np.int64
    )


def test_the_lanes_of_decode_multiply_the_right_tokens_and_dimensions():
    """decode.cu's addresses, tile by tile: q . k for 32 tokens, then w . v for all dimensions.

    With 8 rows a warp: the instruction's rows 8 to 15 hold the second digits of rows 0 to 7.
    """
    rng = np.random.default_rng(0)
    head_dim, rows = 128, 8
    layout = UnitLayout(32, head_dim)
    k, v = rng.integers(-128, 128, (2, 32, head_dim))
    q, w = rng.integers(-127, 128, (2, rows, head_dim)), rng.integers(-127, 128, (2, rows, 32))
    page = np.zeros(layout.page_bytes, np.int64)
    page[layout.k_index], page[layout.v_index] = k, v
    unit = layout.unit_bytes

    scores = np.zeros((2, rows, 32), np.int64)
    weight_registers = np.zeros((32, 4, 4), np.int64)
    for j in range(4):
        c = np.zeros((32, 4), np.int64)
        for i in range(head_dim // 64):
            for step in range(2):
                a, b = np.zeros((32, 4, 4), np.int64), np.zeros((32, 2, 4), np.int64)
                for lane in range(32):
                    g, t = divmod(lane, 4)
                    dims = i * 64 + t * 16 + step * 8 + np.arange(8)
                    a[lane] = [
                        q[digit, g, half] for half in (dims[:4], dims[4:]) for digit in (0, 1)
                    ]
                    at = g // 4 * unit + (g // 2 % 2 * 8 + g % 2) * 64 + t * 16
                    at += i * 1024 + j * 128 + step * 8
                    b[lane] = page[at : at + 8].reshape(2, 4)
                c += _product(a, b)
        for lane in range(32):
            g, t = divmod(lane, 4)
            tokens, bytes_ = slice(8 * t + 2 * j, 8 * t + 2 * j + 2), slice(2 * (j % 2), None)
            for digit in (0, 1):
                scores[digit, g, tokens] = c[lane, 2 * digit : 2 * digit + 2]
                weight_registers[lane, 2 * (j // 2) + digit, bytes_][:2] = w[digit, g, tokens]
    assert np.array_equal(scores, q @ k.T)

    out = np.zeros((2, rows, head_dim), np.int64)
    for n in range(head_dim // 8):
        a, b = np.zeros((32, 4, 4), np.int64), np.zeros((32, 2, 4), np.int64)
        for lane in range(32):
            g, t = divmod(lane, 4)
            a[lane] = weight_registers[lane]
            at = t // 2 * unit + 16 * head_dim + g * 16 + t % 2 * 8 + n * 128
            b[lane] = page[at : at + 8].reshape(2, 4)
        c = _product(a, b)
        for lane in range(32):
            g, t = divmod(lane, 4)
            out[:, g, 8 * n + 2 * t : 8 * n + 2 * t + 2] = c[lane].reshape(2, 2)
    assert np.array_equal(out, w @ v)
