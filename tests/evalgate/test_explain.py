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
    assert text.startswith("1. The evidence is invalid, for 1 reasons:\n   - run r1 is 'failed'")
    assert text.endswith("INVALID, exit code 4.")


def test_the_noise_floor_stands_beside_a_rule():
    noise = make_stored(simulate_requests(seed=9), spec=make_spec(), label="c")
    assert "baseline against baseline: " in explain_run(calibration=noise)
