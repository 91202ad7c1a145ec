"""The attention backend of vLLM's CUDA builds under the name CUSTOM: INT8 KV pages on a Hopper GPU.

vLLM plans the cache as its own ``int8_per_token_head`` and hands it over as int8
[blocks, Hkv, block_size, 2 D + 8], each (block, head) one contiguous page that ``layout`` divides;
blocks may lie further apart (padded pages of hybrid models). vLLM writes the cache through
``do_kv_cache_update`` before it attends through ``forward``.

This module translates vLLM's words into ``steps``, ``counters`` and the kernels, and knows no
arithmetic. An adapter (kernels_patch/adapters) has compared the interface before it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

from kernels_patch.adapters.cuda import BACKEND_FLAGS
from kernels_patch.attention import Int8KVAttention, describe_engine, refuse_cache
from kernels_patch.counters import Planned
from kernels_patch.faults import planted_fault
from kernels_patch.gpu.ahead import compile_kernels
from kernels_patch.gpu.counters import DeviceRouteCounters
from kernels_patch.gpu.decode import DecodeWorkspace, int8_decode
from kernels_patch.gpu.fusion import fuse_rope
from kernels_patch.gpu.layout import UNIT_TOKENS, UnitLayout
from kernels_patch.gpu.prefix import dequantise
from kernels_patch.gpu.producer import int8_write
from kernels_patch.gpu.rope import int8_rope_write
from kernels_patch.gpu.shape import HEAD_DIMS, MAX_Q_LEN, MAX_ROWS, DecodeShape
from kernels_patch.gpu.steps import PREFIX_UNPACKED, Run, plan_runs
from kernels_patch.plan import DECODE, FIRST_CHUNK
from kernels_patch.support import engine_refusal, feature_refusal
from kernels_patch.switches import RefusalError, forced_impl, stop_server, stopping_the_server

COUNTERS = DeviceRouteCounters()  # of this process: what the worker reports
HOPPER = 9  # major compute capability
BULK_BYTES = 16  # what bulk copies are aligned to
FLASH_ATTENTION = 3


class Int8KVCudaBackend(AttentionBackend):
    """What vLLM asks a backend about itself."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["int8_per_token_head"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(UNIT_TOKENS)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major == HOPPER

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """vLLM's own checks; a server that fails one ends with our line, not with a traceback."""
        reasons = super().validate_configuration(*args, **kwargs)
        if reasons:
            stop_server(
                f"vLLM asks for attention that the patch does not serve ({'; '.join(reasons)}): a "
                f"Hopper GPU, head sizes {HEAD_DIMS}, causal attention in bfloat16 or float16 and "
                f"{BACKEND_FLAGS} are served"
            )
        return reasons

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        width = UnitLayout(block_size, head_size).bytes_per_token
        return (num_blocks, num_kv_heads, block_size, width)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        # Blocks outermost, also before layers: pages are found by the block's stride alone.
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @staticmethod
    def get_impl_cls() -> type[Int8KVCudaImpl]:
        return Int8KVCudaImpl

    @staticmethod
    def get_builder_cls() -> type[Int8KVCudaMetadataBuilder]:
        return Int8KVCudaMetadataBuilder


@dataclass(frozen=True)
class PlacedRun:
    """A run with its tensors on the device; starts int32 [N + 1] count from the run's first token,
    of queries and of keys, and are None where the decode kernel serves. ``scratch``: unpacked keys
    and values [tokens, Hkv, D], where history is unpacked."""

    run: Run
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    scratch: Sequence[torch.Tensor] = ()


@dataclass
class Int8KVCudaMetadata(AttentionMetadata):
    """One step cut into runs; shared by all layers, and so is the workspace."""

    runs: tuple[PlacedRun, ...]
    workspace: DecodeWorkspace


