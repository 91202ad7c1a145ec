"""The CUDA backend under the classes of the releases that it serves, without a GPU.

Needs their sources: ``KERNELS_PATCH_VLLM_SOURCES`` names a folder that holds unpacked CUDA wheels
as ``0.26/vllm`` and ``0.24/vllm``. What the kernels compute is tested on a GPU (gpu/check.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels_patch.switches import REFUSED_EXIT_CODE

SOURCES = os.environ.get("KERNELS_PATCH_VLLM_SOURCES")
ROOT = Path(__file__).parents[2]
GUARD = """
import vllm.config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from kernels_patch.adapters import find_adapter
find_adapter("cuda", "{series}.0").register()
free = {{m.name for m in AttentionBackendEnum if not m.is_overridden()}}
assert free == {{"TORCH_SDPA"}}, free
print("looks", flush=True)
guard = AttentionBackendEnum.{chosen}.get_class()
assert guard.get_name() == "{chosen}" and guard.supports_head_size(64)
print("asks", flush=True)
guard.validate_configuration()
"""

WITHOUT_BINDINGS = """
import sys
sys.modules["cuda"] = None
import vllm.config
from kernels_patch.adapters import cuda, find_adapter
cuda.check_installed = lambda adapter: None  # FlashAttention's machine code is missing here too
find_adapter("cuda", "{series}.0").Backend
"""


@pytest.fixture(params=["0.24", "0.26"])
def series(request) -> str:
    if SOURCES is None or not (Path(SOURCES) / request.param / "vllm").exists():
        pytest.skip(f"no source of vLLM {request.param}: name it in KERNELS_PATCH_VLLM_SOURCES")
    return request.param


def run_under(series: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(SOURCES) / series), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=os.environ | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_rows_pages_and_counts_are_right_under_the_release_s_own_classes(series):
    done = run_under(series, str(Path(__file__).with_name("wiring.py")))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("wired\n")


def test_the_release_s_own_pass_puts_the_rotary_embedding_into_our_cache_write(series):
    done = run_under(series, str(Path(__file__).with_name("fusing.py")))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("fused\n")


@pytest.mark.parametrize(
    ("chosen", "last"),
    [("TRITON_ATTN", "asks"), ("TRITON_MLA", "looks"), ("FLASH_ATTN_DIFFKV", "looks")],
)
def test_another_backend_ends_the_server_when_it_is_chosen(series, chosen, last):
    """What vision towers use answers their questions. The others are not even looked up: latent
    attention, and models that bring their own, would be served by stock code unnoticed."""
    done = run_under(series, "-c", GUARD.format(series=series, chosen=chosen))
    assert done.returncode == REFUSED_EXIT_CODE, done.stderr[-2000:]
    assert done.stdout.endswith(f"{last}\n")
    assert "add --attention-backend CUSTOM --kv-cache-dtype int8_per_token_head" in done.stderr


def test_a_part_of_the_cuda_wheels_that_is_missing_ends_the_server_with_the_remedy(series):
    done = run_under(series, "-c", WITHOUT_BINDINGS.format(series=series))
    assert done.returncode == REFUSED_EXIT_CODE, done.stderr[-2000:]
    assert "kernels_patch: refusing to start: " in done.stderr
    assert "come with the CUDA wheels of PyTorch and vLLM; install those" in done.stderr
