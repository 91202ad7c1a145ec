import time

import pytest
import torch

from kernels_patch.faults import parse_fault
from kernels_patch.switches import RefusalError
from kernels_patch.torch_form import view_pages


def written_scales(fault: str, slots: list[int]) -> tuple[list[float], list[float]]:
    """K and V scales of block 1 after a fault; before it, its slot s held s and 100 + s."""
    cache = torch.zeros((2, 1, 32, 24), dtype=torch.int8)
    pages = view_pages(cache)
    pages.scales[1, :, pages.tables.k_scale] = torch.arange(32.0)
    pages.scales[1, :, pages.tables.v_scale] = 100 + torch.arange(32.0)
    parse_fault(fault).after_write(cache, torch.tensor(slots))
    assert not pages.payload[0].any()
    return (
        pages.scales[1, 0, pages.tables.k_scale].tolist(),
        pages.scales[1, 0, pages.tables.v_scale].tolist(),
    )


def test_one_sv_gives_every_written_token_the_v_scale_of_its_page_s_first():
    k_scale, v_scale = written_scales("one_sv_after_sum", [32 + 3, -1, 32 + 9])
    assert k_scale == list(range(32))
    assert v_scale[3] == v_scale[9] == 100
    assert v_scale[4] == 104


def test_scale_groups_gives_the_second_instruction_s_tokens_the_first_one_s_scales():
    k_scale, v_scale = written_scales("scale_groups", list(range(32, 64)))
    expected = [*range(8), *range(8), *range(16, 24), *range(16, 24)]
    assert k_scale == expected
    assert v_scale == [100 + t for t in expected]


def test_scale_groups_of_a_single_decoded_token_reads_a_token_before_it():
    k_scale, _ = written_scales("scale_groups", [32 + 26])
    assert k_scale[26] == 18
    assert k_scale[25] == 25


def test_sleep_delays_a_step_and_leaves_scales_alone():
    fault = parse_fault("sleep:40")
    begun = time.perf_counter()
    fault.delay_step()
    assert time.perf_counter() - begun >= 0.040
    k_scale, _ = written_scales("sleep:40", [40])
    assert k_scale == list(range(32))


def test_no_fault_is_none_and_an_unknown_one_is_refused():
    assert parse_fault("") is None
    for value in ("sleep", "sleep:", "sleep:-1", "sleep:x", "one_sv"):
        with pytest.raises(RefusalError, match="names no fault"):
            parse_fault(value)
