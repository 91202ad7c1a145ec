import tomllib
from pathlib import Path

import evalgate_specs
import pytest
from factories import make_pair_of_samples, make_spec, make_stored, simulate_requests

from evalgate.compare import views_of_run
from evalgate.errors import PolicyError
from evalgate.policy import DEFAULT, expand, parse_policy

TPOT = {"name": "tpot", "metric": "tpot", "kind": "non_inferiority", "margin_percent": 1.0}
SCORE = {"name": "score", "metric": "score", "kind": "non_inferiority", "margin_points": 2.0}


def make_views(samples=(), tasks=()):
    return views_of_run(make_stored(simulate_requests(), samples, spec=make_spec(tasks=tasks)))


def expand_rules(*rules, **run):
    return expand(parse_policy({"rules": list(rules)}, "p.toml"), *make_views(**run))


def load_shipped(name):
    folder = Path(evalgate_specs.__file__).parent
    return parse_policy(tomllib.loads((folder / f"policy_{name}.toml").read_text()), name)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"metric": "tpott"}, "did you mean 'tpot'"),
        ({"kind": "equal"}, "kind is 'equal'"),
        ({"margin_percent": -1.0}, "greater than or equal to 0"),
        ({"margin_percent": 100.0}, "nothing could fail"),
        ({"margin_percent": float("nan")}, "finite"),
        ({"margin_points": 1.0}, "tpot is judged in percent: set margin_percent"),
        ({"margin_percent": None}, "set margin_percent"),
        ({"task": "retrieval"}, "goes with the metric score"),
        ({"metric": "output_throughput", "statistic": "p99"}, "goes with ttft, tpot and e2el"),
        ({"metric": "weighted_output_throughput", "bucket": "4K-8K"}, "over all buckets"),
        ({"statistic": "p95"}, "statistic is 'p95'"),
        ({"margin_percnt": 1.0}, "did you mean 'margin_percent'"),
        ({"name": ""}, "name"),
    ],
)
def test_a_wrong_rule_is_refused_with_what_to_do(rule, message):
    with pytest.raises(PolicyError, match="p.toml: .*" + message):
        parse_policy({"rules": [{**TPOT, **rule}]}, "p.toml")


@pytest.mark.parametrize(
    ("validity", "message"),
    [
        ({"min_sucess": 1.0}, "did you mean 'min_success'"),
        ({"min_success": 1.5}, "less than or equal to 1"),
        ({"min_blocks": 0}, "greater than or equal to 1"),
        ({"max_length_ratio": 0.5}, "at least 1, or 0"),
        ({"allow_differences": "arms.model"}, "list"),
    ],
)
def test_a_wrong_limit_is_refused_with_what_to_do(validity, message):
    with pytest.raises(PolicyError, match=message):
        parse_policy({"rules": [TPOT], "validity": validity}, "p.toml")


def test_a_policy_without_rules_is_refused():
    with pytest.raises(PolicyError, match="rules is \\[\\]"):
        parse_policy({"rules": []}, "p.toml")
    with pytest.raises(PolicyError, match="key 'rules' is missing"):
        parse_policy({}, "p.toml")


def test_two_rules_of_one_name_are_refused():
    with pytest.raises(PolicyError, match="'tpot' is named twice"):
        parse_policy({"rules": [TPOT, TPOT]}, "p.toml")


def test_limits_left_out_have_the_documented_values():
    limits = parse_policy({"rules": [TPOT]}, "p.toml").validity
    assert limits.model_dump() == {
        "allow_differences": [],
        "min_success": 1.0,
        "min_blocks": 1,
        "min_samples": 30,
        "require_routes": [],
        "max_length_ratio": 1.2,
        "max_length_finish_increase": 0.10,
        "max_repetition_increase": 0.05,
    }


def test_a_star_stands_for_each_bucket_in_the_specs_order():
    rules = expand_rules({**TPOT, "bucket": "*"})
    assert [(r.name, r.bucket) for r in rules] == [
        ("tpot 4K-8K", "4K-8K"),
        ("tpot 8K-16K", "8K-16K"),
        ("tpot 16K-32K", "16K-32K"),
    ]


def test_a_star_beside_a_task_stands_for_the_buckets_that_its_samples_are_in():
    samples = [
        *make_pair_of_samples([1], [1], task="a", prompt_tokens=5000),
        *make_pair_of_samples([1], [1], task="b", prompt_tokens=20_000),
    ]
    rules = expand_rules({**SCORE, "task": "*", "bucket": "*"}, samples=samples)
    assert [(r.task, r.bucket) for r in rules] == [("a", "4K-8K"), ("b", "16K-32K")]


def test_a_task_of_the_spec_without_samples_keeps_its_rule():
    assert [r.task for r in expand_rules({**SCORE, "task": "*"}, tasks=["gov_report"])] == [
        "gov_report"
    ]


def test_a_bucket_or_task_that_no_run_has_is_refused_with_the_nearest():
    with pytest.raises(PolicyError, match="bucket '8K-16' is unknown, did you mean '8K-16K'"):
        expand_rules({**TPOT, "bucket": "8K-16"})
    with pytest.raises(PolicyError, match="task 'retrieval' is unknown; known of the runs: none"):
        expand_rules({**SCORE, "task": "retrieval"})


def test_a_policy_that_leaves_no_rule_is_refused():
    with pytest.raises(PolicyError, match="leaves no rule"):
        expand_rules({**SCORE, "task": "*"})


def test_names_that_meet_after_expansion_are_refused():
    with pytest.raises(PolicyError, match="two rules are called 'tpot 4K-8K'"):
        expand_rules({**TPOT, "bucket": "*"}, {**TPOT, "name": "tpot 4K-8K"})


def test_the_submission_policy_is_what_the_design_says():
    policy = load_shipped("submission")
    assert [
        (r.metric, r.kind, r.bucket, r.task, r.margin) for r in policy.rules
    ] == [
        ("weighted_normalised_output_throughput", "superiority", None, None, 0.0),
        ("ttft", "non_inferiority", "*", None, 1.0),
        ("tpot", "non_inferiority", "*", None, 1.0),
        ("score", "non_inferiority", None, "*", 1.0),
        ("score", "non_inferiority", "*", "*", 3.0),
        ("top1_agreement", "non_inferiority", None, None, 1.0),
    ]  # fmt: skip
    assert policy.validity.require_routes == ["prefix", "decode"]
    assert policy.validity.min_blocks == 6


def test_the_nightly_policy_asks_only_that_nothing_became_worse():
    policy = load_shipped("nightly")
    assert {r.kind for r in policy.rules} == {"non_inferiority"}
    assert {r.margin for r in policy.rules} == {2.0}
    assert policy.validity.min_blocks == 3


def test_a_calibration_can_be_judged_without_the_routes_of_a_patch():
    policy = load_shipped("submission").without_required_routes()
    assert policy.validity.require_routes == []
    assert policy.validity.min_blocks == 6


def test_the_default_policy_fits_any_run():
    samples = make_pair_of_samples([1, 0], [1, 0])
    assert len(expand(DEFAULT, *make_views(samples=samples))) == 3 * 3 + 1
