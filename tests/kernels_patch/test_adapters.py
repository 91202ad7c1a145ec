"""One adapter for each generation of vLLM: found by platform and series, held against its source.

Only one vLLM is installed at a time. The sources of others are compared where
``KERNELS_PATCH_VLLM_SOURCES`` names a folder that holds unpacked wheels as ``0.26/vllm`` and so on.
"""

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from kernels_patch.adapters import ADAPTERS, find_adapter
from kernels_patch.adapters.interface import (
    check_installed,
    find_differences,
    read_installed,
    read_source,
)
from kernels_patch.switches import RefusalError

SOURCES = os.environ.get("KERNELS_PATCH_VLLM_SOURCES")


def make_adapter(overridden: dict, used: dict) -> ModuleType:
    module = ModuleType("adapters.made_up")
    module.OVERRIDDEN, module.USED = overridden, used
    return module


@pytest.mark.parametrize(
    ("platform", "version", "name"),
    [
        ("cpu", "0.32.0", "cpu_0_32"),
        ("cpu", "0.32.1+cpu", "cpu_0_32"),
        ("cuda", "0.26.0", "cuda_0_26"),
        ("cuda", "0.24.3", "cuda_0_24"),
    ],
)
def test_an_adapter_is_found_by_platform_and_series(platform, version, name):
    assert find_adapter(platform, version).__name__ == f"kernels_patch.adapters.{name}"


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "dev"])
def test_a_vllm_of_another_series_is_refused_by_its_number_and_told_which_is_served(version):
    with pytest.raises(RefusalError, match=rf"vLLM {version} is not supported on cpu.*0\.32\.x"):
        find_adapter("cpu", version)


def test_a_platform_without_an_adapter_is_refused_by_its_name():
    with pytest.raises(RefusalError, match="the platform is 'rocm'"):
        find_adapter("rocm", "0.26.0")


@pytest.mark.parametrize("name", sorted(ADAPTERS.values()))
def test_every_adapter_names_what_it_overrides_and_uses(name):
    adapter = import_module(f"kernels_patch.adapters.{name}")
    for names in (adapter.OVERRIDDEN, adapter.USED):
        assert names
        for dotted in names:
            module, _, path = dotted.partition(":")
            assert module.startswith("vllm.")
            assert path


@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn about its own dependencies
def test_the_installed_vllm_has_the_interface_of_its_adapter():
    vllm = pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    adapter = find_adapter(current_platform.device_type, vllm.__version__)
    assert find_differences(adapter, read_installed) == []
    check_installed(adapter)


@pytest.mark.parametrize(("platform", "series"), sorted(ADAPTERS))
def test_each_adapter_agrees_with_its_own_release_s_source(platform, series):
    if SOURCES is None or not (root := Path(SOURCES) / series).exists():
        pytest.skip(f"no source of vLLM {series}: name its folder in KERNELS_PATCH_VLLM_SOURCES")
    adapter = find_adapter(platform, f"{series}.0")
    assert find_differences(adapter, read_source(root)) == []


def test_the_release_without_an_adapter_differs_where_the_docs_say_it_does():
    """vLLM 0.18.1, the base of the build in which the scheme was first described."""
    if SOURCES is None or not (root := Path(SOURCES) / "0.18.1").exists():
        pytest.skip("no source of vLLM 0.18.1: name its folder in KERNELS_PATCH_VLLM_SOURCES")
    with pytest.raises(RefusalError, match=r"vLLM 0\.18\.1 is not supported on cuda"):
        find_adapter("cuda", "0.18.1")
    fields = "vllm.v1.attention.backend:CommonAttentionMetadata"
    adapter = find_adapter("cuda", "0.26.0")
    assert find_differences(adapter, read_source(root)) == [
        f"{fields} has no seq_lens_cpu_upper_bound"
    ]


@pytest.mark.parametrize(
    "version", ["0.26.0rc1", "0.26.0+cu130", "0.26.1.dev3+g0a1b2c3", "0.26.0.post1", "0.26"]
)
def test_candidates_and_builds_of_a_series_are_its_own(version):
    assert find_adapter("cuda", version).__name__ == "kernels_patch.adapters.cuda_0_26"


def test_a_changed_parameter_a_lost_field_and_a_lost_function_are_each_named(tmp_path):
    (tmp_path / "engine.py").write_text(
        "class Backend:\n"
        "    size: int\n"
        "    @staticmethod\n"
        "    def shape(blocks, *, layout):\n"
        "        return blocks\n"
    )
    adapter = make_adapter(
        {"engine:Backend.shape": ("blocks", "heads"), "engine:Backend.stride": ()},
        {"engine:Backend": ("size", "dtype"), "engine:write": ()},
    )
    assert find_differences(adapter, read_source(tmp_path)) == [
        "engine:Backend.shape takes blocks, layout and not blocks, heads",
        "engine:Backend.stride is gone",
        "engine:Backend has no dtype",
        "engine:write is gone",
    ]


def test_source_and_installed_object_are_read_alike():
    source = read_source(Path(__file__).parents[2])
    for name in (
        "kernels_patch.gpu.steps:plan_runs",
        "kernels_patch.gpu.steps:Run",
        "kernels_patch.plan:RouteBatch",
        "kernels_patch.adapters:find_adapter",
    ):
        assert source(name) == read_installed(name) != ()
    for reader in (source, read_installed):
        assert reader("kernels_patch.plan:nothing") is None
        assert reader("kernels_patch.nothing:plan_step") is None


def test_an_interface_that_differs_refuses_to_serve():
    adapter = make_adapter({"kernels_patch.plan:route_of": ("query_len",)}, {})
    with pytest.raises(RefusalError, match=r"not the one that adapters\.made_up was written for"):
        check_installed(adapter)


def test_the_adapters_answer_to_nothing_but_the_backend():
    for name in sorted(ADAPTERS.values()):
        with pytest.raises(AttributeError, match="has no attribute 'Frontend'"):
            _ = import_module(f"kernels_patch.adapters.{name}").Frontend
