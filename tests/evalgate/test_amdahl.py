"""Attention's share from a profile, and what it can give end to end."""

from __future__ import annotations

import json
import math

import pytest

from evalgate.amdahl import (
    KernelTime,
    compute_attention_share,
    compute_bound,
    compute_gain_percent,
    parse_profile,
)
from evalgate.errors import EvidenceError, UsageError

# The source's shares of kernel time (prefill, decode) and the speed-ups of the attention lifecycle.
PREFILL, DECODE = (0.07556, 1.0613), (0.03918, 1.0705)


def make_trace(*events: dict) -> str:
    return json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "X", **e} for e in events]})


def test_the_sources_shares_leave_less_than_one_percent_to_win():
    # 0.07556 * (1 - 1/1.0613) = 0.0043643; 0.03918 * (1 - 1/1.0705) = 0.0025803
    assert compute_gain_percent([PREFILL]) == pytest.approx(0.43834, abs=1e-4)
    assert compute_gain_percent([DECODE]) == pytest.approx(0.25869, abs=1e-4)
    assert compute_gain_percent([PREFILL, DECODE]) == pytest.approx(0.69932, abs=1e-4)
    assert 0.4 < compute_gain_percent([PREFILL]) < compute_gain_percent([PREFILL, DECODE]) < 0.8


def test_a_part_that_vanishes_bounds_every_kernel():
    assert compute_gain_percent([(0.5, math.inf)]) == pytest.approx(100.0)
    assert compute_gain_percent([(0.07556, math.inf)]) == pytest.approx(8.1736, abs=1e-4)
    assert compute_gain_percent([(1.0, math.inf)]) == math.inf


def test_a_slower_part_is_a_loss():
    assert compute_gain_percent([(0.5, 0.5)]) == pytest.approx(-100 / 3)


@pytest.mark.parametrize("parts", [[(1.2, 2.0)], [(0.6, 2.0), (0.6, 2.0)], [(-0.1, 2.0)]])
def test_shares_that_are_no_parts_of_a_whole_are_refused(parts):
    with pytest.raises(ValueError, match="not parts of one whole"):
        compute_gain_percent(parts)


def test_a_speed_up_of_zero_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        compute_gain_percent([(0.1, 0.0)])


def test_a_gpu_trace_counts_kernels_and_nothing_else():
    text = make_trace(
        {"cat": "kernel", "name": "flash_fwd_splitkv_kernel", "ts": 0, "dur": 75},
        {"cat": "kernel", "name": "flash_fwd_splitkv_kernel", "ts": 100, "dur": 25},
        {"cat": "kernel", "name": "ampere_bf16_gemm", "ts": 200, "dur": 890},
        {"cat": "kernel", "name": "vllm::reshape_and_cache_flash_kernel", "ts": 1100, "dur": 10},
        {"cat": "cpu_op", "name": "aten::attention", "ts": 0, "dur": 5000},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 0, "dur": 7},
    )
    kernels = parse_profile(text, "trace.json")
    assert kernels[1] == KernelTime("flash_fwd_splitkv_kernel", 100.0, 2)
    share = compute_attention_share(kernels)
    assert share.share == pytest.approx(0.1)
    assert [k.name for k in share.kernels] == ["flash_fwd_splitkv_kernel"]


def test_operators_of_a_cpu_trace_count_their_own_time_only():
    text = make_trace(
        {"cat": "cpu_op", "name": "model", "pid": 1, "tid": 1, "ts": 0, "dur": 100},
        {"cat": "cpu_op", "name": "unified_attention", "pid": 1, "tid": 1, "ts": 10, "dur": 40},
        {"cat": "cpu_op", "name": "aten::softmax", "pid": 1, "tid": 1, "ts": 20, "dur": 10},
        {"cat": "cpu_op", "name": "aten::linear", "pid": 1, "tid": 1, "ts": 60, "dur": 20},
        {"cat": "cpu_op", "name": "aten::linear", "pid": 1, "tid": 2, "ts": 0, "dur": 5},
    )
    own = {k.name: k.total_us for k in parse_profile(text, "trace.json")}
    assert own == {"model": 40, "unified_attention": 30, "aten::softmax": 10, "aten::linear": 25}


@pytest.mark.parametrize(
    "text",
    [
        '"Name","Calls","TotalDurationNs","AverageNs","Percentage"\n'
        '"paged_attention_ll4mi_QKV",2,3000,1500,30.0\n"Cijk_gemm",7,7000,1000,70.0\n',
        "Kind,Kernel_Name,Start_Timestamp,End_Timestamp\nKERNEL_DISPATCH,paged_attention_x,100,1100"
        "\nKERNEL_DISPATCH,paged_attention_x,2000,4000\nKERNEL_DISPATCH,gemm,5000,12000\n",
        'Index,KernelName,BeginNs,EndNs,DurationNs\n0,"attn<int, 8>",0,1,3000\n1,gemm,0,7,7000\n',
    ],
    ids=["stats", "rocprofv3 trace", "rocprof results"],
)
def test_kernel_tables_are_read_in_their_three_shapes(text):
    share = compute_attention_share(parse_profile(text, "kernels.csv"))
    assert share.total_us == pytest.approx(10.0)
    assert share.share == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns are none"),
        ("a,b\n1,2\n", "columns are a, b"),
        ('{"traceEvents": 3}', "no list traceEvents"),
        ('{"traceEvents": [', "is the trace cut off"),
        ("[" * 100_000, "not JSON"),
        ('{"traceEvents": []}', "no kernel times inside"),
        ("Name,TotalDurationNs\n" + "x" * 200_000 + ",1\n", "not a table"),
        ("Name,TotalDurationNs\nattn,soon\n", "TotalDurationNs is 'soon', not a time"),
        ("Name,TotalDurationNs\nattn,nan\n", "TotalDurationNs is 'nan', not a time"),
        ("Name,TotalDurationNs\nattn\n", "TotalDurationNs is None, not a time"),
    ],
    ids=range(10),
)
def test_what_is_no_profile_is_refused_with_its_reason(text, message):
    with pytest.raises(EvidenceError, match=message):
        parse_profile(text, "p")


def test_a_profile_without_attention_is_refused_and_a_pattern_finds_it():
    kernels = [KernelTime("my_special_kernel", 10.0, 1), KernelTime("gemm", 90.0, 1)]
    with pytest.raises(EvidenceError, match="none of 2 kernels looks like attention"):
        compute_attention_share(kernels)
    assert compute_attention_share(kernels, "special").share == pytest.approx(0.1)


def test_a_pattern_that_is_no_regular_expression_is_a_usage_error():
    with pytest.raises(UsageError, match="pattern '\\('"):
        compute_attention_share([KernelTime("attn", 1.0, 1)], "(")


def test_a_gain_is_suspicious_only_when_its_lower_bound_exceeds_what_is_possible():
    share = compute_attention_share([KernelTime("attn", 75.56, 1), KernelTime("gemm", 924.44, 1)])
    plausible = compute_bound(share, measured_percent=0.536, measured_low=0.1)
    unsure = compute_bound(share, measured_percent=9.0, measured_low=7.0)
    suspicious = compute_bound(share, measured_percent=12.0, measured_low=10.0)
    assert [b.is_suspicious for b in (plausible, unsure, suspicious)] == [False, False, True]
    assert plausible.describe() == (
        "attention is 7.556 % of kernel time, so at most +8.17 % end to end; measured +0.54 %"
    )
    assert "more than attention can give" in suspicious.describe()
    assert compute_bound(share).measured_percent is None
