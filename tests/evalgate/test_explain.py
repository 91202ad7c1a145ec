from factories import make_spec, make_stored, simulate_requests

from evalgate.compare import views_of_run
from evalgate.explain import explain
from evalgate.gate import judge
from evalgate.policy import parse_policy

RULES = [
    {"name": "TPOT", "metric": "tpot", "kind": "non_inferiority", "margin_percent": 1.0},
    {"name": "TTFT", "metric": "ttft", "kind": "non_inferiority", "margin_percent": 2.0},
]


def explain_run(*, calibration=None, **run):
    stored = make_stored(simulate_requests(tpot_change=0.5), spec=make_spec(), **run)
    policy = parse_policy({"rules": RULES}, "test")
    return explain(judge(*views_of_run(stored), policy, calibration=calibration, apart=False))


def test_every_rule_is_explained_and_the_sum_follows():
    text = explain_run()
    assert "The evidence can carry a verdict" in text
    assert "FAIL  TPOT: TPOT +50" in text
    assert "PASS  TTFT" in text
    assert "method: Student's t over launches, paired" in text
    assert text.endswith("(1 fail, 1 pass): FAIL, exit code 1.")


def test_invalid_evidence_is_explained_first():
    text = explain_run(status="failed")
    assert text.startswith("1. The evidence is invalid, for 1 reason:\n   - run r1 is 'failed'")
    assert text.endswith("INVALID, exit code 4.")


def test_what_a_server_said_cannot_steer_the_terminal():
    text = explain_run(status="failed", extra={"failure": "\x1b]0;owned\x07", "notes": ["\x1b[2J"]})
    assert "\\u001b]0;owned\\u0007" in text
    assert "\x1b" not in text


def test_the_noise_floor_stands_beside_a_rule():
    noise = make_stored(simulate_requests(seed=9), spec=make_spec(), label="c")
    assert "baseline against baseline: " in explain_run(calibration=noise)


def test_where_the_spread_comes_from_stands_beside_a_rule_and_says_what_to_add():
    def explain_noise(**noise):
        stored = make_stored(simulate_requests(blocks=6, **noise), spec=make_spec())
        policy = parse_policy({"rules": RULES}, "test")
        return explain(judge(*views_of_run(stored), policy, apart=False))

    quiet = explain_noise(launch_sd=0.0001, request_sd=0.02)
    assert quiet.count("so more prompts or repetitions narrow the bounds most") == 2
    restless = explain_noise(launch_sd=0.02, request_sd=0.001)
    assert restless.count("so more launches narrow the bounds most") == 2


def test_looks_of_a_run_that_stopped_by_its_results_are_explained():
    looks = [{"blocks": 2, "spent": 0.5}, {"blocks": 3, "spent": 1.0}]
    text = explain_run(extra={"sequential": {"looks": looks}})
    assert "look 2, 3 launches: each bound at 9" in text
    assert "with looks after 2, 3 launches" in text
