"""What one arm says of itself while it serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stub_server import StubServer

from evalgate.client import Client
from evalgate.errors import EvidenceError
from evalgate.live import LiveArm
from evalgate.records import Environment
from evalgate.spec import build_spec

REPORT = {"routes": {"decode": 4}, "kv_cache": {"dtype": "int8"}, "layers": 4}


@pytest.fixture
def stub():
    with StubServer("m") as server:
        yield server


@pytest.fixture
def arm(stub: StubServer, tmp_path: Path):
    """A patched arm that is connected to the stub, as one that it launched."""
    spec = build_spec(
        {
            "name": "s",
            "model": {"name": "m", "path": "m"},
            "arms": {
                "candidate": {"args": ["--max-num-batched-tokens", "512"], "patch": "int8_kv"}
            },
            "load": {
                "buckets": [{"name": "b", "min_tokens": 100, "max_tokens": 200, "prompts": 1}]
            },
        },
        "spec",
    )
    live = LiveArm(
        name="candidate",
        spec=spec,
        arm=spec.arms["candidate"],
        model_path="m",
        python="python",
        log_path=lambda arm, block: tmp_path / "log",
        run_id="r",
    )
    with Client(stub.base_url, "m") as live._client:
        yield live


def read(arm: LiveArm, stub: StubServer, reports: list[Any]) -> None:
    stub.rpc["kernels_patch_report"] = reports
    arm.mark("ready")
    arm.mark("end")
    arm._keep_evidence()


def test_workers_that_agree_are_one_report(arm: LiveArm, stub: StubServer) -> None:
    read(arm, stub, [REPORT, dict(REPORT)])
    assert arm.evidence[0].layers == 4
    assert arm.kv_cache_dtype == "int8"


def test_a_worker_that_did_otherwise_than_the_first_is_not_overlooked(
    arm: LiveArm, stub: StubServer
) -> None:
    stock = {**REPORT, "routes": {"decode": 0, "fallback": 4}}
    with pytest.raises(EvidenceError, match="the candidate server: its 2 workers report diff"):
        read(arm, stub, [REPORT, stock])


def test_a_worker_that_the_arguments_ask_for_and_that_says_nothing_is_no_proof(
    arm: LiveArm, stub: StubServer
) -> None:
    args = [*arm.arm.args, "--tensor-parallel-size", "2"]
    arm.arm = arm.arm.model_copy(update={"args": args})
    with pytest.raises(EvidenceError, match="the candidate server: 1 of its 2 workers answered"):
        read(arm, stub, [REPORT])


def test_launches_are_counted_layer_by_layer_over_all_stages(
    arm: LiveArm, stub: StubServer
) -> None:
    def make_stages(*launches: list[int]) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "world_size": 2,
                "layers": 2,
                "layer_names": [f"layers.{2 * rank}", f"layers.{2 * rank + 1}"],
                "routes": {"decode": sum(counts), "fallback": 0},
                "route_steps": {"decode": counts[0]},
                "per_layer": {"decode": counts, "fallback": [0, 0]},
            }
            for rank, counts in enumerate(launches)
        ]

    stub.rpc["kernels_patch_report"] = make_stages([5, 5], [5, 5])
    arm.mark("ready")
    stub.rpc["kernels_patch_report"] = make_stages([9, 9], [9, 8])
    arm.mark("end")
    arm._keep_evidence()
    evidence = arm.evidence[0]
    assert evidence.layers == 4
    assert evidence.routes == {"decode": 15, "fallback": 0}
    assert evidence.route_steps == {"decode": 4}
    assert evidence.per_layer == {"decode": [4, 4, 4, 3]}


def test_pages_that_differ_between_layers_are_named_together(
    arm: LiveArm, stub: StubServer
) -> None:
    read(arm, stub, [{**REPORT, "kv_cache": {"dtype": ["bfloat16", "int8"]}}])
    assert arm.kv_cache_dtype == "bfloat16 and int8"
    assert arm.build_record().kv_cache_dtype == "bfloat16 and int8"


def test_the_log_tells_backend_and_scales(arm: LiveArm, stub: StubServer, tmp_path: Path) -> None:
    line = "WARNING [kv_cache.py:163] Using KV cache scaling factor 1.0 for fp8_e4m3. This may"
    backend = "INFO [cuda.py:1] Using AttentionBackendEnum.FLASH_ATTN backend."
    (tmp_path / "log").write_text(f"{backend}\n{line}\n")
    arm.server = SimpleNamespace(command=["vllm"], env={})
    arm.environment = Environment(gpu=None, driver=None, cpu=None, packages={}, git=None)
    stub.rpc["kernels_patch_report"] = [REPORT]
    arm._identify()
    arm.server = None
    assert arm.attention_backend == "FLASH_ATTN"
    read(arm, stub, [REPORT])
    assert arm.evidence[0].kv_cache == {"dtype": "int8", "unit_scales": True}
