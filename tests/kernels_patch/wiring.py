"""Run by test_gpu_backend.py in an interpreter whose vLLM is a CUDA release's source.

The CUDA backend under that release's own classes, on a CPU: kernels are replaced by plain float
attention over the slots that were written, so what is tried is everything else: which rows, pages
and lengths each launch is given, what is written and what is left alone, what is counted.
"""
# ruff: noqa: E402 (a stand-in for NVRTC comes before the imports that need it)

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock, patch

for name in ("cuda", "cuda.bindings"):  # NVRTC's bindings: nothing is compiled here
    sys.modules.setdefault(name, MagicMock(spec=ModuleType, driver=MagicMock(), nvrtc=MagicMock()))

import torch

import_module("vllm.config")  # first, or the release's modules import each other in a circle
with suppress(ImportError):  # without its machine code, only its Python part is there from now on
    import_module("vllm.vllm_flash_attn.flash_attn_interface")

from vllm.config.compilation import CompilationConfig, CompilationMode
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode
from vllm.v1.worker.workspace import init_workspace_manager

from kernels_patch import attention, switches
from kernels_patch.gpu import backend
from kernels_patch.gpu.fusion import fuse_rope
from kernels_patch.worker import make_report

HEADS, KV_HEADS, DIM, PAGE = 6, 3, 64, 16
REQUESTS, LENGTH, PAGES = 4, 200, 60
LAYER = SimpleNamespace(layer_name="layers.0")
DTYPE = "int8_per_token_head"


class FloatKernels:
    """The kernels' places taken by attention over ``slots``: what was written, by slot."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def int8_write(self, key: Any, value: Any, cache: Any, slot_mapping: Any) -> None:
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                self.slots[slot] = (key[row], value[row])

    def int8_rope_write(
        self, query, key, value, positions, cos_sin_cache, is_neox, kv_cache, slot_mapping, ticks
    ) -> None:  # fmt: skip
        assert is_neox is True
        turn = torch.where(cos_sin_cache[positions, 0] > 0, 1, -1)[:, None, None]
        query *= turn
        key *= turn
        self.int8_write(key, value, kv_cache, slot_mapping)
        ticks.add_(1)

    def gather(self, pages: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = [int(pages[i // PAGE]) * PAGE + i % PAGE for i in range(length)]
        keys, values = zip(*(self.slots[slot] for slot in slots), strict=True)
        return torch.stack(keys), torch.stack(values)

    def int8_decode(
        self, q, cache, table, seq_lens, out, *, q_len, sm_scale, workspace, ticks
    ) -> None:  # fmt: skip
        assert len(q) == len(out) == len(seq_lens) * q_len
        for row, length in enumerate(seq_lens.tolist()):
            rows = slice(row * q_len, (row + 1) * q_len)
            out[rows] = attend(q[rows], *self.gather(table[row], length), sm_scale).to(out.dtype)
        if ticks is not None:
            ticks.add_(1)

    def dequantise(self, cache, table, seq_lens, starts, longest, key, value, ticks) -> None:
        assert longest == int(seq_lens.max())
        if ticks is not None:
            ticks.add_(1)
        for row, length in enumerate(seq_lens.tolist()):
            rows = slice(int(starts[row]), int(starts[row]) + length)
            key[rows], value[rows] = self.gather(table[row], length)

    def flash_attn_varlen_func(
        self, q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale,
        causal, out, fa_version,
    ) -> None:  # fmt: skip
        q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert (q_starts[-1], k_starts[-1]) == (len(q), len(k))
        for row in range(len(q_starts) - 1):
            rows = slice(*q_starts[row : row + 2])
            keys = slice(*k_starts[row : row + 2])
            assert rows.stop - rows.start <= max_seqlen_q
            assert keys.stop - keys.start <= max_seqlen_k
            out[rows] = attend(q[rows], k[keys], v[keys], softmax_scale).to(out.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last len(q) positions in float32."""
    k, v = (x.float().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    seen = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -1e30).softmax(-1), v)


