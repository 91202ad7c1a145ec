"""Correctness of the GPU kernels against the float64 reference.

``python -m kernels_patch.gpu.check`` exits 0 when every case holds, 1 when one does not.
Problems are built here in NumPy, byte by byte from ``layout.UnitLayout``, so that producer and
decode are checked apart from each other. All that a kernel must not read is poison: free slots and
pages hold payload -128 and scale NaN, table entries past a request's last page point nowhere, and
outputs are filled with NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels_patch import reference
from kernels_patch.gpu.check_write import (
    SPARE_PAGES,
    floats,
    place,
    poisoned_pages,
    rope_cases,
    rope_differences,
    write_cases,
    write_differences,
)
from kernels_patch.gpu.decode import DecodeWorkspace, build, int8_decode
from kernels_patch.gpu.layout import UnitLayout
from kernels_patch.gpu.nvrtc import compile_all
from kernels_patch.gpu.prefix import dequantise
from kernels_patch.gpu.shape import DecodePlan, DecodeShape
from kernels_patch.gpu.tuning import DecodeTuning

NOWHERE = 1 << 30
# Against the scheme itself only the output's own rounding is left, and a few weights that fall on
# the other side of a half: float16 stores to 2^-11, bfloat16 to 2^-8.
SCHEME_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3}


@dataclass(frozen=True)
class Case:
    """One decode problem; ``data`` is random, outlier, zeros, extreme or NaN in q, k or v."""

    name: str
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256
    block_size: int = 64
    lens: tuple[int, ...] = (300,)
    q_len: int = 1
    data: str = "random"
    dtype: torch.dtype = torch.float16
    tuning: DecodeTuning | None = None

    @property
    def shape(self) -> DecodeShape:
        group, fp16 = self.heads // self.kv_heads, self.dtype == torch.float16
        return DecodeShape(self.head_dim, group, self.q_len, self.block_size, fp16)

    @property
    def plan(self) -> DecodePlan:
        return self.shape.plan(self.tuning)


@dataclass(frozen=True)
class Problem:
    """A case's tensors on the device, and what they were made of, per request."""

    case: Case
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    quantised: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]

    @property
    def sm_scale(self) -> float:
        return self.case.head_dim**-0.5


def decode_cases() -> Iterator[Case]:
    """Shapes, boundaries and data that have broken kernels like this one."""
    for heads, kv_heads, head_dim in ((24, 4, 256), (32, 8, 128), (9, 3, 64)):
        shape = Case("", heads, kv_heads, head_dim)
        tag = f"{heads}/{kv_heads}/{head_dim}"
        yield replace(shape, name=f"{tag} 4096", lens=(4096,))
        yield replace(shape, name=f"{tag} bf16", lens=(2242,), dtype=torch.bfloat16)
        for data in ("outlier", "zeros", "extreme"):
            yield replace(shape, name=f"{tag} {data}", lens=(700,), data=data)
        for q_len in (2, 3, 4, 5, 8):
            yield replace(shape, name=f"{tag} q_len {q_len}", q_len=q_len, lens=(1000, q_len, 33))
        for block_size in (16, 32, 128, 784):
            yield replace(
                shape, name=f"{tag} page {block_size}", block_size=block_size, lens=(1700, 17)
            )
    # Query heads that share a KV head: none, and as many as fit the kernel's rows.
    for heads, kv_heads, head_dim, q_len in (
        (8, 8, 128, 1), (8, 8, 128, 8), (32, 4, 128, 1), (32, 4, 256, 8), (32, 2, 128, 1),
        (32, 2, 256, 4), (16, 1, 64, 4), (64, 1, 256, 1),
    ):  # fmt: skip
        yield Case(
            f"{heads}/{kv_heads}/{head_dim} q_len {q_len}",
            heads, kv_heads, head_dim, lens=(1000, q_len, 33), q_len=q_len,
        )  # fmt: skip
    for length in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 4095, 4097):
        yield Case(f"length {length}", lens=(length,))
    for name in ("q", "k", "v"):  # alone in its CTA, and merged with others
        yield Case(f"NaN in {name}", lens=(300, 40), data=f"nan in {name}")
    yield Case("prompt mod 16", lens=tuple(512 + n for n in range(16)))
    yield Case("ragged batch with padding", lens=(5000, 0, 1, 0, 0, 900, 33, 0))
    yield Case("batch past a warp", 9, 3, 64, lens=(*[40] * 33, 0, 900, *[7] * 36))
    for tiles in (1, 2, 7, 64):
        tuning = DecodeTuning(teams=4, least_tiles=tiles)
        yield Case(f"least tiles {tiles}", lens=(3000, 70), tuning=tuning)
    for teams in (1, 2, 8):
        yield Case(f"teams {teams}", lens=(3000, 70), tuning=DecodeTuning(teams))
    for q_len, tuning in (
        (1, DecodeTuning(4, 16)),
        (2, DecodeTuning(6, 8)),
        (8, DecodeTuning(2, 8)),
    ):
        yield Case(f"q_len {q_len} {tuning}", lens=(3000, 70), q_len=q_len, tuning=tuning)
    # Many times round the ring, with partitions that start and end inside chunks.
    yield Case("long ragged batch", lens=(9001, 20000, 3, 7777), kv_heads=2, heads=12)


