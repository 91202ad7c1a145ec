"""Run by test_gpu_backend.py in an interpreter whose vLLM is a CUDA release's source.

vLLM's own fusion pass over a model of two layers that rotate queries and keys as Llama does,
compiled on a CPU: that it finds them, and what it calls the backend with. vLLM's operations are in
its machine code, so those that its passes name are declared here, and the one that runs is made up.
"""
# ruff: noqa: E402 (stand-ins come before the imports that need them)

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

for name in ("cuda", "cuda.bindings"):  # NVRTC's bindings: nothing of ours is compiled here
    sys.modules.setdefault(name, MagicMock(spec=ModuleType, driver=MagicMock(), nvrtc=MagicMock()))
OPERATIONS = torch.library.Library("_C", "FRAGMENT")
OPERATIONS.define(
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()"
)
for name in (
    "static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant",
    "silu_and_mul", "rms_norm", "fused_add_rms_norm", "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant", "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant", "silu_and_mul_quant", "fused_qk_norm_rope",
):  # fmt: skip
    OPERATIONS.define(f"{name}(Tensor! result, Tensor input, Tensor scale, int[2] group_shape)->()")

from vllm.platforms.interface import UnspecifiedPlatform

UnspecifiedPlatform.device_type, UnspecifiedPlatform.dispatch_key = "cpu", "CPU"
config_module = import_module("vllm.config")
with suppress(ImportError):  # without its machine code, only its Python part is there from now on
    import_module("vllm.vllm_flash_attn.flash_attn_interface")

from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from vllm.compilation.passes.fusion import rope_kvcache_fusion
from vllm.compilation.passes.utility import (
    fix_functionalization,
    noop_elimination,
    post_cleanup,
    scatter_split_replace,
    split_coalescing,
)
from vllm.config.compilation import CompilationConfig, CompilationMode
from vllm.model_executor.layers.attention import attention
from vllm.utils.torch_utils import _encode_layer_name

from kernels_patch.gpu import backend
from kernels_patch.gpu.fusion import fuse_rope

HEADS, KV_HEADS, DIM, HIDDEN, TOKENS = 6, 3, 64, 32, 5
SIZES = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
NAMES = ("layers.0", "layers.1")
calls: list[Any] = []


def rotate(q: Any, k: Any) -> None:
    """Stands in for a rotation: in place, and not the same for both."""
    q.mul_(2)
    k.mul_(3)


def vllm_rotary(positions, query, key, head_size, cos_sin_cache, is_neox, offset=0, inverse=False):
    calls.append("rotary")
    rotate(query, key)


def our_rope_write(query, key, value, positions, angles, is_neox, cache, slots, ticks) -> None:
    calls.append((query.shape, key.stride(), value.stride(), positions.shape, is_neox))
    rotate(query, key)
    ticks.add_(1)


@torch.library.custom_op("fusing::attend", mutates_args=["out"])
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, after: torch.Tensor
) -> None:
    out.copy_(q + (k + v).sum(1, keepdim=True))


OPERATIONS.impl("rotary_embedding", vllm_rotary, "CPU")
torch.library.register_fake("_C::rotary_embedding", lambda *_: None)
attend.register_fake(lambda *_: None)


def layer(x: Any, weight: Any, positions: Any, angles: Any, is_neox: bool, name: Any) -> Any:
    q, k, v = (x @ weight).split(SIZES, dim=-1)
    torch.ops._C.rotary_embedding(positions, q, k, DIM, angles, is_neox)
    out = torch.empty_like(q)
    q, k, v, wide = (y.view(-1, y.shape[-1] // DIM, DIM) for y in (q, k, v, out))
    after = torch.ops.vllm.unified_kv_cache_update(k, v, name)
    torch.ops.fusing.attend(q, k, v, wide, after)
    return out


def make_config() -> SimpleNamespace:
    """A server's configuration with two attention layers, where the fusion can work."""
    impl = backend.Int8KVCudaImpl.__new__(backend.Int8KVCudaImpl)
    context = {}
    for name in NAMES:
        context[name] = made = attention.Attention.__new__(attention.Attention)
        torch.nn.Module.__init__(made)
        made.layer_name, made.impl, made.kv_cache = name, impl, torch.zeros(1)
        made.num_heads, made.num_kv_heads = HEADS, KV_HEADS
        made.head_size = made.head_size_v = DIM
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        custom_ops=["none", "+rotary_embedding"],
        splitting_ops=[],
        compile_ranges_endpoints=[4096],
    )
    compilation.static_forward_context.update(context)
    return SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        device_config=SimpleNamespace(device="cpu"),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        compile_debug_dump_path=lambda: None,
    )


def main() -> None:
    config = make_config()
    assert fuse_rope(config.compilation_config)
    backend.COUNTERS.place(NAMES, "cpu")
    backend.int8_rope_write = our_rope_write
    backend.int8_write = lambda *_: calls.append("write")
    for module in (attention, rope_kvcache_fusion):
        module.get_attention_context = lambda name: (
            None, config.compilation_config.static_forward_context[name],
            torch.zeros(1), torch.zeros(TOKENS, dtype=torch.int64),
        )  # fmt: skip
    with config_module.set_current_vllm_config(config, check_compile=False):
        fusion = rope_kvcache_fusion.RopeKVCacheFusionPass(config)
        passes = [  # in the order of vLLM's own pass manager
            noop_elimination.NoOpEliminationPass(config),
            split_coalescing.SplitCoalescingPass(config),
            scatter_split_replace.ScatterSplitReplacementPass(config),
            fusion,
            post_cleanup.PostCleanupPass(config),
            fix_functionalization.FixFunctionalizationPass(config),
        ]
    ranges = config.compilation_config.get_compile_ranges()
    assert [fusion.is_applicable_for_range(r) for r in ranges] == [True, False]

    class Passes(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for one in passes:
                one(graph)

        def uuid(self) -> None:
            return None

    torch.manual_seed(0)
    x, weight, back = (
        torch.randn(*shape).bfloat16()
        for shape in ((TOKENS, HIDDEN), (HIDDEN, sum(SIZES)), (SIZES[0], HIDDEN))
    )
    positions, angles = torch.arange(TOKENS), torch.zeros(9, DIM).bfloat16()
    names = [_encode_layer_name(name) for name in NAMES]

    def model(x: Any, positions: Any) -> Any:
        y = layer(x, weight, positions, angles, True, names[0])
        return layer(y @ back, weight, positions, angles, False, names[1])

    want = model(x, positions)
    assert calls == ["rotary", "write"] * 2
    calls.clear()
    with inductor_config.patch(
        post_grad_custom_post_pass=Passes(),
        fx_graph_cache=False,
        enable_auto_functionalized_v2=False,
    ):
        got = torch.compile(model, fullgraph=True, dynamic=True)(x, positions)
    strides = (sum(SIZES), DIM, 1)
    assert calls == [
        ((TOKENS, HEADS, DIM), strides, strides, (TOKENS,), is_neox) for is_neox in (True, False)
    ], calls
    assert torch.equal(got, want)
    assert backend.COUNTERS.as_dict()["rope_writes"] == [1, 1]
    print("fused")


if __name__ == "__main__":
    main()
