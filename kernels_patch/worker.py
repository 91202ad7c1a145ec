"""The proof, read out of the live worker: which routes ran, and what the KV pages really are.

Start the server with ``VLLM_SERVER_DEV_MODE=1``, bound to a loopback address only (that mode opens
an endpoint that calls any worker method), and with
``--worker-extension-cls kernels_patch.worker.WorkerExtension``, then::

    curl -s -X POST http://127.0.0.1:8000/collective_rpc \\
        -H 'Content-Type: application/json' -d '{"method": "kernels_patch_report"}'

answers ``{"results": [REPORT, ...]}``, one REPORT for each worker:

``rank``             the worker's own, from 0; pipeline stage after stage
``world_size``       workers of this engine: tensor times pipeline parallelism
``version``          version of kernels_patch
``active``           true when every attention layer in this worker is served by the patch
``impl``             ``native``, ``torch`` or ``cuda``; null when no layer is patched
``fault``            the planted fault by name, else null
``layers``           attention layers that are patched; ``layer_names`` lists them
``model_layers``     attention layers of the model in this worker
``steps``            batches planned for the model; profiling runs are not counted
``routes``           {route: launches}: forwards of one layer for one route in one step, all layers
``route_steps``      {route: steps that held this route}
``tokens``           {route: query tokens planned}
``requests``         {route: requests planned, one for each step that a request took part in}
``per_layer``        {route: [launches of each layer]}
``layers_mismatch``  sentences, one for each layer and route whose launches differ from route_steps
``rope_writes``      [cache writes of each layer that rotated queries and keys too]; on GPUs only
``kv_cache``         of the tensors that the layers hold: dtype, bytes_per_token_per_layer (all KV
                     heads of this worker), block_size, num_blocks, num_kv_heads, head_dim, layers;
                     where the layers differ, a value is a sorted list; null before the cache is
                     allocated

Routes: first_chunk, prefix, decode; prefix_torch, decode_torch, fallback (see ``dispatch``);
prefix_unpacked (see ``gpu.steps``). All counts grow from the start of the process, on a GPU from
the capture of its graphs: read them twice and subtract. Proven is a route when
``routes[r] == layers * route_steps[r]`` and ``layers_mismatch`` is empty.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

import kernels_patch
from kernels_patch.counters import RouteCounters

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl


# Modules of patched layers; each keeps its process's counters as COUNTERS.
BACKENDS = ("kernels_patch.backend", "kernels_patch.gpu.backend")


class WorkerExtension:
    """Mixed into vLLM's worker; every public name here becomes a method of it."""

    def kernels_patch_report(self) -> dict[str, object]:
        """The report described at the top of this module."""
        from vllm.model_executor.layers.attention import Attention

        context = self.vllm_config.compilation_config.static_forward_context
        layers = {name: layer for name, layer in context.items() if isinstance(layer, Attention)}
        report = make_report(
            impls={name: layer.impl for name, layer in layers.items()},
            caches={name: layer.kv_cache for name, layer in layers.items()},
        )
        return {"rank": self.rank, "world_size": self.parallel_config.world_size, **report}


def make_report(
    impls: Mapping[str, AttentionImpl], caches: Mapping[str, torch.Tensor]
) -> dict[str, object]:
    """The report over attention layers, by name: their implementations and their caches
    [blocks, Hkv, block_size, width]."""
    patched = {name: impl for name, impl in impls.items() if _is_patched(impl)}
    counters = RouteCounters()
    impl = fault = None
    if patched:
        first = next(iter(patched.values()))
        counters = sys.modules[type(first).__module__].COUNTERS
        impl = first.impl_name
        fault = None if first.fault is None else first.fault.name
    return {
        "version": kernels_patch.__version__,
        "active": bool(patched) and len(patched) == len(impls) == len(counters.layer_names),
        "impl": impl,
        "fault": fault,
        "model_layers": len(impls),
        **counters.as_dict(),
        "kv_cache": describe_caches(
            [(impls[name].head_size, cache) for name, cache in caches.items()]
        ),
    }


def describe_caches(caches: Sequence[tuple[int, torch.Tensor]]) -> dict[str, object] | None:
    """What the live caches, each with its head size, are; None while none is allocated."""
    # vLLM gives every layer an empty one-dimensional placeholder until the cache is bound.
    allocated = [(head_dim, cache) for head_dim, cache in caches if cache.dim() == 4]
    if not allocated:
        return None
    facts = [
        {
            "dtype": str(cache.dtype).removeprefix("torch."),
            "num_blocks": cache.shape[0],
            "num_kv_heads": cache.shape[1],
            "block_size": cache.shape[2],
            "head_dim": head_dim,
            "bytes_per_token_per_layer": cache.shape[1] * cache.shape[3] * cache.element_size(),
        }
        for head_dim, cache in allocated
    ]
    described: dict[str, object] = {"layers": len(allocated)}
    for key in facts[0]:
        values = sorted({fact[key] for fact in facts})
        described[key] = values[0] if len(values) == 1 else values
    return described


def _is_patched(impl: object) -> bool:
    """Asked by the class's module, so that a stock worker imports no part of the backend."""
    return type(impl).__module__ in BACKENDS
