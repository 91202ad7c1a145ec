"""What the patch cannot serve, asked before a server is ready rather than found in its answers.

Pure: plain values in, sentences out. ``backend`` stops the server on the first sentence.
"""

from __future__ import annotations

from collections.abc import Mapping

HEAD_DIM_MULTIPLE = 8
BLOCK_TOKENS = 32
DTYPES = ("float32", "bfloat16")

# Features of one attention layer that change its mathematics or where its keys come from.
LAYER_FEATURES = {
    "alibi_slopes": "ALiBi",
    "sliding_window": "a sliding window",
    "logits_soft_cap": "a soft cap on logits",
    "sinks": "attention sinks",
    "kv_sharing_target_layer_name": "a KV cache shared between layers",
}


def feature_refusal(*, attn_type: str, features: Mapping[str, object]) -> str | None:
    """Why a layer's kind of attention cannot be served, on whatever device, or None.

    ``attn_type`` is vLLM's name; ``features`` maps names to their values, where None (and a soft
    cap of 0) means that the layer does not have the feature. A name that is not in LAYER_FEATURES
    is refused too: it is one that nobody looked at.
    """
    if attn_type != "decoder":
        return f"the model has {attn_type} attention: only causal decoder attention is served"
    for name, value in features.items():
        if value is None or (name == "logits_soft_cap" and value == 0):
            continue
        return f"the model uses {LAYER_FEATURES.get(name, f'the attention option {name!r}')}"
    return None


def layer_refusal(
    *,
    head_dim: int,
    dtype: str,
    attn_type: str,
    kv_cache_dtype: str,
    features: Mapping[str, object],
) -> str | None:
    """Why an attention layer cannot be served on a CPU, or None.

    ``dtype`` is torch's name; the last two are ``feature_refusal``'s.
    """
    if (reason := feature_refusal(attn_type=attn_type, features=features)) is not None:
        return reason
    if head_dim % HEAD_DIM_MULTIPLE:
        return f"the model's head size {head_dim} is not a multiple of {HEAD_DIM_MULTIPLE}"
    if dtype not in DTYPES:
        return f"the model runs in {dtype}: give --dtype float32 or --dtype bfloat16"
    if kv_cache_dtype not in ("auto", dtype):
        return (
            f"--kv-cache-dtype is {kv_cache_dtype}: the patch sets its own page format, leave the "
            "option at auto"
        )
    return None


def page_refusal(*, head_dim: int, head_dim_v: int) -> str | None:
    """Why keys and values of these head sizes cannot share a page, or None."""
    if head_dim != head_dim_v:
        return f"keys have head size {head_dim} and values {head_dim_v}: they must be equal"
    return None


def engine_refusal(
    *,
    speculative: bool,
    context_parallel: int,
    connector: bool,
    micro_batches: bool = False,
    sleep: bool = False,
    block_size: int = BLOCK_TOKENS,
) -> str | None:
    """Why an engine's configuration cannot be served, or None.

    ``context_parallel`` is the larger one of decode's and prefill's; ``connector``: pages are
    handed to or taken from another place than this engine's cache. GPUs only: ``micro_batches``
    (halves of a step run side by side) and ``sleep`` (memory can be given back while the server
    lives). ``block_size`` is the CPU's.
    """
    if block_size % BLOCK_TOKENS:
        return f"--block-size is {block_size}: give a multiple of {BLOCK_TOKENS}"
    if speculative:
        return "speculative decoding is on: its draft steps are not counted, switch it off"
    if context_parallel > 1:
        return f"context parallelism is {context_parallel}: leave decode's and prefill's at 1"
    if connector:
        return (
            "a KV connector or offloading is configured, and who else reads or writes these pages "
            "may have their bytes in another order: leave --kv-transfer-config and "
            "--kv-offloading-size off"
        )
    if micro_batches:
        return (
            "steps run as overlapping micro-batches, which would share one workspace: leave "
            "--enable-dbo and --ubatch-size off"
        )
    if sleep:
        return (
            "sleep mode is on, and decode's arrival counters and the proof's launch counters would "
            "not outlive a sleep: leave --enable-sleep-mode off"
        )
    return None
