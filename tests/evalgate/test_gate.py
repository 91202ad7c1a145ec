import json

import pytest
from factories import (
    make_arm,
    make_fidelity,
    make_pair_of_samples,
    make_request,
    make_spec,
    make_stored,
    simulate_requests,
)

from evalgate.compare import view, views_of_run
from evalgate.effects import Effect
from evalgate.gate import judge
from evalgate.policy import parse_policy
from evalgate.ruling import judge_rule
from evalgate.stats import StudentEstimate

KEYS = [
    "schema_version", "status", "exit_code", "invalid_reasons", "warnings", "differing_fields",
    "rules", "summary",
]  # fmt: skip
RULE_KEYS = [
    "name", "metric", "kind", "bucket", "task", "status", "observed", "ci_low", "ci_high",
    "margin", "unit", "n_pairs", "n_dropped", "n_blocks", "reason", "details",
]  # fmt: skip


def make_rule(metric, margin=1.0, kind="non_inferiority", **rest):
    unit = "points" if metric in ("score", "top1_agreement", "logprob_gap") else "percent"
    name = " ".join([metric, *map(str, rest.values())])
    return {"name": name, "metric": metric, "kind": kind, f"margin_{unit}": margin, **rest}


def make_policy(*rules, **validity):
    return parse_policy({"rules": list(rules), "validity": validity}, "test")


def judge_run(requests, rules, samples=(), *, calibration=None, validity=None, **run):
    run.setdefault("spec", make_spec())
    stored = make_stored(requests, samples, **run)
    policy = make_policy(*rules, **(validity or {}))
    return judge(*views_of_run(stored), policy, calibration=calibration, apart=False)


def make_changed(tokens_per_s=None, ttft_ms=None):
    """Two blocks of one prompt: throughput or TTFT of the baseline, then of the candidate."""
    records = []
    for i, arm in enumerate(("baseline", "candidate")):
        for block in (0, 1):
            total_s = 10 / tokens_per_s[i] if tokens_per_s else 2.0
            ttft_s = ttft_ms[i] / 1000 if ttft_ms else total_s / 2
            records.append(
                make_request(
                    arm, block=block, ttft_s=ttft_s, tpot_s=(total_s - ttft_s) / 9, output_tokens=10
                )
            )
    return records


def test_a_lower_throughput_is_worse():
    verdict = judge_run(make_changed(tokens_per_s=(100, 90)), [make_rule("output_throughput")])
    (rule,) = verdict.rules
    assert (verdict.status, verdict.exit_code) == ("fail", 1)
    assert rule.observed == pytest.approx(-10, abs=1e-4)


def test_a_shorter_ttft_is_better():
    rule = make_rule("ttft", 0.0, "superiority")
    verdict = judge_run(make_changed(ttft_ms=(200, 180)), [rule])
    assert (verdict.status, verdict.exit_code) == ("pass", 0)
    assert verdict.rules[0].observed == pytest.approx(-10, abs=1e-4)
    assert judge_run(make_changed(ttft_ms=(180, 200)), [rule]).status == "fail"


def test_nothing_in_common_is_invalid_and_never_a_pass():
    requests = [
        make_request("baseline", bucket="4K-8K", prompt_tokens=5000),
        make_request("candidate", bucket="16K-32K", prompt_tokens=20_000),
    ]
    verdict = judge_run(requests, [make_rule("tpot", bucket="4K-8K")])
    assert (verdict.status, verdict.exit_code) == ("invalid", 4)


def test_a_planted_half_more_of_tpot_fails():
    requests = simulate_requests(tpot_change=0.5)
    rules = [make_rule(m, bucket="*") for m in ("ttft", "tpot")]
    verdict = judge_run(requests, rules)
    assert verdict.status == "fail"
    assert {r.rule.metric for r in verdict.rules if r.status == "fail"} == {"tpot"}


def test_a_planted_slowdown_is_found_in_a_single_launch_too():
    requests = simulate_requests(blocks=1, tpot_change=0.5)
    assert judge_run(requests, [make_rule("tpot", bucket="*")]).status == "fail"


def test_base_against_base_passes_non_inferiority_and_shows_no_gain():
    requests = simulate_requests(blocks=5, prompts=6)
    rules = [make_rule("tpot"), make_rule("ttft")]
    assert judge_run(requests, rules).status == "pass"
    gain = judge_run(requests, [make_rule("tpot", 0.5, "superiority")])
    assert gain.status in ("fail", "inconclusive")


