"""``kernels_patch.solve`` against the worked example and float64."""

import subprocess
import sys

import pytest
import torch

import kernels_patch


def make_arguments(heads, tokens, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, dim, generator=g)
    payloads = [
        torch.randint(-128, 128, (heads, tokens, dim), dtype=torch.int8, generator=g)
        for _ in range(2)
    ]
    scales = [torch.rand(heads, tokens, generator=g) * 0.02 + 1e-3 for _ in range(2)]
    return [query, *payloads, *scales, torch.full_like(query, float("nan"))]


def compute_exact(query, k, v, k_scale, v_scale):
    keys, values = k.double() * k_scale[..., None], v.double() * v_scale[..., None]
    scores = (keys @ query.double()[..., None])[..., 0] / query.shape[1] ** 0.5
    return (torch.softmax(scores, -1)[:, None] @ values)[:, 0]


def test_the_worked_example_gives_the_mean_of_the_values():
    query = torch.ones(1, 4)
    k = torch.zeros(1, 3, 4, dtype=torch.int8)
    k[0, 0, 0] = k[0, 1, 1] = k[0, 2, 2] = 100
    v = torch.arange(10, 130, 10, dtype=torch.int8).view(1, 3, 4)
    output = torch.zeros(1, 4)
    scales = torch.full((1, 3), 0.01), torch.full((1, 3), 0.1)
    kernels_patch.solve(query, k, v, *scales, output, 1, 3, 4)
    torch.testing.assert_close(output, torch.tensor([[5.0, 6.0, 7.0, 8.0]]))


@pytest.mark.parametrize("dim", [4, 8, 24, 64, 72, 128, 256])
@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (3, 7), (2, 255), (2, 256), (5, 513)])
def test_every_head_size_and_length_agrees_with_float64(heads, tokens, dim):
    arguments = make_arguments(heads, tokens, dim)
    kernels_patch.solve(*arguments, heads, tokens, dim)
    exact = compute_exact(*arguments[:5])
    assert (arguments[5] - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_the_longest_sequence_agrees_with_float64():
    arguments = make_arguments(2, 32768, 64)
    kernels_patch.solve(*arguments, 2, 32768, 64)
    exact = compute_exact(*arguments[:5])
    assert (arguments[5] - exact).abs().max() <= 1e-4 * exact.abs().max()


def test_payloads_of_minus_128_are_values_like_any_other():
    arguments = make_arguments(2, 40, 64)
    arguments[1].fill_(-128)
    arguments[2].fill_(-128)
    kernels_patch.solve(*arguments, 2, 40, 64)
    exact = compute_exact(*arguments[:5])
    torch.testing.assert_close(arguments[5].double(), exact, rtol=1e-5, atol=1e-6)


def test_an_output_that_is_not_contiguous_is_written_in_place():
    arguments = make_arguments(3, 20, 8)
    wide = torch.zeros(8, 3)
    arguments[5] = wide.t()
    kernels_patch.solve(*arguments, 3, 20, 8)
    exact = compute_exact(*arguments[:5])
    torch.testing.assert_close(wide.t().double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, torch.ones(2, 8, dtype=torch.float64), "Q is torch.float64"),
        (1, torch.zeros(2, 4, 8, dtype=torch.int8), r"K_int8 is torch.int8 \(2, 4, 8\)"),
        (4, torch.ones(2, 5, 1), "v_scale is"),
    ],
)
def test_a_wrong_tensor_is_named(place, wrong, message):
    arguments = make_arguments(2, 5, 8)
    arguments[place] = wrong
    with pytest.raises(ValueError, match=message):
        kernels_patch.solve(*arguments, 2, 5, 8)


def test_neither_query_nor_output_need_be_contiguous():
    arguments = make_arguments(3, 20, 8)
    exact = compute_exact(*arguments[:5])
    arguments[0] = arguments[0].t().contiguous().t()
    arguments[5] = torch.zeros(8, 3).t()
    kernels_patch.solve(*arguments, 3, 20, 8)
    torch.testing.assert_close(arguments[5].double(), exact, rtol=1e-4, atol=1e-6)


def test_the_output_may_be_the_query_itself():
    arguments = make_arguments(3, 700, 64)
    exact = compute_exact(*arguments[:5])
    arguments[5] = arguments[0]
    kernels_patch.solve(*arguments, 3, 700, 64)
    torch.testing.assert_close(arguments[5].double(), exact, rtol=1e-4, atol=1e-5)


def test_inputs_that_are_not_contiguous_are_read_as_they_are():
    arguments = make_arguments(3, 300, 64)
    arguments[1] = arguments[1].transpose(0, 1).contiguous().transpose(0, 1)
    arguments[3] = arguments[3][:, :1].expand(3, 300)
    exact = compute_exact(*arguments[:5])
    kernels_patch.solve(*arguments, 3, 300, 64)
    torch.testing.assert_close(arguments[5].double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", [3, 4])
def test_a_nan_scale_makes_its_head_nan_and_no_other(place):
    arguments = make_arguments(2, 300, 64)
    arguments[place][1, 299] = float("nan")
    kernels_patch.solve(*arguments, 2, 300, 64)
    assert not arguments[5][0].isnan().any()
    assert arguments[5][1].isnan().all()


def test_another_device_is_refused_by_its_name():
    arguments = [x.to("meta") for x in make_arguments(2, 5, 8)]
    with pytest.raises(ValueError, match="no kernel for meta: move the tensors to the CPU"):
        kernels_patch.solve(*arguments, 2, 5, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 3, 8), (3, 257, 24), (64, 32768, 256)])
def test_a_gpu_agrees_with_float64(heads, tokens, dim):
    arguments = [x.cuda() for x in make_arguments(heads, tokens, dim)]
    kernels_patch.solve(*arguments, heads, tokens, dim)
    exact = compute_exact(*arguments[:5])
    assert (arguments[5] - exact).abs().max() <= 1e-4 * exact.abs().max()


@pytest.mark.parametrize(
    ("heads", "tokens", "dim"), [(65, 5, 8), (0, 5, 8), (2, 32769, 8), (2, 5, 12), (2, 5, 264)]
)
def test_a_size_beyond_the_limits_is_refused(heads, tokens, dim):
    with pytest.raises(ValueError, match=r"num_heads|head_dim"):
        kernels_patch.solve(*make_arguments(1, 1, 8), heads, tokens, dim)


def test_importing_the_package_does_not_import_torch():
    code = "import kernels_patch, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_module_of_solve_does_not_hide_the_function():
    import kernels_patch.unpaged

    assert kernels_patch.solve is kernels_patch.unpaged.solve
