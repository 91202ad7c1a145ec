"""Do answers stay, and routes prove themselves, in each way in which vLLM serves the patch?

Every mode is one offline engine in a process of its own, which answers the same requests greedily:
eight of very different lengths at once (first chunks, later chunks and decodes in one step), and
eight long ones for many tokens. Their tokens are held against stock vLLM's served in the same form,
and the workers' reports against themselves: launches are layers times steps, in each layer alike,
and fallback is 0. A rounded cache may well choose another token somewhere: the table counts the
answers that are the same to their end, and has the largest difference of a log-probability before
the first other token. Not about speed; modes may run side by side. Exit code 1 when a mode lacks
its proof.

    python benchmarks/served_modes.py [--model FOLDER] [--modes NAME ...] [--side-by-side N]

Tensor and pipeline modes want two devices (on CPUs, two cores). Where two do not divide the model's
KV heads, those modes serve a copy with further heads of zeros, which computes the same function.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evalgate.embedded import ensure_packaged_model
from evalgate.errors import EvidenceError
from evalgate.tasks import export_task
from evalgate.workers import merge_reports

SWITCH = {"KERNELS_PATCH": "int8_kv"}
# NVLink multicast and vLLM's own all-reduce are left out: NCCL does the sums.
PLAIN_SUMS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
FUSED_SUMS = {"fuse_allreduce_rms": False, "fuse_gemm_comms": False, "enable_sp": False}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
SPLIT = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
STAGED = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
ONE_OPERATION = ["+rotary_embedding"]
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Mode:
    """``engine``: arguments of vllm.LLM beside the common ones; ``against``: the mode that is the
    measure of its answers; ``pages``: share of the pages that all long requests would need."""

    against: str | None
    engine: Mapping[str, Any] = field(default_factory=dict)
    patched: bool = True
    pages: float | None = None

    @property
    def workers(self) -> int:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        return int(self.engine.get(sizes[0], 1)) * int(self.engine.get(sizes[1], 1))


def graphs(**more: Any) -> dict[str, Any]:
    return {"compilation_config": GRAPHS, **more}


def compiled(**more: Any) -> dict[str, Any]:
    return {"compilation_config": more}


CUDA = {
    "stock": Mode(None, graphs(), patched=False),
    "stock_int8": Mode("stock", graphs(kv_cache_dtype="int8_per_token_head"), patched=False),
    "graphs": Mode("stock", graphs()),
    "eager": Mode("stock", {"enforce_eager": True}),
    "prefix_caching": Mode("stock", graphs(enable_prefix_caching=True)),
    "few_pages": Mode("stock", graphs(), pages=0.8),
    "caching_few_pages": Mode("stock", graphs(enable_prefix_caching=True), pages=0.8),
    "compiled": Mode("stock"),
    "rope": Mode(
        "stock",
        compiled(custom_ops=ONE_OPERATION, splitting_ops=[], cudagraph_mode="FULL_DECODE_ONLY"),
    ),
    "rope_partition": Mode(
        "stock", compiled(custom_ops=ONE_OPERATION, use_inductor_graph_partition=True)
    ),
    "stock_float16": Mode(None, graphs(dtype="float16"), patched=False),
    "float16": Mode("stock_float16", graphs(dtype="float16")),
    "stock_tensor": Mode("stock", graphs(**SPLIT), patched=False),
    "tensor": Mode("stock_tensor", graphs(**SPLIT)),
    "tensor_compiled": Mode("stock_tensor", {**compiled(pass_config=FUSED_SUMS), **SPLIT}),
    "pipeline": Mode("stock", graphs(**STAGED)),
}
CPU = {
    "stock": Mode(None, {"enforce_eager": True}, patched=False),
    "eager": Mode("stock", {"enforce_eager": True}),
    "prefix_caching": Mode("stock", {"enforce_eager": True, "enable_prefix_caching": True}),
    "few_pages": Mode("stock", {"enforce_eager": True}, pages=0.8),
    "stock_tensor": Mode("stock", {"enforce_eager": True, **SPLIT}, patched=False),
    "tensor": Mode("stock_tensor", {"enforce_eager": True, **SPLIT}),
    # Under enforce_eager the runner of vLLM 0.32 fails an assertion at the second stage.
    "pipeline": Mode("stock", {"compilation_config": {"mode": 2, "backend": "eager"}, **STAGED}),
}


@dataclass(frozen=True)
class Platform:
    """What vLLM is asked for on one kind of device; ``chunk``: tokens of a step."""

    modes: Mapping[str, Mode]
    chunk: int
    block_size: int
    engine: Mapping[str, Any]
    patched: Mapping[str, Any]
    env: Mapping[str, str]

    @property
    def lengths(self) -> list[int]:
        c = self.chunk
        return [7, c // 4, c + 1, c + 3, 2 * c + c // 3, 6 * c - c // 8, c + 8, c // 8]

    @property
    def answer_tokens(self) -> int:
        return self.chunk // 3

    def count_pages(self, share: float) -> int:
        longest = self.chunk + self.answer_tokens
        return int(share * 8 * longest / self.block_size)


PLATFORMS = {
    "cuda": Platform(
        CUDA,
        chunk=512,
        block_size=16,
        engine={
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": 1 << 30,
        },
        patched={
            "attention_config": {"backend": "CUSTOM"},
            "kv_cache_dtype": "int8_per_token_head",
        },
        env=PLAIN_SUMS,
    ),
    "cpu": Platform(
        CPU,
        chunk=128,
        block_size=128,
        engine={"dtype": "float32"},
        patched={},
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
}


def answer(mode: Mode, platform: Platform, model: Path) -> dict[str, Any]:
    """Serve one mode in this process: tokens and log-probabilities, the workers' reports."""
    from vllm import LLM, SamplingParams

    engine = {
        "model": str(model),
        "seed": 0,
        "max_num_batched_tokens": platform.chunk,
        "max_num_seqs": 8,
        "max_model_len": 7 * platform.chunk,
        "enable_prefix_caching": False,
        "disable_custom_all_reduce": True,
        **platform.engine,
        **mode.engine,
    }
    if mode.patched:
        engine |= platform.patched
        engine["worker_extension_cls"] = "kernels_patch.worker.WorkerExtension"
    if mode.pages is not None:
        engine["num_gpu_blocks_override"] = platform.count_pages(mode.pages)
    served = LLM(**engine)
    reports = export_task("gov_report", samples=3, seed=0, words=2500)
    text = " ".join(json.loads(report)["context"] for report in reports)
    ids = served.get_tokenizer().encode(text)

    def ask(prompts: Iterable[list[int]], n_tokens: int) -> list[dict[str, Any]]:
        how = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True, logprobs=1)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = []
        for request in served.generate(asked, how, use_tqdm=False):
            out = request.outputs[0]
            log_probs = [
                options[token].logprob
                for options, token in zip(out.logprobs, out.token_ids, strict=True)
            ]
            found.append({"ids": list(out.token_ids), "log_probs": log_probs})
        return found

    c = platform.chunk
    mixed = [ids[100 : 100 + n] for n in platform.lengths]
    long = [ids[i * (c - c // 5) : i * (c - c // 5) + c - c // 20 + i] for i in range(8)]
    result: dict[str, Any] = {"mixed": ask(mixed, 24), "long": ask(long, platform.answer_tokens)}
    if mode.engine.get("enable_prefix_caching"):
        result["again"] = ask(mixed, 24)
    result["reports"] = served.collective_rpc("kernels_patch_report") if mode.patched else []
    return result


def describe_proof(mode: Mode, reports: list[Any]) -> tuple[bool, str]:
    """Whether every layer of every worker launched each route once a step, and the counts."""
    if not mode.patched:
        return True, ""
    try:
        whole = merge_reports(reports, mode.workers)
    except EvidenceError as error:
        return False, str(error)
    layers, steps = whole["layers"], whole["route_steps"]
    held = whole["active"] and layers > 0 and not whole["layers_mismatch"]
    held &= not whole["routes"]["fallback"] and steps["decode"] > 0
    held &= all(n == layers * steps[route] for route, n in whole["routes"].items())
    shown = ", ".join(f"{route} {n}" for route, n in steps.items() if n)
    if any(rotated := whole.get("rope_writes") or []):
        shown += f"; rotated in the write {sorted(set(rotated))}"
    return bool(held), f"{layers} layers x ({shown})" + ("" if held else f": {whole}")


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[int, float]:
    """How many answers are the same to the last token, and the largest difference of a chosen
    token's log-probability before the first other token."""
    same, worst = 0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        pairs = list(zip(a["ids"], b["ids"], strict=True))
        n = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        same += n == len(pairs)
        gaps = zip(a["log_probs"][:n], b["log_probs"][:n], strict=True)
        worst = max([worst, *(abs(x - y) for x, y in gaps)])
    return same, worst


def pad_heads(source: Path, target: Path) -> Path:
    """A copy of a Llama-like model with one more KV head and its queries, all zeros."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    # The queries of a KV head stand together, so what is new stands last in all four.
    rows = {"q_proj": (0, heads // kv_heads), "k_proj": (0, 1), "v_proj": (0, 1)}
    rows["o_proj"] = (1, heads // kv_heads)
    weights = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    for name, weight in weights.items():
        *_, part, kind = name.rsplit(".", 2)
        if part in rows and kind == "weight":
            axis, more = rows[part]
            shape = [n if i != axis else more * head_dim for i, n in enumerate(weight.shape)]
            weights[name] = torch.cat([weight, weight.new_zeros(shape)], axis).contiguous()
    config |= {
        "num_attention_heads": heads + heads // kv_heads,
        "num_key_value_heads": kv_heads + 1,
        "head_dim": head_dim,
    }
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copy(file, target)
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def serve(name: str, device: str, model: Path, scratch: Path) -> dict[str, Any] | None:
    """One mode in a process of its own; None when it ended without an answer."""
    mode, platform = PLATFORMS[device].modes[name], PLATFORMS[device]
    out = scratch / f"{name}.json"
    env = {**os.environ, **platform.env, **(SWITCH if mode.patched else {})}
    if device == "cpu" and mode.workers > 1:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(mode.workers)))
    command = [sys.executable, __file__, "--serve", name, device, str(model), str(out)]
    with (scratch / f"{name}.log").open("wb") as log:
        subprocess.run(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False
        )
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: SmolLM2")
    parser.add_argument("--modes", nargs="*", metavar="NAME", help="default: all of one device")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, device, model, out = options.serve
        found = answer(PLATFORMS[device].modes[name], PLATFORMS[device], Path(model))
        Path(out).write_text(json.dumps(found), encoding="utf-8")
        return 0
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    modes = PLATFORMS[device].modes
    names = options.modes or [name for name, mode in modes.items() if mode.workers == 1]
    if unknown := set(names) - modes.keys():
        parser.error(f"no mode {', '.join(sorted(unknown))} on {device}: choose of {list(modes)}")
    wanted = set(names) | {modes[n].against for n in names if modes[n].against}
    names = [name for name in modes if name in wanted]
    model = options.model or ensure_packaged_model()
    scratch = Path(tempfile.mkdtemp(prefix="served_modes_"))
    padded = model
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if any(modes[n].workers > 1 for n in names) and config["num_key_value_heads"] % 2:
        padded = pad_heads(model, scratch / "padded")
    with ThreadPoolExecutor(options.side_by_side) as pool:
        jobs = {
            name: pool.submit(
                serve, name, device, padded if modes[name].workers > 1 else model, scratch
            )
            for name in names
        }
        results = {name: job.result() for name, job in jobs.items()}
    table = Table("mode", "against", "mixed", "long", "largest gap, nats", "steps", "proven")
    failures = 0
    for name, result in results.items():
        mode = modes[name]
        if result is None:
            failures += 1
            table.add_row(name, mode.against, "ended without an answer: see its log")
            continue
        held, steps = describe_proof(mode, result["reports"])
        failures += not held
        cells = ["", "", ""]
        reference = results.get(mode.against) if mode.against else None
        if reference is not None:
            mixed = compare(result["mixed"], reference["mixed"])
            long = compare(result["long"], reference["long"])
            cells = [f"{mixed[0]}/8", f"{long[0]}/8", f"{mixed[1]:.3f} / {long[1]:.3f}"]
        if "again" in result:
            steps += f"; asked again: {compare(result['again'], result['mixed'])[0]}/8 the same"
        table.add_row(name, mode.against, *cells, steps, "" if not mode.patched else str(held))
    Console(width=160).print(table)
    print(f"logs: {scratch}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
