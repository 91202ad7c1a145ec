"""The kernels for 64-bit Arm under an emulator: exact sums, the bytes of pages, every route."""

import emulated
import pytest
import torch

from kernels_patch import build, check
from kernels_patch.check import Case

MISSING = emulated.find_missing_tool()
pytestmark = pytest.mark.skipif(
    MISSING is not None,
    reason=f"{MISSING} is missing: install an Arm cross compiler and QEMU's user mode",
)
SETS = build.list_sets("aarch64")
CASES = [  # emulation is slow: `kernels_patch.check` holds more for the processor at hand
    Case("edges", 6, 2, 40, 64, ((1, 31), (1, 129), (33, 33), (33, 65), (2, 257))),
    Case("bfloat16", 3, 1, 256, 32, ((1, 70), (5, 40)), torch.bfloat16),
]


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    return emulated.cross_compile(tmp_path_factory.mktemp("arm"))


@pytest.mark.parametrize("isa", SETS)
def test_products_and_sums_are_exact(isa, tmp_path):
    program = emulated.compile_program(emulated.HERE / "dots.cpp", tmp_path / "dots", *SETS[isa])
    emulated.run_emulated(program)


def test_a_processor_without_dot_products_is_served_by_the_portable_set(arm):
    assert emulated.run_emulated(*arm, cpu="max").split() == [b"dotprod", b"portable"]
    assert emulated.run_emulated(*arm, cpu="cortex-a53").split() == [b"portable"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("isa", SETS)
def test_pages_are_the_reference_s_and_every_route_agrees_with_the_scheme(arm, isa, case):
    kernels = emulated.EmulatedKernels(*arm, isa)
    results = list(check.check_case(kernels, check.make_batch(case)))
    assert [r.route for r in results] == ["prefix", "decode", "first_chunk"]
    for result in results:
        assert result.passed, result
