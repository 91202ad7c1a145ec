"""What counts as a secret by its name, and is never stored."""

from __future__ import annotations

import pytest

from evalgate.redaction import is_secret_variable, redact_args, redact_env


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("VLLM_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("DB_PASSWORD", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("VLLM_CPU_KVCACHE_SPACE", False),
        ("MONKEY", False),
    ],
)
def test_a_variable_is_a_secret_by_the_end_of_its_name(name: str, secret: bool) -> None:
    assert is_secret_variable(name) is secret


def test_only_secrets_are_removed() -> None:
    assert redact_env({"HF_TOKEN": "a", "OMP_NUM_THREADS": "1"}) == {
        "HF_TOKEN": "(removed)",
        "OMP_NUM_THREADS": "1",
    }
    assert redact_args(["--hf_token", "a", "--api-key=b", "--tokenizer", "c"]) == [
        "--hf_token",
        "(removed)",
        "--api-key=(removed)",
        "--tokenizer",
        "c",
    ]
    assert redact_args(["--hf-token", "a", "--api_key=b"]) == [
        "--hf-token", "(removed)", "--api_key=(removed)",
    ]  # fmt: skip


def test_batched_tokens_and_tokenizers_are_no_secrets() -> None:
    args = ["--max-num-batched-tokens", "512", "--tokenizer", "t", "--enable-prompt-tokens-details"]
    assert redact_args(args) == args
