"""The attention backend that vLLM 0.32 loads in place of its CPU one: an INT8 KV cache.

vLLM's planner is told that a token and head takes 2*D + 8 bytes, and hands the cache over as int8
[blocks, Hkv, block_size, 2*D + 8], each (block, head) one contiguous page that ``layout`` divides.
``forward`` writes a step's keys and values before it attends them.

This module translates vLLM's words into ``plan``, ``dispatch`` and ``counters`` and knows no
arithmetic. It is imported only in a process that ``plugin`` has registered it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from kernels_patch.attention import Int8KVAttention, describe_engine, refuse_cache
from kernels_patch.counters import Planned, RouteCounters
from kernels_patch.dispatch import Kernels, Step, choose_kernels, prepare_step, run_step
from kernels_patch.faults import planted_fault
from kernels_patch.layout import PageLayout
from kernels_patch.plan import plan_step
from kernels_patch.support import BLOCK_TOKENS, engine_refusal, layer_refusal, page_refusal
from kernels_patch.switches import RefusalError, stopping_the_server

COUNTERS = RouteCounters()  # of this process: what the worker reports


class Int8KVBackend(AttentionBackend):
    """What vLLM asks a backend about itself."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        # vLLM looks the backend's enum member up by this name, and the member is the CPU's.
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Blocks outermost within a layer, heads next: a (block, head) page is contiguous.
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        with stopping_the_server():
            reason = page_refusal(head_dim=spec.head_size, head_dim_v=spec.head_size_v)
            if reason is not None:
                raise RefusalError(reason)
        layout = PageLayout(BLOCK_TOKENS, spec.head_size)
        return replace(spec, dtype=torch.int8, state_content_bytes=layout.bytes_per_token)

    @staticmethod
    def get_impl_cls() -> type[Int8KVImpl]:
        return Int8KVImpl

    @staticmethod
    def get_builder_cls() -> type[Int8KVMetadataBuilder]:
        return Int8KVMetadataBuilder


@dataclass
class Int8KVMetadata(AttentionMetadata):
    """One step, split by route, and the labels under which its launches are counted; shared by all
    layers."""

    step: Step
    labels: frozenset[str]


class Int8KVMetadataBuilder(AttentionMetadataBuilder[Int8KVMetadata]):
    """Plans every step once for a group of layers; one group's counts what it planned."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_cache(self, Int8KVMetadataBuilder, kv_cache_spec)
        self.kernels = choose_kernels(kv_cache_spec.head_size)
        self.fault = planted_fault()
        COUNTERS.add_layers(layer_names)
        self.counts_steps = COUNTERS.counts_steps(layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Int8KVMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(
                "kernels_patch serves causal attention only, and this batch asks for another mask"
            )
        batches = plan_step(
            common.query_start_loc_cpu.tolist(),
            common.seq_lens.tolist(),
            common.block_table_tensor,
        )
        if self.fault is not None and self.counts_steps:
            self.fault.delay_step()
        labels = self.kernels.labels
        if self.counts_steps:
            COUNTERS.count_step(
                [
                    Planned(labels[batch.route], batch.num_requests, batch.num_tokens)
                    for batch in batches
                ]
            )
        return Int8KVMetadata(
            step=prepare_step(self.kernels, common.slot_mapping, batches),
            labels=frozenset(labels[batch.route] for batch in batches),
        )


class Int8KVImpl(Int8KVAttention[Int8KVMetadata]):
    """One layer: writes its keys and values as INT8 pages and attends a planned step."""

    def find_refusal(
        self, config: VllmConfig, attn_type: str, features: Mapping[str, object]
    ) -> str | None:
        return engine_refusal(
            **describe_engine(config), block_size=config.cache_config.block_size
        ) or layer_refusal(
            head_dim=self.head_size,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            attn_type=attn_type,
            kv_cache_dtype=self.kv_cache_dtype,
            features=features,
        )

    def prepare(self, config: VllmConfig) -> None:
        self.kernels: Kernels = choose_kernels(self.head_size)
        self.impl_name = self.kernels.impl
        self.fault = planted_fault()
        spoils = self.fault is not None and self.fault.spoils_pages
        self.after_write = self.fault.after_write if spoils else None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Int8KVMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write key and value [T, Hkv, D], attend query [T, Hq, D]; ``output`` [T, Hq, D] is
        written and returned."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kernels_patch does not quantise attention outputs")
        if attn_metadata is None:  # vLLM's profiling and compilation runs have no step to attend
            return output
        tensors = (query, key, value, kv_cache)
        run_step(self.kernels, attn_metadata.step, *tensors, self.scale, output, self.after_write)
        for route in attn_metadata.labels:
            COUNTERS.count_launch(layer.layer_name, route)
        return output