def test_runaway_outputs_are_invalid_however_fast_they_look():
    requests = [
        make_request(arm, block=block, prompt_id=f"p{i}", output_tokens=n, tpot_s=tpot)
        for arm, lengths, tpot in (("baseline", [95, 12], 0.02), ("candidate", [1024, 1024], 0.005))
        for i, n in enumerate(lengths)
        for block in (0, 1)
    ]
    rule = make_rule("output_throughput", 0.0, "superiority")
    verdict = judge_run(requests, [rule])
    assert verdict.exit_code == 4
    assert "times as long" in verdict.invalid_reasons[0]
    assert verdict.rules[0].observed > 100
    assert [r.status for r in verdict.rules] == ["invalid"]


def make_by_length(losses, n):
    """Retrieval in four buckets, all right in the baseline, ``losses`` wrong in the last."""
    spec = make_spec(
        buckets=[(f"{k}K", k * 1024, 2 * k * 1024, 1.0) for k in (4, 8, 16, 32)],
    )
    samples = []
    for k in (4, 8, 16, 32):
        wrong = losses if k == 32 else 0
        samples += make_pair_of_samples(
            [1] * n, [0] * wrong + [1] * (n - wrong), prompt_tokens=k * 1024 + 9, prefix=f"{k}/"
        )
    return spec, samples


BY_LENGTH = [make_rule("score", 5.0, task="retrieval", bucket="*")]


def test_accuracy_that_falls_only_at_long_inputs_fails_there():
    spec, samples = make_by_length(10, 50)
    verdict = judge_run([], BY_LENGTH, samples, spec=spec)
    assert verdict.status == "fail"
    assert [r.rule.bucket for r in verdict.rules if r.status == "fail"] == ["32K"]
    assert verdict.rules[3].observed == pytest.approx(-20)


def test_pooling_would_have_let_it_slip_through():
    spec, samples = make_by_length(10, 50)
    verdict = judge_run([], [make_rule("score", 5.0, task="retrieval")], samples, spec=spec)
    assert verdict.rules[0].observed == pytest.approx(-5)
    assert verdict.status != "fail"


def test_five_items_each_settle_nothing():
    spec, samples = make_by_length(1, 5)
    verdict = judge_run([], BY_LENGTH, samples, spec=spec)
    assert (verdict.status, verdict.exit_code) == ("inconclusive", 3)


def test_no_loss_in_a_few_items_does_not_pass_and_says_how_many_would():
    samples = make_pair_of_samples([1] * 20, [1] * 20)
    (rule,) = judge_run([], [make_rule("score", 5.0)], samples).rules
    assert rule.status == "inconclusive"
    assert rule.details["needed_more"] == {"unit": "samples", "more": 39}
    assert "about 39 more samples would settle it" in rule.reason


def test_int8_that_was_not_served_is_invalid_instead_of_no_difference():
    launch = {"python": "python", "args": [], "env": {}}
    spec = make_spec(arms={"baseline": launch, "candidate": {**launch, "patch": "int8_kv"}})
    arms = {"baseline": make_arm(blocks=3), "candidate": make_arm(blocks=3)}
    verdict = judge_run(simulate_requests(), [make_rule("tpot", 5.0)], spec=spec, arms=arms)
    assert verdict.exit_code == 4
    assert "'auto'" in verdict.invalid_reasons[0]


def test_no_speed_up_is_reported_while_accuracy_fails():
    samples = make_pair_of_samples([1] * 40, [0] * 20 + [1] * 20)
    rules = [make_rule("tpot", 0.0, "superiority"), make_rule("score", 1.0)]
    verdict = judge_run(simulate_requests(tpot_change=-0.3), rules, samples)
    assert verdict.status == "fail"
    assert [r.status for r in verdict.rules] == ["inconclusive", "fail"]
    assert "while accuracy fails" in verdict.rules[0].reason


def test_fewer_launches_than_min_blocks_leave_speed_undecided():
    requests = simulate_requests(tpot_change=0.5, blocks=2)
    (rule,) = judge_run(requests, [make_rule("tpot")], validity={"min_blocks": 5}).rules
    assert rule.status == "inconclusive"
    assert rule.details["needed_more"] == {"unit": "launches", "more": 3}


def test_one_prompt_in_one_launch_has_null_bounds():
    requests = [make_request("baseline"), make_request("candidate")]
    (rule,) = judge_run(requests, [make_rule("tpot")]).rules
    assert (rule.status, rule.ci_low, rule.ci_high) == ("inconclusive", None, None)
    assert rule.observed == 0.0


