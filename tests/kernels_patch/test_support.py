import pytest

from kernels_patch.support import engine_refusal, layer_refusal, page_refusal

LAYER = {
    "head_dim": 64,
    "dtype": "bfloat16",
    "attn_type": "decoder",
    "kv_cache_dtype": "auto",
    "features": {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": 0.0},
}
ENGINE = {
    "block_size": 128,
    "speculative": False,
    "context_parallel": 1,
    "connector": False,
}


def test_a_plain_layer_of_a_plain_engine_is_served():
    assert layer_refusal(**LAYER) is None
    assert layer_refusal(**LAYER | {"dtype": "float32", "kv_cache_dtype": "float32"}) is None
    assert engine_refusal(**ENGINE) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 68}, "head size 68 is not a multiple of 8"),
        ({"dtype": "float16"}, "give --dtype float32 or --dtype bfloat16"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype is fp8"),
        ({"features": {"sliding_window": 4096}}, "a sliding window"),
        ({"features": {"alibi_slopes": [0.5]}}, "ALiBi"),
        ({"features": {"logits_soft_cap": 30.0}}, "a soft cap on logits"),
        ({"features": {"sinks": [0.0]}}, "attention sinks"),
        ({"features": {"chunk_lookback": 1}}, "the attention option 'chunk_lookback'"),
    ],
)
def test_a_layer_that_cannot_be_served_is_refused_by_what_it_has(change, reason):
    assert reason in layer_refusal(**LAYER | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 48}, "--block-size is 48: give a multiple of 32"),
        ({"speculative": True}, "speculative decoding"),
        ({"context_parallel": 2}, "context parallelism is 2"),
        ({"connector": True}, "leave --kv-transfer-config and --kv-offloading-size off"),
        ({"sleep": True}, "leave --enable-sleep-mode off"),
        ({"micro_batches": True}, "leave --enable-dbo and --ubatch-size off"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_by_its_option(change, reason):
    assert reason in engine_refusal(**ENGINE | change)


def test_keys_and_values_of_different_head_sizes_share_no_page():
    assert page_refusal(head_dim=64, head_dim_v=64) is None
    assert "head size 192 and values 128" in page_refusal(head_dim=192, head_dim_v=128)
