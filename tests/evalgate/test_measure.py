"""What is known of a run before it begins: its policy against its spec, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evalgate.errors import PolicyError
from evalgate.measure import default_out_dir, diagnose_all, foresee, load_spec

SPEC = """
name = "s"
[model]
name = "m"
[arms.baseline]
base_url = "http://127.0.0.1:9"
[arms.candidate]
base_url = "http://127.0.0.1:9"
[schedule]
blocks = 2
[load]
output_tokens = 4
[[load.buckets]]
name = "4K-8K"
min_tokens = 4096
max_tokens = 8192
prompts = 1
[tasks.retrieval]
limit = 2
[policy.validity]
{validity}
[[policy.rules]]
name = "rule"
kind = "non_inferiority"
{rule}
"""
TTFT = 'metric = "ttft"\nmargin_percent = 1.0'


def save(tmp_path: Path, rule: str = TTFT, validity: str = "") -> str:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC.format(rule=rule, validity=validity))
    return str(path)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (TTFT + '\nbucket = "4K-8k"', r"bucket '4K-8k' is unknown, did you mean '4K-8K'"),
        (
            'metric = "score"\nmargin_points = 1.0\ntask = "retrival"',
            r"task 'retrival' is unknown, did you mean 'retrieval'",
        ),
    ],
)
def test_a_rule_about_what_the_spec_has_not_is_refused_before_the_run(
    tmp_path: Path, rule: str, message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        load_spec(save(tmp_path, rule), None)


def foresee_of(tmp_path: Path, *spec: str, **options: Any) -> list[str]:
    return foresee(load_spec(save(tmp_path, *spec), None)[0], **options)


def test_what_a_policy_will_leave_open_is_told_before_the_hours_are_spent(tmp_path: Path) -> None:
    assert foresee_of(tmp_path) == []
    (said,) = foresee_of(tmp_path, TTFT, "min_blocks = 6")
    assert "wants 6 launches of each arm and the spec makes 2" in said
    assert foresee_of(tmp_path, TTFT, "min_blocks = 6", adds_launches=True) == []
    (said,) = foresee_of(tmp_path, 'metric = "top1_agreement"\nmargin_points = 1.0')
    assert "no [fidelity], so rule will stay open" in said
    (said,) = foresee_of(tmp_path, TTFT, 'require_routes = ["decode"]')
    assert "routes decode and the candidate has no patch" in said
    assert foresee_of(tmp_path, TTFT, 'require_routes = ["decode"]', calibrate=True) == []


def test_the_doctor_tells_it_too(tmp_path: Path) -> None:
    answer = diagnose_all(save(tmp_path, TTFT, "min_blocks = 6"), "text").text
    assert "warning  policy" in answer
    assert "set schedule.blocks to 6" in answer


def test_the_name_of_a_spec_does_not_lead_out_of_the_results() -> None:
    folder = default_out_dir("../../x y")
    assert folder.parent == Path("results")
    assert folder.name.startswith(".._.._x_y-20")
