"""What a calibration's verdict says of false alarms."""

from __future__ import annotations

import pytest

from evalgate.verdicts import compute_calibration_exit, describe_false_alarms


def make_verdict(*rules: tuple[str, str], status: str = "inconclusive") -> dict:
    """A verdict of rules given as (kind, status)."""
    found = [{"name": f"r{i}", "kind": k, "status": s} for i, (k, s) in enumerate(rules)]
    return {"status": status, "rules": found}


@pytest.mark.parametrize(
    ("rules", "code", "sentence"),
    [
        ([("non_inferiority", "pass"), ("superiority", "inconclusive")], 0, "0 of 2 rules"),
        # A gain of the baseline over itself is as false as a loss.
        ([("superiority", "pass"), ("non_inferiority", "pass")], 1, "1 of 2 rules (r0)"),
        ([("non_inferiority", "fail"), ("superiority", "fail")], 1, "2 of 2 rules (r0, r1)"),
    ],
)
def test_a_difference_between_the_baseline_and_itself_is_a_false_alarm(rules, code, sentence):
    verdict = make_verdict(*rules)
    assert compute_calibration_exit(verdict) == code
    assert describe_false_alarms(verdict) == f"false alarms of base against base: {sentence}"


def test_an_invalid_calibration_says_nothing_of_false_alarms():
    assert compute_calibration_exit(make_verdict(status="invalid")) == 4
