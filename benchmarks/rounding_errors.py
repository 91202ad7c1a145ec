"""What each rounding of the INT8 scheme costs on a real model's activations, and whether removing a
constant from K before rounding it pays.

Q, K and V are those of every layer of the embedded default's model (or of ``--model``) while it
reads embedded reports: after RoPE, as a cache would hold them. Errors are the RMS of the output's
error over the RMS of the exact output, over the last 16 queries (``kernels_patch.check``). Prints
two tables, then one line of JSON.

    python benchmarks/rounding_errors.py [--tokens 2048] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

import evalgate
from evalgate.embedded import ensure_packaged_model
from evalgate.tasks import export_task
from kernels_patch import reference
from kernels_patch.check import compute_error_budget

QUERIES = 16  # the last of the text: they see nearly all of it
GROUPS = (32, 64, 128)
CALIBRATION_TOKENS = 512  # the first chunk: what a server could take a constant from

# A constant for each head and channel, of K [T, Hkv, D]: subtracted from every key of a sequence it
# adds the same number to all scores of a query, and softmax does not see it.
CONSTANTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda key: key.mean(axis=0),
    "middle of the range": lambda key: (key.max(axis=0) + key.min(axis=0)) / 2,
}


def record_layers(folder: Path, n_tokens: int) -> list[tuple[np.ndarray, ...]]:
    """Query, key, value [T, heads, D] and the factor of the scores, for each layer."""
    layers = []

    def record(module, query, key, value, attention_mask, scaling, **options):
        layers.append((*(x[0].transpose(0, 1).numpy() for x in (query, key, value)), scaling))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("record", record)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="record"
    )
    reports = [
        json.loads(line)["context"] for line in export_task("gov_report", n_tokens // 512, 0)
    ]
    tokens = tokenizer("\n\n".join(reports), return_tensors="pt").input_ids[:, :n_tokens]
    if tokens.shape[1] < n_tokens:
        raise SystemExit(f"the reports have {tokens.shape[1]} tokens, fewer than {n_tokens}")
    with torch.inference_mode():
        model.model(tokens)
    return layers


def measure_layer(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, scaling: float
) -> dict[str, float]:
    """Errors of one layer by what is rounded and how."""
    query = query[-QUERIES:]
    errors = compute_error_budget(query, key, value, scaling)
    exact = reference.attention(query, key, value, scaling)

    def error(key: np.ndarray, group: int) -> float:
        out = reference.int8_attention(query, key, value, scaling, group=group)
        return float(np.sqrt(((out - exact) ** 2).mean() / (exact**2).mean()))

    errors |= {f"all, W in groups of {group}": error(key, group) for group in GROUPS[1:]}
    for name, constant in CONSTANTS.items():
        shifted = key - constant(key[:CALIBRATION_TOKENS])
        errors[f"all, K less its {name}"] = error(shifted, GROUPS[0])
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--model", type=Path, help="a folder; without it the embedded default's")
    given = parser.parse_args()
    layers = record_layers(given.model or ensure_packaged_model(), given.tokens)
    measured = [measure_layer(*layer) for layer in layers]

    by_rounding = Table("rounding", "median", "least", "most", title=f"{len(layers)} layers")
    results = {}
    for name in measured[0]:
        errors = [layer[name] for layer in measured]
        results[name] = [statistics.median(errors), min(errors), max(errors)]
        by_rounding.add_row(name, *(f"{x:.2e}" for x in results[name]))
    by_constant = Table("K less its", "median", "least", "most", "better in", title="error changes")
    for constant in CONSTANTS:
        ratios = [layer[f"all, K less its {constant}"] / layer["all"] for layer in measured]
        better = sum(ratio < 1 for ratio in ratios)
        results[f"ratio, {constant}"] = [
            statistics.median(ratios),
            min(ratios),
            max(ratios),
            better,
        ]
        shown = (statistics.median(ratios), min(ratios), max(ratios))
        by_constant.add_row(constant, *(f"x {x:.2f}" for x in shown), f"{better}/{len(ratios)}")
    Console().print(by_rounding, by_constant)
    about = {
        "command": " ".join(sys.argv),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "evalgate": evalgate.__version__,
    }
    print(json.dumps({**about, "results": results}, separators=(",", ":")))


if __name__ == "__main__":
    main()