def make_problem(case: Case, device: str = "cuda", seed: int = 0) -> Problem:
    """Quantise random keys and values of ``case`` into shuffled, otherwise poisoned pages."""
    rng = np.random.default_rng(seed)
    layout = UnitLayout(case.block_size, case.head_dim)
    pages_of = [-(-n // case.block_size) for n in case.lens]
    n_pages = sum(pages_of) + SPARE_PAGES
    order = rng.permutation(n_pages).astype(np.int32)
    cache = poisoned_pages(n_pages, case.kv_heads, layout)
    table = np.full((len(case.lens), max(pages_of) + 2), NOWHERE, np.int32)
    quantised, used = [], 0
    for request, length in enumerate(case.lens):
        table[request, : pages_of[request]] = order[used : used + pages_of[request]]
        used += pages_of[request]
        parts = _quantised(rng, case, length)
        place(cache, layout, table[request], *parts)
        quantised.append(parts)
    q = floats(rng, (len(case.lens) * case.q_len, case.heads, case.head_dim), case.data)
    if case.data == "nan in q":
        q[:, 1, 5] = np.nan
    return Problem(
        case,
        torch.from_numpy(q).to(device, case.dtype),
        torch.from_numpy(cache).to(device),
        torch.from_numpy(table).to(device),
        torch.tensor(case.lens, dtype=torch.int32, device=device),
        quantised,
    )


def run_decode(problem: Problem) -> np.ndarray:
    """The kernel's output as float64 [B * q_len, Hq, D], from a NaN-filled tensor."""
    case = problem.case
    workspace = DecodeWorkspace(
        problem.q.device, len(case.lens), case.kv_heads, case.shape.rows, case.head_dim
    )
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    outputs = []
    for _ in range(2):  # twice: bits must not change, and the counters must be left at zero
        out = torch.full_like(problem.q, float("nan"))
        int8_decode(
            problem.q,
            problem.kv_cache,
            problem.block_table,
            problem.seq_lens,
            out,
            q_len=case.q_len,
            sm_scale=problem.sm_scale,
            workspace=workspace,
            tuning=case.tuning,
        )
        outputs.append(out)
    if not torch.equal(outputs[0].view(torch.int16), outputs[1].view(torch.int16)):
        raise AssertionError(f"{case.name}: two runs differ")
    if int(workspace.arrived.abs().sum()):
        raise AssertionError(f"{case.name}: arrival counters are not left at zero")
    return outputs[0].double().cpu().numpy()


def expected_decode(problem: Problem) -> np.ndarray:
    """The scheme in float64 over the same payloads; NaN where a request is padding.

    Where queries and weights are kept as two digits, their rounding is too small to be seen.
    """
    case = problem.case
    one_digit = not case.plan.two_digits
    rounding = reference.Rounding(q=one_digit, w=one_digit)
    q = problem.q.float().cpu().numpy().reshape(len(case.lens), case.q_len, case.heads, -1)
    out = np.full(q.shape, np.nan)
    for request, (k, k_scale, v, v_scale) in enumerate(problem.quantised):
        if len(k):
            with np.errstate(invalid="ignore"):  # NaN has no payload; its scale carries it
                out[request] = reference.int8_attention_quantised(
                    q[request], k, k_scale, v, v_scale, problem.sm_scale, rounding=rounding
                )
    return out.reshape(-1, case.heads, case.head_dim)


def relative_rms(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square difference over that of ``want``; NaN must stand at the same places.

    Infinity when one has NaN where the other does not; 0 when both are zero throughout.
    """
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("inf")
    difference = np.nan_to_num(got - want, nan=0.0)
    size = np.linalg.norm(np.nan_to_num(want))
    return float(np.linalg.norm(difference) / size) if size else float(np.abs(difference).max())


def dequantise_error(lens: tuple[int, ...], block_size: int, head_dim: int) -> float:
    """Largest difference of unpacked K and V from payload times scale, as float16 stores them."""
    problem = make_problem(Case("", head_dim=head_dim, block_size=block_size, lens=lens))
    starts = torch.tensor(np.cumsum([0, *lens[:-1]]), dtype=torch.int32, device="cuda")
    shape = (sum(lens), problem.case.kv_heads, head_dim)
    key = torch.full(shape, float("nan"), dtype=torch.float16, device="cuda")
    value = torch.full_like(key, float("nan"))
    dequantise(
        problem.kv_cache, problem.block_table, problem.seq_lens, starts, max(lens), key, value
    )
    worst = 0.0
    for got, at in ((key, 0), (value, 2)):
        parts = [one[at] * one[at + 1][..., None] for one in problem.quantised]
        want = np.concatenate(parts).astype(np.float16)
        difference = np.abs(got.cpu().numpy().astype(np.float64) - want)
        worst = max(worst, float("inf") if np.isnan(difference).any() else difference.max())
    return worst


def main() -> int:
    failures = 0
    for lens, block_size, head_dim in (
        ((1, 17, 700), 64, 256), ((4000,), 784, 256), ((33, 0, 5), 16, 128)
    ):  # fmt: skip
        error = dequantise_error(lens, block_size, head_dim)
        failures += error > 0
        print(f"{'FAIL' if error else 'ok  '} unpack {lens} page {block_size} {error:.1e}")
    for name, cases, differences_of in (
        ("write", write_cases(), write_differences),
        ("rope and write", rope_cases(), rope_differences),
    ):
        for case in cases:
            differences = differences_of(case)
            failures += differences > 0
            print(f"{'FAIL' if differences else 'ok  '} {name} {case.name} {differences} differ")
    compile_all(build(case.plan) for case in decode_cases())
    for case in decode_cases():
        problem = make_problem(case)
        error = relative_rms(run_decode(problem), expected_decode(problem))
        held = error <= SCHEME_TOLERANCE[case.dtype]
        failures += not held
        print(f"{'ok  ' if held else 'FAIL'} decode {case.name:32} {error:.2e}", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _quantised(
    rng: np.random.Generator, case: Case, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    shape = (length, case.kv_heads, case.head_dim)
    k, k_scale = reference.quantise(floats(rng, shape, case.data))
    v, v_scale = reference.quantise(floats(rng, shape, case.data))
    if case.data == "extreme":  # what no producer writes but a cache may hold
        k[rng.random(shape) < 0.3] = -128
        v[rng.random(shape) < 0.3] = -128
        v_scale *= rng.choice(np.float32([1e-6, 1, 1e3]), size=v_scale.shape)
    if case.data in ("nan in k", "nan in v"):
        (k_scale if case.data == "nan in k" else v_scale)[length // 2, 0] = np.nan
    return k, k_scale, v, v_scale


if __name__ == "__main__":
    sys.exit(main())
