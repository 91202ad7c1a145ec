"""Specs: what is accepted, and the sentence for each thing that is not."""

import pytest

from evalgate.errors import SpecError
from evalgate.spec import (
    build_calibration_spec,
    build_spec,
    compute_spec_sha256,
    parse_batched_tokens,
    parse_spec,
    render_spec,
    restore_secrets,
)

GOOD = """
name = "s"
[arms.baseline]
args = ["--max-num-batched-tokens", "4096"]
[arms.candidate]
args = ["--max-num-batched-tokens=4096"]
patch = "int8_kv"
[model]
name = "m"
path = "models/m"
[[load.buckets]]
name = "4K-8K"
min_tokens = 4096
max_tokens = 8192
weight = 0.2
prompts = 5
"""


def test_a_spec_resolves_to_the_same_spec_again():
    spec = parse_spec(GOOD, "s.toml")
    assert build_spec(render_spec(spec), "run.json") == spec
    assert compute_spec_sha256(render_spec(spec)) == compute_spec_sha256(render_spec(spec))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("prompts = 5", "promts = 5", r"unknown key 'load.buckets.0.promts'.*'prompts'"),
        ("[model]", "[modle]", r"unknown key 'modle'.*'model'"),
        ("weight = 0.2", 'weight = "x"', r"load.buckets.0.weight is 'x'"),
        ("=4096", "=2048", r"--max-num-batched-tokens differs.*baseline 4096, candidate 2048"),
        ('args = ["--max-num-batched-tokens", "4096"]', "args = []", r"arms.baseline.args lacks"),
        ('path = "models/m"', "", r"model.path is missing"),
        ("max_tokens = 8192", "max_tokens = 4096", r"min_tokens 4096 must be below"),
        ('patch = "int8_kv"', 'patch = "int4"', r"patch 'int4' is unknown; known: int8_kv"),
        ('=4096"]', '=4096", "-dp", "2"]', r"serves with 2 engines, .* the first one can be asked"),
        ("[arms.baseline]", "[arms.base]", r"needs one called 'baseline'"),
        (
            'args = ["--max-num-batched-tokens", "4096"]',
            'args = ["--port", "1", "--max-num-batched-tokens", "4096"]',
            r"'--port' is set by evalgate",
        ),
        (
            'args = ["--max-num-batched-tokens", "4096"]',
            'args = ["--served_model_name=x", "--max-num-batched-tokens", "4096"]',
            r"'--served_model_name=x' is set by evalgate",
        ),
        (
            'args = ["--max-num-batched-tokens", "4096"]',
            'args = ["--hf-token", "t0p", "--max-num-batched-tokens", "4096"]',
            r"--hf-token shows its value",
        ),
        ('name = "s"', "name = ", r"not TOML"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_to_do(old, new, sentence):
    assert old in GOOD
    with pytest.raises(SpecError, match=sentence):
        parse_spec(GOOD.replace(old, new, 1), "s.toml")


def test_attach_and_launch_exclude_each_other():
    text = GOOD.replace("[arms.baseline]", '[arms.baseline]\nbase_url = "http://127.0.0.1:8000"', 1)
    with pytest.raises(SpecError, match="base_url attaches"):
        parse_spec(text, "s.toml")


def test_one_arm_alone_may_have_any_name():
    text = GOOD.split("[arms.candidate]")[0].replace("baseline", "bf16")
    spec = parse_spec(text + "[model]" + GOOD.split("[model]")[1], "s.toml")
    assert list(spec.arms) == ["bf16"]


def test_buckets_are_half_open():
    bucket = parse_spec(GOOD, "s.toml").load.buckets[0]
    assert bucket.holds(4096)
    assert not bucket.holds(8192)


def test_calibration_puts_the_baseline_in_both_arms():
    spec = build_calibration_spec(parse_spec(GOOD, "s.toml"))
    assert spec.arms["candidate"] == spec.arms["baseline"]


def test_batched_tokens_are_read_in_both_spellings():
    assert parse_batched_tokens(["--max-num-batched-tokens", "512"]) == 512
    assert parse_batched_tokens(["--max-num-batched-tokens=512"]) == 512
    assert parse_batched_tokens(["--max-num-batched-tokens", "many"]) is None
    assert parse_batched_tokens([]) is None


def test_a_password_in_an_address_is_refused_unshown():
    data = {"name": "s", "model": {"name": "m"}, "load": {"buckets": []}}
    with pytest.raises(SpecError, match="api_key_env") as caught:
        build_spec({**data, "arms": {"baseline": {"base_url": "http://me:t0p@far.example"}}}, "s")
    assert "t0p" not in str(caught.value)


def test_a_secret_is_not_stored_and_is_inherited_when_a_run_is_resumed():
    env = 'env = { HF_TOKEN = "t0p", TOKENIZERS_PARALLELISM = "false" }\n[arms.candidate]'
    spec = parse_spec(GOOD.replace("[arms.candidate]", env), "s.toml")
    stored = build_spec(render_spec(spec), "run.json")
    assert "t0p" not in str(render_spec(spec))
    assert stored.arms["baseline"].env["TOKENIZERS_PARALLELISM"] == "false"
    with pytest.raises(SpecError, match="export HF_TOKEN"):
        restore_secrets(stored, {})
    restored = restore_secrets(stored, {"HF_TOKEN": "t0p"})
    assert restored.arms["baseline"].env == {"TOKENIZERS_PARALLELISM": "false"}
