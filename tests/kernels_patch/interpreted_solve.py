"""Run by test_gpu_triton.py with Triton's interpreter on: ``solve``'s GPU kernels on a CPU.

Against float64, at lengths around a tile's and a partition's end and at odd head sizes.
"""

import torch

from kernels_patch.gpu.solve import PARTITION_TOKENS, TILE_TOKENS, solve

SHAPES = [  # heads, tokens, head size
    (1, 3, 4),
    (2, 1, 8),
    (3, TILE_TOKENS + 1, 24),
    (2, PARTITION_TOKENS - 1, 64),
    (1, PARTITION_TOKENS, 256),
    (2, 2 * PARTITION_TOKENS + 1, 72),
    (64, 2, 40),
]


def main() -> None:
    g = torch.Generator().manual_seed(0)
    for heads, tokens, dim in SHAPES:
        q = torch.randn(heads, dim, generator=g)
        k, v = torch.randint(-128, 128, (2, heads, tokens, dim), dtype=torch.int8, generator=g)
        k_scale, v_scale = torch.rand(2, heads, tokens, generator=g) * 0.02 + 1e-3
        v_scale[:, 0] = 0
        out = torch.full((heads, dim), float("nan"))
        solve(q, k, v, k_scale, v_scale, dim**-0.5, out)
        keys, values = k.double() * k_scale[..., None], v.double() * v_scale[..., None]
        scores = (keys @ q.double()[..., None])[..., 0] / dim**0.5
        exact = (torch.softmax(scores, -1)[:, None] @ values)[:, 0]
        bound = 1e-5 * exact.abs().max()
        assert (out - exact).abs().max() <= bound, (heads, tokens, dim)

    # The worked example: equal scores give the mean of the values.
    k = torch.zeros(1, 3, 4, dtype=torch.int8)
    k[0, 0, 0] = k[0, 1, 1] = k[0, 2, 2] = 100
    v = torch.arange(10, 130, 10, dtype=torch.int8).view(1, 3, 4)
    out = torch.zeros(1, 4)
    solve(torch.ones(1, 4), k, v, torch.full((1, 3), 0.01), torch.full((1, 3), 0.1), 0.5, out)
    torch.testing.assert_close(out, torch.tensor([[5.0, 6.0, 7.0, 8.0]]))

    # A NaN scale makes its head NaN, and no other.
    q, k, v = torch.ones(2, 8), *torch.ones(2, 2, 300, 8, dtype=torch.int8)
    scales = torch.full((2, 300), 0.1)
    spoilt = scales.clone()
    spoilt[1, 7] = float("nan")
    for pair in ((spoilt, scales), (scales, spoilt)):
        out = torch.zeros(2, 8)
        solve(q, k, v, *pair, 8**-0.5, out)
        torch.testing.assert_close(out[0], torch.full((8,), 0.1))
        assert out[1].isnan().all()
    print("interpreted")


if __name__ == "__main__":
    main()