class Engine:
    """Requests with known queries, keys and values, fed to the backend step by step."""

    def __init__(self) -> None:
        kernels = FloatKernels()
        for name in (
            "int8_write", "int8_rope_write", "int8_decode", "dequantise", "flash_attn_varlen_func",
        ):  # fmt: skip
            setattr(backend, name, getattr(kernels, name))
        self.made = []  # workspaces
        backend.DecodeWorkspace = lambda *sizes: self.made.append(sizes) or object()
        self.compiled: list[dict[str, Any]] = []
        backend.compile_kernels = lambda **shape: self.compiled.append(shape)
        torch.accelerator.empty_cache = lambda: None
        init_workspace_manager(torch.device("cpu"))
        self.config = SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=torch.bfloat16, max_model_len=512, enable_sleep_mode=False
            ),
            speculative_config=None,
            kv_transfer_config=None,
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                use_ubatching=False,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            compilation_config=compilation(),
        )
        attention.get_current_vllm_config = lambda: self.config
        self.impl, other = (
            backend.Int8KVCudaImpl(
                HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, DTYPE, None, "decoder", None
            )
            for _ in range(2)
        )
        # Made with the model, which the planner measures; later it would be behind its back.
        assert self.made == [(torch.device("cuda"), 8, KV_HEADS, 8 * HEADS // KV_HEADS, DIM)]
        assert other.workspace is self.impl.workspace
        layers = self.config.compilation_config.static_forward_context
        layers[LAYER.layer_name] = SimpleNamespace(impl=self.impl)
        self.spec = FullAttentionSpec(
            block_size=PAGE,
            num_kv_heads=KV_HEADS,
            head_size=DIM,
            dtype=torch.int8,
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        )
        self.builder = backend.Int8KVCudaMetadataBuilder(
            self.spec, [LAYER.layer_name], self.config, torch.device("cpu")
        )
        torch.manual_seed(0)
        self.q = torch.randn(REQUESTS, LENGTH, HEADS, DIM).bfloat16()
        self.k, self.v = torch.randn(2, REQUESTS, LENGTH, KV_HEADS, DIM).bfloat16()
        self.table = torch.randperm(PAGES)[: REQUESTS * 13].reshape(REQUESTS, 13).int()
        self.done = [0] * REQUESTS
        shape = backend.Int8KVCudaBackend.get_kv_cache_shape(PAGES, PAGE, KV_HEADS, DIM, DTYPE)
        self.cache = torch.zeros(shape, dtype=torch.int8)

    def describe(self, requests: list[int], lens: list[int], padding: int = 0) -> Any:
        starts = torch.tensor([0, *accumulate(lens), *[sum(lens)] * padding]).int()
        seq_lens = [self.done[r] + n for r, n in zip(requests, lens, strict=True)]
        seq_lens = torch.tensor([*seq_lens, *[0] * padding]).int()
        slots = [
            int(self.table[r, p // PAGE]) * PAGE + p % PAGE
            for r, n in zip(requests, lens, strict=True)
            for p in range(self.done[r], self.done[r] + n)
        ]
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            num_reqs=len(seq_lens),
            num_actual_tokens=sum(lens),
            max_query_len=max(lens),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.table[[*requests, *[0] * padding]],
            slot_mapping=torch.tensor(slots),
        )

    def step(
        self, requests: list[int], lens: list[int], padding: int = 0, fused: bool = False
    ) -> list[str]:
        """Write and attend; compare every row with float attention; the routes that were taken.

        ``fused``: queries and keys come with their signs turned, and the write turns them back."""
        common = self.describe(requests, lens, padding)
        spans = [slice(self.done[r], self.done[r] + n) for r, n in zip(requests, lens, strict=True)]
        q, k, v = (
            torch.cat([x[r, span] for r, span in zip(requests, spans, strict=True)])
            for x in (self.q, self.k, self.v)
        )
        metadata = self.builder.build(0, common)
        if fused:
            assert self.impl.fused_rope_kvcache_supported()
            angles, positions = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.ones(len(q)).long()
            self.impl.do_rope_and_kv_cache_update(
                LAYER, q.neg_(), k.neg_(), v, positions, angles, True, self.cache,
                common.slot_mapping,
            )  # fmt: skip
        else:
            self.impl.do_kv_cache_update(LAYER, k, v, self.cache, common.slot_mapping)
        padded = torch.cat([q, torch.full((3, HEADS, DIM), torch.nan).bfloat16()])
        out = torch.full_like(padded, torch.nan)
        self.impl.forward(LAYER, padded, k, v, self.cache, metadata, out)
        row = 0
        for r, span in zip(requests, spans, strict=True):
            want = attend(
                self.q[r, span], self.k[r, : span.stop], self.v[r, : span.stop], DIM**-0.5
            )
            torch.testing.assert_close(out[row : row + len(want)].float(), want, atol=0.02, rtol=0)
            row += len(want)
            self.done[r] = span.stop
        assert out[row:].isnan().all()
        return [placed.run.route for placed in metadata.runs]


def main() -> None:
    engine = Engine()
    page_bytes = engine.cache[0].numel()
    assert engine.spec.page_size_bytes == page_bytes == KV_HEADS * PAGE * (2 * DIM + 8)
    support = engine.builder.get_cudagraph_support(engine.config, engine.spec)
    assert support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert backend.Int8KVCudaBackend.indexes_kv_by_block_stride()
    blank = torch.ones(5, HEADS, DIM).bfloat16()
    engine.impl.forward(LAYER, blank, blank, blank, torch.tensor([]), None, blank)
    assert not blank.any()  # a profiling run: scratch is taken, nothing attended

    assert engine.step([0, 3], [40, 1]) == ["first_chunk", "decode"]
    assert engine.step([3, 0, 1], [1, 3, 100]) == ["decode", "prefix", "first_chunk"]
    assert engine.step([0, 1, 3, 2], [1, 1, 1, 30]) == ["decode", "first_chunk"]
    assert engine.step([0, 1, 2, 3], [5, 5, 20, 20]) == ["prefix", "prefix_unpacked"]
    assert engine.step([0, 1, 2, 3], [1, 1, 1, 1], padding=2, fused=True) == ["decode"]

    report = make_report({LAYER.layer_name: engine.impl}, {LAYER.layer_name: engine.cache})
    assert report["active"] is True
    assert report["impl"] == "cuda"
    assert report["fault"] is None
    assert report["steps"] == 5
    assert report["layers_mismatch"] == []
    assert report["rope_writes"] == [1]
    served = {route: count for route, count in report["routes"].items() if count}
    assert served == {"first_chunk": 3, "prefix": 2, "prefix_unpacked": 1, "decode": 4}
    assert report["kv_cache"]["bytes_per_token_per_layer"] == KV_HEADS * (2 * DIM + 8)

    assert len(engine.made) == 1
    assert [shape["fuses_rope"] for shape in engine.compiled] == [True]
    rope_is_fused_where_the_cache_update_is_in_the_graph()

    # The cache's second group of layers runs the same steps: they are planned, not counted again.
    second = "layers.1"
    layers = engine.config.compilation_config.static_forward_context
    layers[second] = layers[LAYER.layer_name]
    other = backend.Int8KVCudaMetadataBuilder(
        engine.spec, [second], engine.config, torch.device("cpu")
    )
    assert other.build(0, engine.describe([0, 1], [1, 1])).runs
    assert backend.COUNTERS.as_dict()["steps"] == 5
    common = engine.describe([0, 1], [1, 1])
    metadata = engine.builder.build_for_cudagraph_capture(common)
    (placed,) = metadata.runs
    assert placed.seq_lens.data_ptr() == common.seq_lens.data_ptr()  # what a replay reads
    assert placed.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    assert placed.seq_lens.tolist() == [1, 1]
    assert backend.COUNTERS.as_dict()["steps"] == 0  # counted anew after a capture
    with refusals() as reasons, suppress(SystemExit):
        other = replace(engine.spec, page_size_padded=engine.spec.page_size_bytes + 8)
        backend.Int8KVCudaMetadataBuilder(
            other, [LAYER.layer_name], engine.config, torch.device("cpu")
        )
    assert reasons[0].startswith("a block of the KV cache takes 6536 bytes, padded"), reasons
    with refusals() as reasons, suppress(SystemExit):
        other = replace(engine.spec, head_size_v=2 * DIM)
        backend.Int8KVCudaMetadataBuilder(
            other, [LAYER.layer_name], engine.config, torch.device("cpu")
        )
    assert reasons == ["keys have head size 64 and values 128: they must be equal"], reasons
    derived = type("LocalBuilder", (backend.Int8KVCudaMetadataBuilder,), {})
    with refusals() as reasons, suppress(SystemExit):
        derived(engine.spec, [LAYER.layer_name], engine.config, torch.device("cpu"))
    assert "derives from the patch's (LocalBuilder)" in reasons[0], reasons
    engine.config.model_config.enable_sleep_mode = True
    with refusals() as reasons, suppress(SystemExit):
        backend.Int8KVCudaImpl(HEADS, DIM, DIM**-0.5, KV_HEADS)
    assert reasons[0].startswith("sleep mode is on"), reasons
    print("wired")


def compilation(**changes: Any) -> CompilationConfig:
    """As a server's configuration leaves it where the fusion can work, but for ``changes``."""
    config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        custom_ops=["none", "+rotary_embedding"],
        splitting_ops=[],
        compile_ranges_endpoints=[4096],
    )
    config.pass_config.fuse_rope_kvcache = False
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def rope_is_fused_where_the_cache_update_is_in_the_graph() -> None:
    apart = ["vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"]
    for changes, endpoints in (
        ({}, [256, 4096]),
        ({"splitting_ops": apart, "use_inductor_graph_partition": True}, [256, 4096]),
        ({"custom_ops": ["all"], "compile_ranges_endpoints": [256, 512]}, [256, 512]),
        ({"compile_ranges_endpoints": [128]}, [128]),
    ):
        config = compilation(**changes)
        assert fuse_rope(config), changes
        assert fuse_rope(config), changes  # each layer asks again
        assert config.pass_config.fuse_rope_kvcache is True
        assert config.compile_ranges_endpoints == endpoints
    for changes in (
        {"splitting_ops": apart},
        {"custom_ops": ["none"]},
        {"custom_ops": ["all", "-rotary_embedding"]},
        {"mode": CompilationMode.NONE},
    ):
        config = compilation(**changes)
        assert not fuse_rope(config), changes
        assert config.pass_config.fuse_rope_kvcache is False
        assert config.compile_ranges_endpoints == [4096]


@contextmanager
def refusals() -> Iterator[list[str]]:
    """The reasons for which the process would have been ended within."""
    reasons: list[str] = []

    def leave(reason: str) -> NoReturn:
        reasons.append(reason)
        raise SystemExit

    with patch.object(switches, "stop_server", leave):
        yield reasons


if __name__ == "__main__":
    main()
