"""What both arms lack is missed by the spec's own count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories import BUCKETS, make_spec, make_stored, simulate_requests

from evalgate.compare import views_of_run
from evalgate.completeness import check_recorded
from evalgate.store import load_run

ROOT = Path(__file__).resolve().parents[2]
COMPLETED = {"completed_blocks": [0, 1], "excluded_blocks": []}


def check(requests: list[Any], extra: Any = COMPLETED, **spec: Any) -> list[str]:
    values = {"blocks": 2, "prompts": 4, **spec}
    stored = make_stored(requests, spec=make_spec(**values), extra=extra)
    return check_recorded(*views_of_run(stored))


def test_a_whole_run_misses_nothing() -> None:
    assert check(simulate_requests(blocks=2)) == []
    assert check(simulate_requests(blocks=2, repetitions=3), repetitions=3) == []


def test_pairs_that_were_cut_from_both_arms_are_missed() -> None:
    """The slow ones, say: a file that ends at a line's end reads well."""
    requests = [r for r in simulate_requests(blocks=2) if r.key != (1, "16K-32K", "16K-32K/3", 0)]
    reasons = check(requests)
    assert len(reasons) == 2
    assert "arm baseline: 1 measured requests" in reasons[0]
    assert "block 1, bucket 16K-32K, 3 of 4" in reasons[0]


def test_a_run_without_any_of_its_requests_is_not_whole() -> None:
    reasons = check([])
    assert f"{2 * 4 * len(BUCKETS)} measured requests" in reasons[1]


def test_blocks_that_a_resume_excluded_need_not_be_whole() -> None:
    requests = [r for r in simulate_requests(blocks=3) if r.block != 1 or r.prompt_id < "2"]
    extra = {"completed_blocks": [0, 2], "excluded_blocks": [1]}
    assert check(requests, extra, blocks=3) == []


@pytest.mark.parametrize(
    "extra", [None, {}, {"completed_blocks": "all"}, {"completed_blocks": ["x"]}]
)
def test_a_run_that_does_not_say_what_it_completed_is_not_asked(extra: Any) -> None:
    assert check([], extra) == []


@pytest.mark.parametrize(
    "folder", ["results/example", "results/qwen35_27b_h200", "results/smollm2_h200",
               "tests/data/run_v1"]
)  # fmt: skip
def test_the_stored_runs_are_whole(folder: str) -> None:
    assert check_recorded(*views_of_run(load_run(ROOT / folder))) == []
