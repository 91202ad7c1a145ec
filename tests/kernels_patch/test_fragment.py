"""Lane ownership of the matrix instruction, and the two mistakes that it explains."""

import numpy as np
import pytest

from kernels_patch import fragment, reference


@pytest.fixture(scope="module")
def decode_row():
    """Probabilities [16, S], V as INT8 with scales, and the exact output, at S 4096."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) for shape in ((16, 256), (4096, 256), (4096, 32)))
    scores = q @ k.T / 16
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p, *reference.quantise(v), p @ v


def test_an_instruction_owns_four_slices_of_eight_tokens():
    first = [*range(8), *range(16, 24), *range(32, 40), *range(48, 56)]
    assert fragment.list_owned_tokens(0).tolist() == first
    assert fragment.list_owned_tokens(1).tolist() == [t + 8 for t in first]


def test_groups_by_fragment_are_what_each_instruction_owns():
    groups = fragment.assign_groups("fragment")
    for instruction in (0, 1):
        owned = np.flatnonzero(groups == instruction)
        assert owned.tolist() == fragment.list_owned_tokens(instruction).tolist()


def test_the_lanes_together_multiply_the_two_matrices():
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-128, 128, size=s).astype(np.int8) for s in ((16, 32), (32, 16)))
    lane = np.arange(64)
    element = (lane // 16 * 8)[:, None] + np.arange(8)
    sums = fragment.multiply(a[(lane % 16)[:, None], element], b[element, (lane % 16)[:, None]])
    np.testing.assert_array_equal(
        fragment.gather_sums(sums), a.astype(np.int32) @ b.astype(np.int32)
    )


def test_scales_grouped_as_the_instruction_consumes_give_the_error_of_rounding(decode_row):
    p, v, v_scale, exact = decode_row
    error = np.abs(fragment.weigh(p, v, v_scale) - exact).max()
    assert 0.0003 < error < 0.003  # the source saw 0.0013


def test_the_model_with_the_right_groups_rounds_as_the_reference_does(decode_row):
    p, v, v_scale, _ = decode_row
    w = p * v_scale
    grouped = w.reshape(16, -1, 4, 2, 8).transpose(0, 1, 3, 2, 4).reshape(16, -1, 32)
    scale = grouped.max(axis=-1, keepdims=True) / 127
    rounded = (np.rint(grouped / scale) * scale).reshape(16, -1, 2, 4, 8)
    expected = rounded.transpose(0, 1, 3, 2, 4).reshape(w.shape) @ v.astype(float)
    np.testing.assert_allclose(fragment.weigh(p, v, v_scale), expected, atol=1e-12)


def test_scales_grouped_by_neighbours_give_the_error_of_the_source(decode_row):
    p, v, v_scale, exact = decode_row
    error = np.abs(fragment.weigh(p, v, v_scale, grouping="neighbours") - exact).max()
    assert 0.03 < error < 0.2  # the source saw 0.063, 48 times the right one


def test_eight_byte_loads_lose_half_of_the_tokens(decode_row):
    p, v, v_scale, exact = decode_row
    got = fragment.weigh(p, v, v_scale, load_bytes=8)
    assert 0.03 < np.abs(got - exact).max() < 0.2
    # What is left is exactly the tokens of the first instruction.
    kept = fragment.assign_groups("fragment") == 0
    only_first = p * np.tile(kept, 64)
    np.testing.assert_allclose(got, fragment.weigh(only_first, v, v_scale), atol=1e-12)
