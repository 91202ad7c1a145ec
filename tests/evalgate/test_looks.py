"""The looks of a run: what each spends, and how they are read back."""

from __future__ import annotations

import pytest
from factories import make_run

from evalgate.errors import EvidenceError
from evalgate.looks import Look, compute_spent, describe_looks, read_looks


def test_a_quarter_of_the_launches_spends_an_eighth_of_the_error_rate():
    assert compute_spent(3, 12) == pytest.approx(1 / 8)  # 0.25 ^ 1.5
    assert compute_spent(12, 12) == 1.0
    assert compute_spent(13, 12) == 1.0


def test_looks_are_read_from_the_run():
    stored = {"looks": [{"blocks": 3, "spent": 0.2}, {"blocks": 5, "spent": 1.0}]}
    assert read_looks(make_run(extra={"sequential": stored})) == (Look(3, 0.2), Look(5, 1.0))
    assert read_looks(make_run(extra={})) == ()
    assert read_looks(make_run()) == ()


@pytest.mark.parametrize(
    "looks",
    [
        [{"blocks": 3}],
        [{"blocks": 5, "spent": 0.5}, {"blocks": 3, "spent": 1.0}],
        [{"blocks": 3, "spent": 0.5}, {"blocks": 4, "spent": 0.2}],
        [{"blocks": 3, "spent": 1.5}],
        [{"blocks": "3", "spent": 0.5}],
        None,
    ],
)
def test_damaged_looks_are_refused(looks):
    with pytest.raises(EvidenceError, match="sequential is damaged"):
        read_looks(make_run(extra={"sequential": {"looks": looks}}))


def test_looks_are_named_by_their_launches():
    assert describe_looks([Look(3, 0.2), Look(5, 1.0)]) == "3, 5"