class Int8KVCudaMetadataBuilder(AttentionMetadataBuilder[Int8KVCudaMetadata]):
    """Plans every step once for a group of layers; one group's counts what it planned."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    reorder_batch_threshold: int = 1

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        self.impl = impl
        refuse_cache(self, Int8KVCudaMetadataBuilder, kv_cache_spec)
        with stopping_the_server():
            reason = block_refusal(kv_cache_spec.page_size_bytes)
            if reason is not None:
                raise RefusalError(reason)
            compile_kernels(
                device=device,
                dtype=impl.dtype,
                kv_heads=impl.num_kv_heads,
                group=impl.group,
                head_dim=impl.head_size,
                block_size=kv_cache_spec.block_size,
                longest_q=impl.short_len,
                fuses_rope=impl.fuses_rope,
            )
        COUNTERS.place(layer_names, device)
        self.counts_steps = COUNTERS.counts_steps(layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Int8KVCudaMetadata:
        metadata = self._plan(common_attn_metadata)
        if self.counts_steps:
            COUNTERS.count_step(
                [
                    Planned(placed.run.route, len(placed.run.seq_lens), placed.run.num_tokens)
                    for placed in metadata.runs
                ]
            )
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> Int8KVCudaMetadata:
        """A step that no scheduler planned; its launches must not count, nor its lengths matter."""
        COUNTERS.begin_anew()
        metadata = self._plan(common_attn_metadata)
        common_attn_metadata.seq_lens.fill_(1)  # else every capture attends the longest context
        return metadata

    def _plan(self, common: CommonAttentionMetadata) -> Int8KVCudaMetadata:
        if common.causal is not True:
            raise NotImplementedError(
                "kernels_patch serves causal attention only, and this batch asks for another mask"
            )
        # Exact, for all its name: speculative decoding, which blurs it, is refused.
        seq_lens = common.seq_lens_cpu_upper_bound
        runs = plan_runs(
            common.query_start_loc_cpu.tolist(),
            (common.seq_lens if seq_lens is None else seq_lens).tolist(),
            short_len=self.impl.short_len,
            scratch_tokens=self.impl.scratch_tokens,
        )
        placed = tuple(self._place(run, common) for run in runs)
        return Int8KVCudaMetadata(placed, self.impl.workspace)

    def _place(self, run: Run, common: CommonAttentionMetadata) -> PlacedRun:
        block_table = common.block_table_tensor[run.requests]
        seq_lens = common.seq_lens[run.requests]
        if run.route not in (FIRST_CHUNK, PREFIX_UNPACKED):
            return PlacedRun(run, block_table, seq_lens)
        query_starts = self._starts(run.query_lens)
        if run.route == FIRST_CHUNK:
            return PlacedRun(run, block_table, seq_lens, query_starts, query_starts)
        # One for all layers, as they run one after the other, and asked for once: host time.
        scratch = self.impl.take_scratch(sum(run.seq_lens))
        return PlacedRun(
            run, block_table, seq_lens, query_starts, self._starts(run.seq_lens), scratch
        )

    def _starts(self, lengths: Sequence[int]) -> torch.Tensor:
        starts = torch.tensor(
            [0, *accumulate(lengths)], dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        return starts.to(self.device, non_blocking=True)


class Int8KVCudaImpl(Int8KVAttention[Int8KVCudaMetadata]):
    """One layer: writes its keys and values as INT8 pages and attends a planned step."""

    impl_name = "cuda"
    fault = None  # faults are planted in the CPU's pages only

    def find_refusal(
        self, config: VllmConfig, attn_type: str, features: Mapping[str, object]
    ) -> str | None:
        return (
            _switch_refusal()
            or engine_refusal(
                **describe_engine(config),
                sleep=config.model_config.enable_sleep_mode,
                micro_batches=config.parallel_config.use_ubatching,
            )
            or feature_refusal(attn_type=attn_type, features=features)
        )

    def prepare(self, config: VllmConfig) -> None:
        self.group = self.num_heads // self.num_kv_heads
        # Chunks of up to so many tokens with history are read from the pages without unpacking.
        self.short_len = min(MAX_Q_LEN, MAX_ROWS // self.group)
        self.scratch_tokens = config.model_config.max_model_len
        self.dtype = config.model_config.dtype
        self.fuses_rope = fuse_rope(config.compilation_config)
        DecodeShape(self.head_size, self.group, 1, UNIT_TOKENS)  # raises what it does not serve
        self.workspace = shared_workspace(
            config.scheduler_config.max_num_seqs,
            self.num_kv_heads,
            self.short_len * self.group,
            self.head_size,
        )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key and value [T, Hkv, D] at slot_mapping [T]; padding has slot -1."""
        int8_write(key, value, kv_cache, slot_mapping)

    def fused_rope_kvcache_supported(self) -> bool:
        """vLLM's pass may put a rotary embedding and the cache update behind it into one call."""
        return True

    def do_rope_and_kv_cache_update(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate query [T, Hq, D] and key in place, and write as ``do_kv_cache_update`` does."""
        int8_rope_write(
            query,
            key,
            value,
            positions,
            cos_sin_cache,
            is_neox,
            kv_cache,
            layer_slot_mapping,
            ticks=COUNTERS.rope_tick(layer.layer_name),
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Int8KVCudaMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend query [T, Hq, D]; ``output`` [T, Hq, D] is written and returned."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kernels_patch does not quantise attention outputs")
        if attn_metadata is None:
            # A profiling run: what is taken now is what the planner leaves room for.
            self.take_scratch(self.scratch_tokens)
            return output.fill_(0)
        for placed in attn_metadata.runs:
            run = placed.run
            q, out = query[run.rows], output[run.rows]
            tick = COUNTERS.tick(layer.layer_name, run.route) if run.counts else None
            if run.route == FIRST_CHUNK:
                self._flash(placed, q, key[run.rows], value[run.rows], out)
                if tick is not None:
                    tick.add_(1)
            elif run.route == PREFIX_UNPACKED:
                dequantise(
                    kv_cache,
                    placed.block_table,
                    placed.seq_lens,
                    placed.key_starts,
                    max(run.seq_lens),
                    *placed.scratch,
                    ticks=tick,
                )
                self._flash(placed, q, *placed.scratch, out)
            else:
                int8_decode(
                    q,
                    kv_cache,
                    placed.block_table,
                    placed.seq_lens,
                    out,
                    q_len=1 if run.route == DECODE else run.query_lens[0],
                    sm_scale=self.scale,
                    workspace=attn_metadata.workspace,
                    ticks=tick,  # raised by the kernel itself, also when a graph replays it
                )
        return output

    def _flash(
        self,
        placed: PlacedRun,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """FlashAttention over keys and values that lie request after request."""
        run = placed.run
        flash_attn_varlen_func(
            q,
            keys,
            values,
            max_seqlen_q=max(run.query_lens),
            cu_seqlens_q=placed.query_starts,
            max_seqlen_k=max(run.query_lens if run.route == FIRST_CHUNK else run.seq_lens),
            cu_seqlens_k=placed.key_starts,
            softmax_scale=self.scale,
            causal=True,
            out=out,
            fa_version=FLASH_ATTENTION,
        )

    def take_scratch(self, n_tokens: int) -> list[torch.Tensor]:
        """Keys and values [n_tokens, Hkv, D] in the workspace that all layers share."""
        shape = (n_tokens, self.num_kv_heads, self.head_size)
        return current_workspace_manager().get_simultaneous(
            (shape, self.dtype), (shape, self.dtype)
        )


@cache
def shared_workspace(max_batch: int, kv_heads: int, rows: int, head_dim: int) -> DecodeWorkspace:
    """One for all layers of a shape, on the worker's device. Made with the first layer, so that
    vLLM's planner, which measures what loading the model takes, knows of it."""
    return DecodeWorkspace(torch.device("cuda"), max_batch, kv_heads, rows, head_dim)


def block_refusal(block_bytes: int) -> str | None:
    """Why blocks that lie ``block_bytes`` apart, padding included, cannot be read, or None."""
    if block_bytes % BULK_BYTES:
        return (
            f"a block of the KV cache takes {block_bytes} bytes, padded for other layers, and "
            f"{BULK_BYTES} are read at a time: unset KERNELS_PATCH for this model"
        )
    return None


def _switch_refusal() -> str | None:
    """Why the environment's further switches cannot be honoured on a GPU, or None."""
    if (wanted := forced_impl()) == "torch":
        return f"the implementation {wanted!r} is forced, which GPUs do not have: unset it"
    if (fault := planted_fault()) is not None:
        return f"the fault {fault.name!r} can be planted on a CPU only: unset it"
    return None