def test_a_wider_margin_can_only_help():
    requests = simulate_requests(tpot_change=0.015, launch_sd=0.003, blocks=4)
    order = {"fail": 0, "inconclusive": 1, "pass": 2}
    found = [
        order[judge_run(requests, [make_rule("tpot", m)]).status] for m in (0.0, 0.5, 1.5, 3.0, 9.0)
    ]
    assert found == sorted(found)
    assert found[-1] == 2


def test_failing_needs_holm_over_all_rules():
    # A loss that is significant alone is not among forty rules of which the rest show nothing.
    requests = simulate_requests(seed=2, blocks=3, tpot_change=0.018, launch_sd=0.002)
    alone = judge_run(requests, [make_rule("tpot")])
    assert alone.status == "fail"
    crowd = [{**make_rule("ttft", 50.0), "name": f"t{i}"} for i in range(40)]
    among = judge_run(requests, [make_rule("tpot"), *crowd])
    assert among.rules[0].status == "inconclusive"
    assert "among all rules this may be chance" in among.rules[0].reason


def test_one_undecided_rule_keeps_the_whole_from_passing():
    rules = [make_rule("tpot", 2.0), make_rule("top1_agreement")]
    verdict = judge_run(simulate_requests(), rules)
    assert [r.status for r in verdict.rules] == ["pass", "inconclusive"]
    assert verdict.exit_code == 3


def test_fidelity_is_judged_against_the_baselines_second_pass():
    def make(arm, agreement):
        return [
            make_fidelity(
                arm, sample_id=f"t{i}", top1_agreement=agreement + i * 1e-4, positions=500
            )
            for i in range(4)
        ]

    records = [*make("baseline", 0.99), *make("candidate", 0.988)]
    verdict = judge_run(simulate_requests(), [make_rule("top1_agreement")], fidelity=records)
    assert verdict.rules[0].observed == pytest.approx(-0.2)
    assert verdict.status == "pass"
    worse = [*make("baseline", 0.99), *make("candidate", 0.90)]
    assert (
        judge_run(simulate_requests(), [make_rule("top1_agreement")], fidelity=worse).exit_code == 1
    )


def test_a_calibration_shows_the_noise_floor_and_decides_nothing():
    requests = simulate_requests()
    noise = make_stored(simulate_requests(seed=9), spec=make_spec(), label="calibration")
    plain = judge_run(requests, [make_rule("tpot", 2.0)])
    beside = judge_run(requests, [make_rule("tpot", 2.0)], calibration=noise)
    floor = beside.rules[0].details["noise_floor"]
    assert set(floor) == {"observed", "ci_low", "ci_high", "smallest_effect"}
    assert floor["ci_low"] < floor["observed"] < floor["ci_high"]
    assert beside.rules[0].details["identical_outputs"]["base_against_base"] == 1.0
    assert (beside.status, beside.rules[0].ci_low) == (plain.status, plain.rules[0].ci_low)


def test_the_json_verdict_has_exactly_its_keys_and_no_nan():
    samples = make_pair_of_samples([1, 0.5], [1, 0.4])
    rules = [make_rule("tpot"), make_rule("score"), make_rule("logprob_gap")]
    data = judge_run(simulate_requests(), rules, samples).to_json()
    assert list(data) == KEYS
    assert all(list(rule) == RULE_KEYS for rule in data["rules"])
    assert list(data["summary"]) == ["baseline", "candidate"]
    json.dumps(data, allow_nan=False)


def test_two_runs_are_judged_apart_under_their_own_names():
    one = make_stored(simulate_requests(seed=1), label="r1", spec=make_spec())
    two = make_stored(simulate_requests(seed=2, tpot_change=0.5), label="r2", spec=make_spec())
    sides = view(one, "candidate"), view(two, "candidate")
    verdict = judge(*sides, make_policy(make_rule("tpot")), apart=True)
    assert verdict.status == "fail"
    assert verdict.rules[0].details["method"].startswith("ratio of ratios")
    assert any("taken out by the baseline arm" in w for w in verdict.warnings)


def test_the_order_of_records_in_the_file_changes_nothing():
    requests = simulate_requests(blocks=1)
    rules = [make_rule("tpot", bucket="*")]
    one, two = (judge_run(r, rules).to_json()["rules"] for r in (requests, requests[::-1]))
    assert one == two


def test_what_is_not_a_number_never_passes():
    rule = make_policy(make_rule("tpot", 50.0)).rules[0]
    estimate = StudentEstimate(float("nan"), float("nan"), 3, 4, "t")
    effect = Effect(float("nan"), estimate, 4, 0, 4)
    result = judge_rule(rule, effect, None, {})
    assert result.status == "inconclusive"
    assert (result.observed, result.ci_low, result.ci_high) == (None, None, None)
