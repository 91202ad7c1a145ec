"""A real patched server under what serial load never does: batches, preemption, prefix reuse."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evalgate.client import Client
from evalgate.embedded import ensure_packaged_model
from evalgate.generation import Generation
from evalgate.server import LaunchPlan, Server
from evalgate.spec import TimeoutSpec

pytestmark = pytest.mark.server

MODEL = "SmolLM2-135M-Instruct"
# Eight pages of 128 tokens: four requests of about 480 tokens in all cannot lie there together.
ARGS = [
    *("--dtype", "float32", "--max-num-batched-tokens", "128", "--max-num-seqs", "4"),
    *("--max-model-len", "768", "--num-gpu-blocks-override", "8", "--enable-prefix-caching"),
    *("--enable-prompt-tokens-details", "--enforce-eager"),
    *("--distributed-executor-backend", "uni"),
    *("--worker-extension-cls", "kernels_patch.worker.WorkerExtension"),
]
ENV = {
    "KERNELS_PATCH": "int8_kv",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
OUTPUT_TOKENS = 160
SUBJECTS = {  # and a word that no text about them does without
    "rivers and their mills": "river",
    "a lighthouse": "light",
    "bread": "bread",
    "the history of maps": "map",
}


def make_prompt(subject: str) -> str:
    facts = " ".join(f"In year {1800 + i} somebody wrote about {subject}." for i in range(22))
    return f"{facts}\nA short essay about {subject}:\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    plan = LaunchPlan(
        arm="patched",
        block=0,
        python=sys.executable,
        args=ARGS,
        env=ENV,
        model_path=str(ensure_packaged_model()),
        model_name=MODEL,
        log_path=Path(tmp_path_factory.mktemp("server")) / "server.log",
        start_timeout_s=900,
    )
    with Server.launch(plan) as launched:
        yield launched


def ask(server: Server, prompt: str, salt: str) -> Generation:
    with Client(server.base_url, MODEL, timeouts=TimeoutSpec()) as client:
        done = client.generate(prompt, OUTPUT_TOKENS, ignore_eos=True, cache_salt=salt)
    assert done.error is None
    return done


def read_metric(server: Server, name: str) -> float:
    with Client(server.base_url, MODEL, timeouts=TimeoutSpec()) as client:
        return sum(value for _, value in (client.read_metrics() or {})[name])


def read_report(server: Server) -> dict:
    with Client(server.base_url, MODEL, timeouts=TimeoutSpec()) as client:
        return client.call_rpc("kernels_patch_report", 60)[0]


def test_preempted_batches_answer_like_serial_requests(server):
    prompts = [make_prompt(subject) for subject in SUBJECTS]
    serial = [ask(server, prompt, f"serial{i}") for i, prompt in enumerate(prompts)]
    before = read_metric(server, "vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(ask, server, p, f"batch{i}") for i, p in enumerate(prompts)]
        batch = [job.result() for job in jobs]
    assert read_metric(server, "vllm:num_preemptions_total") > before
    assert [done.output_tokens for done in batch] == [OUTPUT_TOKENS] * len(prompts)
    # Another batch cuts prompts into other chunks, so near ties part and texts may differ; but
    # pages mixed up between requests would make a text lose its own subject.
    for done, subject in zip([*serial, *batch], [*SUBJECTS, *SUBJECTS], strict=True):
        assert SUBJECTS[subject] in done.text.lower(), done.text


def test_a_reused_prefix_gives_the_same_text(server):
    prompt = make_prompt("a reused prefix")
    first, second = (ask(server, prompt, "same") for _ in range(2))
    assert first.cached_tokens == 0
    assert second.cached_tokens >= 128
    assert first.text == second.text


def test_every_layer_took_every_step_and_nothing_fell_back(server):
    report = read_report(server)
    assert report["active"]
    assert report["layers_mismatch"] == []
    assert report["routes"]["fallback"] == 0
    for route in ("first_chunk", "prefix", "decode"):
        assert report["routes"][route] == report["layers"] * report["route_steps"][route] > 0
