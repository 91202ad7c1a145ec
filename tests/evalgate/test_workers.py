"""Several workers' reports as one, and every way in which they may not belong together."""

from __future__ import annotations

from typing import Any

import pytest

from evalgate.errors import EvidenceError
from evalgate.workers import merge_reports

STEPS = {"prefix": 3, "decode": 20, "fallback": 0}


def make_report(
    rank: int = 0, world_size: int = 1, layers: tuple[int, ...] = (0, 1), **changes: Any
):
    """What a patched worker that holds ``layers`` says after 23 steps."""
    return {
        "rank": rank,
        "world_size": world_size,
        "version": "1",
        "active": True,
        "impl": "cuda",
        "fault": None,
        "model_layers": len(layers),
        "layers": len(layers),
        "layer_names": [f"layers.{i}" for i in layers],
        "steps": 23,
        "routes": {route: len(layers) * steps for route, steps in STEPS.items()},
        "route_steps": dict(STEPS),
        "tokens": {"prefix": 900, "decode": 20},
        "per_layer": {route: [steps] * len(layers) for route, steps in STEPS.items()},
        "layers_mismatch": [],
        "rope_writes": [7] * len(layers),
        "kv_cache": {"layers": len(layers), "dtype": "int8", "num_blocks": 100},
        **changes,
    }


def refuse(reports: list[Any], *words: str, least: int = 1) -> None:
    with pytest.raises(EvidenceError) as caught:
        merge_reports(reports, least)
    for word in words:
        assert word in str(caught.value)


def test_one_worker_is_the_whole():
    report = make_report()
    del report["rank"]
    assert merge_reports([make_report()]) == report


def test_tensor_parallel_workers_that_did_the_same_are_counted_once():
    merged = merge_reports([make_report(0, 2), make_report(1, 2)], 2)
    assert merged["layers"] == 2
    assert merged["routes"] == {"prefix": 6, "decode": 40, "fallback": 0}


def test_pipeline_stages_bring_their_layers_together_and_keep_their_steps():
    merged = merge_reports([make_report(0, 2, (0, 1)), make_report(1, 2, (2,))], 2)
    assert merged["layers"] == merged["model_layers"] == 3
    assert merged["layer_names"] == ["layers.0", "layers.1", "layers.2"]
    assert merged["routes"] == {"prefix": 9, "decode": 60, "fallback": 0}
    assert merged["route_steps"] == STEPS
    assert merged["tokens"] == {"prefix": 900, "decode": 20}
    assert merged["per_layer"]["decode"] == [20, 20, 20]
    assert merged["rope_writes"] == [7, 7, 7]
    assert merged["kv_cache"] == {"layers": 3, "dtype": "int8", "num_blocks": 100}


def test_two_stages_of_two_ranks_count_each_layer_once():
    reports = [make_report(rank, 4, (rank // 2,)) for rank in range(4)]
    merged = merge_reports(reports, 4)
    assert merged["layers"] == 2
    assert merged["routes"]["decode"] == 40


@pytest.mark.parametrize("layers", [(0, 1), (2, 3)])
def test_a_missing_worker_is_no_proof_whether_arguments_or_workers_tell_of_it(layers):
    refuse([make_report(0, 1, layers)], "1 of its 2 workers answered", least=2)
    refuse([make_report(0, 2, layers)], "1 of its 2 workers answered")
    refuse([], "0 of its 1 workers answered")


def test_more_workers_than_the_arguments_ask_for_are_right_where_they_say_so():
    """A configuration file may split the model too."""
    assert merge_reports([make_report(0, 2), make_report(1, 2)])["layers"] == 2


def test_a_worker_that_answers_for_another_is_no_proof():
    refuse([make_report(0, 2), make_report(0, 2)], "ranks [0, 0]", least=2)
    refuse([make_report(0, 2), make_report(1, 3)], "2 and 3 in all")
    refuse([make_report(0, 1), make_report(1, 1)], "its 1 workers answer as the ranks [0, 1]")


def test_an_answer_that_is_no_report_is_no_proof():
    refuse([make_report(0, 2), None], "answers None")


def test_a_rank_that_did_otherwise_than_its_fellow_is_named_by_what_differs():
    stock = make_report(1, 2, routes={"prefix": 0, "decode": 0, "fallback": 46}, active=False)
    refuse([make_report(0, 2), stock], "different active, routes of the same layers", least=2)


def test_a_stage_that_ran_other_steps_is_no_proof():
    late = make_report(1, 2, (2, 3), route_steps={**STEPS, "decode": 19})
    refuse([make_report(0, 2), late], "pipeline stages report different", "route_steps", least=2)


def test_a_stage_of_another_build_is_no_proof():
    refuse([make_report(0, 2), make_report(1, 2, (2, 3), version="2")], "version (1 and 2)")


def test_a_stage_that_the_patch_does_not_serve_makes_the_whole_inactive():
    idle = make_report(1, 2, (2, 3), active=False)
    assert merge_reports([make_report(0, 2), idle])["active"] is False


def test_a_stage_without_attention_has_nothing_to_show():
    idle = make_report(
        1, 2, (), active=False, impl=None, steps=0, routes={}, route_steps={}, kv_cache=None
    )
    assert merge_reports([make_report(0, 2), idle], 2)["active"] is True
    assert merge_reports([idle | {"rank": 0}, idle], 2)["layers"] == 0


def test_a_layer_in_two_stages_would_count_twice():
    refuse([make_report(0, 2, (0, 1)), make_report(1, 2, (1, 2))], "layers.1")


def test_pages_that_differ_between_stages_are_all_named():
    other = {"layers": 2, "dtype": ["bfloat16", "int8"], "num_blocks": 90}
    merged = merge_reports([make_report(0, 2), make_report(1, 2, (2, 3), kv_cache=other)])
    assert merged["kv_cache"] == {
        "layers": 4,
        "dtype": ["bfloat16", "int8"],
        "num_blocks": [90, 100],
    }


def test_a_stage_without_pages_is_no_proof_unless_none_has_any():
    bare = make_report(1, 2, (2, 3), kv_cache=None)
    refuse([make_report(0, 2), bare], "1 of 2 stages hold KV pages")
    assert merge_reports([make_report(0, 2, kv_cache=None), bare])["kv_cache"] is None
