"""A failed start is explained by its cause, not by the last line of a traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evalgate.server_log import explain_log, find_last_line

ECHO = (
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}\n"
)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "vllm: error: unrecognized arguments: --no-such-flag 3",
            "arguments --no-such-flag 3: correct",
        ),
        (
            "api_server.py: error: argument --dtype: invalid choice: 'int3'",
            "argument --dtype: invalid choice: 'int3'",
        ),
        (
            "(APIServer pid=1)   Value error, User-specified max_model_len (999999) is greater "
            "than the derived max_model_len (max_position_embeddings=2048.0 or ...).",
            "--max-model-len 999999 is more than the model's own 2048.0",
        ),
        (
            "(EngineCore pid=25) ERROR 08-18 02:57:12 [core.py:1231] ValueError: No available "
            "memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "no memory is left for the KV cache",
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (8192), "
            "(3.50 GiB KV cache is needed, which is larger than the available KV cache memory "
            "(1.25 GiB).",
            "needs 3.50 GiB of KV cache and 1.25 GiB is there",
        ),
        (
            "ValueError: Free memory on device cuda:0 (31.44/47.38 GiB) on startup is less than "
            "desired GPU memory utilization (0.95, 45.01 GiB).",
            "31.44 of 47.38 GiB memory are free, less than the share 0.95",
        ),
        (
            "ValueError: Available memory on node 0 (9.5/23.0 GiB) on startup is less than desired "
            "CPU memory utilization (0.92, 21.2 GiB). On the CPU backend",
            "9.5 of 23.0 GiB memory are free, less than the share 0.92",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "memory ran out"),
        (
            "OSError: [Errno 98] Address already in use",
            "port was taken by another process",
        ),
        (
            "(EngineCore pid=7) RuntimeError: kernels_patch: head size 100 is no multiple of 8",
            "the plug-in refused: kernels_patch: head size 100 is no multiple of 8",
        ),
        ("ModuleNotFoundError: No module named 'torch'", "No module named 'torch': install it"),
        (
            "/usr/bin/python: No module named vllm.entrypoints",
            "No module named vllm.entrypoints: set the arm's python",
        ),
        (
            "OSError: /no/model is not a local folder and is not a valid model identifier listed",
            "there is no model /no/model: correct model.path",
        ),
        (
            "ValueError: Invalid repository ID or local directory specified: '/no/model'.",
            "'/no/model'): correct model.path",
        ),
    ],
)
def test_a_known_cause_is_told_with_its_remedy(line: str, words: str) -> None:
    cause = explain_log(f"INFO 08-18 02:57:10 [x.py:1] hello\n{line}\nTraceback:\n{ECHO}")
    assert cause is not None
    assert words in cause


def test_an_unknown_cause_is_the_last_error_that_is_not_an_echo() -> None:
    log = f"(EngineCore pid=2) ERROR 08-18 02:57:12 [core.py:1] x.OddError: a {{b}} c\n{ECHO}"
    assert explain_log(log) == "x.OddError: a {b} c"
    assert find_last_line(log) == "x.OddError: a {b} c"


def test_a_log_without_errors_explains_nothing() -> None:
    assert explain_log("INFO 08-18 02:57:10 [x.py:1] hello\n") is None
    assert find_last_line("INFO 08-18 02:57:10 [x.py:1] hello\n\n") == "hello"
    assert find_last_line("") is None


@pytest.mark.skipif("EVALGATE_SHARED" not in os.environ, reason="needs real logs (EVALGATE_SHARED)")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unrecognized_argument", "does not know the arguments --no-such-flag 3"),
        ("no_kv_cache_memory", "no memory is left for the KV cache"),
        ("max_model_len_rejected", "--max-model-len 999999 is more than the model's own 2048"),
    ],
)
def test_real_logs_are_explained(name: str, words: str) -> None:
    folder = Path(os.environ["EVALGATE_SHARED"], "data", "vllm_bench_serve")
    (path,) = folder.glob(f"vllm_serve_{name}_*.log")
    assert words in (explain_log(path.read_text()) or "")
