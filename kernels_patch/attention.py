"""What an attention layer of the patch is on every device: vLLM's constructor, and the refusals.

vLLM builds one implementation a layer from a dozen options. Here they become attributes, and an
option that the patch cannot serve ends the server with a sentence. Kernels, pages and routes are
the devices' own (``backend`` for CPUs, ``gpu.backend``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from kernels_patch.support import page_refusal
from kernels_patch.switches import RefusalError, stopping_the_server

M = TypeVar("M", bound=AttentionMetadata)


def describe_engine(config: VllmConfig) -> dict[str, Any]:
    """What ``support.engine_refusal`` asks about an engine on every device."""
    parallel = config.parallel_config
    return {
        "speculative": config.speculative_config is not None,
        "context_parallel": max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        ),
        "connector": config.kv_transfer_config is not None,
    }


def refuse_cache(builder: AttentionMetadataBuilder, own: type, spec: AttentionSpec) -> None:
    """End the server where a group of layers is not what ``own`` builds for.

    vLLM makes attention of other kinds (local chunks, static sinks, bidirectional prefixes) from a
    backend by deriving from its builder and changing what the builder is told of a batch.
    """
    with stopping_the_server():
        if type(builder) is not own:
            raise RefusalError(
                f"the model has a kind of attention that vLLM derives from the patch's "
                f"({type(builder).__name__}) and that was never tried: unset KERNELS_PATCH for it"
            )
        reason = page_refusal(head_dim=spec.head_size, head_dim_v=spec.head_size_v)
        if reason is not None:
            raise RefusalError(reason)


class Int8KVAttention(AttentionImpl[M]):
    """One layer. A device says what it refuses and what it prepares."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **further_options: object,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        config = get_current_vllm_config()
        features = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **further_options,
        }
        with stopping_the_server():
            reason = self.find_refusal(config, AttentionType(attn_type).value, features)
            if reason is not None:
                raise RefusalError(reason)
            self.prepare(config)

    @abstractmethod
    def find_refusal(
        self, config: VllmConfig, attn_type: str, features: Mapping[str, object]
    ) -> str | None:
        """Why this layer cannot be served, or None; the last two as ``support`` takes them."""

    @abstractmethod
    def prepare(self, config: VllmConfig) -> None:
        """Whatever else the layer needs; a failure ends the server too."""
