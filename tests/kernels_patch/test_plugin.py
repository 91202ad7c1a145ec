"""The plug-in's entry: inert unless asked, and never a silent stock server when asked."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from kernels_patch.switches import REFUSED_EXIT_CODE, forced_impl, is_asked_for

REGISTER = "from kernels_patch.plugin import register; register(); print('still here')"


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KERNELS_PATCH")}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=120
    )


def test_vllm_finds_the_plug_in_by_its_entry_point():
    (found,) = (p for p in entry_points(group="vllm.general_plugins") if "kernels_patch" in p.value)
    assert found.value == "kernels_patch.plugin:register"


def test_unasked_it_imports_neither_vllm_nor_torch_nor_its_own_backend():
    done = run_python(
        REGISTER + "\nimport sys\n"
        "print([m for m in ('vllm', 'torch', 'kernels_patch.backend') if m in sys.modules])"
    )
    assert done.returncode == 0
    assert done.stdout == "still here\n[]\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"KERNELS_PATCH": "int4_kv"}, "KERNELS_PATCH='int4_kv' names no scheme"),
        (
            {"KERNELS_PATCH": "int8_kv", "KERNELS_PATCH_IMPL": "cuda"},
            "KERNELS_PATCH_IMPL='cuda' is unknown",
        ),
        (
            {"KERNELS_PATCH": "int8_kv", "KERNELS_PATCH_FAULT": "sleep"},
            "KERNELS_PATCH_FAULT='sleep' names no fault",
        ),
    ],
)
def test_a_value_that_cannot_be_honoured_ends_the_process_with_one_line(env, reason):
    done = run_python(REGISTER, **env)
    assert done.returncode == REFUSED_EXIT_CODE
    assert done.stdout == ""
    assert done.stderr.startswith(f"kernels_patch: refusing to start: {reason}")
    assert done.stderr.count("\n") == 1


def test_an_exception_that_vllm_would_only_log_ends_the_process_too():
    hide_vllm = "import sys; sys.modules['vllm'] = None\n"
    swallowing = "try:\n    from kernels_patch.plugin import register; register()\n"
    swallowing += "except BaseException:\n    pass\nprint('a stock server')\n"
    done = run_python(hide_vllm + swallowing, KERNELS_PATCH="int8_kv")
    assert done.returncode == REFUSED_EXIT_CODE
    assert done.stdout == ""
    assert done.stderr.startswith("kernels_patch: refusing to start: ModuleNotFoundError")


def test_a_kind_of_attention_that_is_not_served_ends_the_process_when_a_layer_asks_for_it():
    done = run_python("from kernels_patch import refusing\nrefusing.RefusingBackend")
    assert done.returncode == REFUSED_EXIT_CODE
    assert "latent attention, state-space or linear-attention layers" in done.stderr


def test_the_switches_read_empty_as_unset():
    assert is_asked_for({}) is False
    assert is_asked_for({"KERNELS_PATCH": ""}) is False
    assert is_asked_for({"KERNELS_PATCH": "int8_kv"}) is True
    assert forced_impl({"KERNELS_PATCH_IMPL": ""}) is None
    assert forced_impl({"KERNELS_PATCH_IMPL": "native"}) == "native"
