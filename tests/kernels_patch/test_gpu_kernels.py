"""The GPU kernels against the float64 reference; needs a Hopper GPU and Triton.

``python -m kernels_patch.gpu.check`` runs every case; a sample that compiles fast is here.
"""

import math

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a CUDA device of compute capability 9.0", allow_module_level=True)

from kernels_patch.gpu import check, check_write
from kernels_patch.gpu.decode import DecodeWorkspace, int8_decode
from kernels_patch.gpu.rope import int8_rope_write
from kernels_patch.gpu.shape import DecodeShape

ONE_KERNEL = [case for case in check.decode_cases() if case.plan == check.Case("").plan]


@pytest.mark.parametrize("case", ONE_KERNEL, ids=lambda case: case.name)
def test_decode_gives_the_scheme_whatever_the_length_and_data(case):
    problem = check.make_problem(case)
    error = check.relative_rms(check.run_decode(problem), check.expected_decode(problem))
    assert error <= check.SCHEME_TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", list(check_write.write_cases()), ids=lambda case: case.name)
def test_the_cache_write_gives_the_reference_bytes_and_touches_no_other(case):
    assert check_write.write_differences(case) == 0


@pytest.mark.parametrize("case", list(check_write.rope_cases()), ids=lambda case: case.name)
def test_the_write_that_rotates_rounds_once_and_quantises_what_it_stored(case):
    assert check_write.rope_differences(case) == 0


@pytest.mark.parametrize("lens", [(1, 17, 700), (33, 0, 5)])
def test_unpacked_pages_are_payload_times_scale(lens):
    assert check.dequantise_error(lens, 64, 256) == 0


def _decode_call(ticks: torch.Tensor):
    problem = check.make_problem(check.Case("", lens=(3000,)))
    workspace = DecodeWorkspace(problem.q.device, 1, 4, DecodeShape(256, 6, 1, 64).rows, 256)
    out = torch.full_like(problem.q, math.nan)

    def call() -> None:
        int8_decode(
            problem.q,
            problem.kv_cache,
            problem.block_table,
            problem.seq_lens,
            out,
            q_len=1,
            sm_scale=problem.sm_scale,
            workspace=workspace,
            ticks=ticks,
        )

    return call, out


def test_the_launch_counter_ticks_under_graph_replay():
    ticks = torch.zeros(1, dtype=torch.int64, device="cuda")
    call, out = _decode_call(ticks)
    call()
    eager = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(5):
        out.fill_(math.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert ticks.item() == 1 + 5
    assert torch.equal(out, eager)


def test_writes_that_rotate_tick_under_graph_replay_where_a_token_is_written():
    q, k, v = torch.ones(2, 32, 256, device="cuda").bfloat16().split([24, 4, 4], dim=1)
    positions = torch.zeros(2, dtype=torch.int64, device="cuda")
    angles = torch.ones(1, 256, device="cuda").bfloat16()
    pages = torch.zeros(1, 4, 64, 2 * 256 + 8, dtype=torch.int8, device="cuda")
    slots = torch.tensor([3, 4], device="cuda")
    ticks = torch.zeros(1, dtype=torch.int64, device="cuda")

    def call() -> None:
        int8_rope_write(q, k, v, positions, angles, True, pages, slots, ticks)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(5):
        graph.replay()
    slots.fill_(-1)  # a batch that no scheduler planned
    graph.replay()
    torch.cuda.synchronize()
    assert ticks.item() == 1 + 5


def test_decode_on_two_streams_at_once_gives_the_same_bits():
    """CTAs of a launch wait for one another: two launches must not hold each other up."""
    calls = [_decode_call(torch.zeros(1, dtype=torch.int64, device="cuda")) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in calls]
    calls[0][0]()
    torch.cuda.synchronize()
    want = calls[0][1].clone()
    for _ in range(200):
        for (call, _), stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                call()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for _, out in calls)


def test_a_workspace_that_is_too_small_is_refused():
    problem = check.make_problem(check.Case("", lens=(64,)))
    workspace = DecodeWorkspace(problem.q.device, 1, 4, 3, 256)
    with pytest.raises(ValueError, match="too small for 6 rows"):
        int8_decode(
            problem.q,
            problem.kv_cache,
            problem.block_table,
            problem.seq_lens,
            torch.empty_like(problem.q),
            q_len=1,
            sm_scale=1.0,
            workspace=workspace,
        )
