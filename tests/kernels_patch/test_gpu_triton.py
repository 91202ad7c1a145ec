"""The GPU's Triton kernels under Triton's interpreter, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_pages_hold_the_reference_s_bytes_and_unpack_to_what_they_hold():
    pytest.importorskip("triton", reason="Triton comes with vLLM's CPU build")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("interpreted.py"))],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("interpreted\n")
