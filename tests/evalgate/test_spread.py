"""Variance components of pairs and launches, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evalgate.spread import Spread, compute_spread


def test_two_launches_of_two_pairs_by_hand():
    # Means 1 and 5, overall 3. Within: (1 + 1 + 1 + 1)/(4 - 2) = 2. Between: 2 (4 + 4)/1 = 16.
    # Launches: (16 - 2)/2 = 7.
    found = compute_spread(np.array([0.0, 2.0, 4.0, 6.0]), np.array([7, 7, 9, 9]))
    assert found.pair_sd == pytest.approx(math.sqrt(2))
    assert found.launch_sd == pytest.approx(math.sqrt(7))
    assert found.launch_share == pytest.approx(7 / (7 + 2 / 2))


def test_launches_that_differ_by_less_than_their_pairs_explain_have_no_spread():
    found = compute_spread(np.array([0.0, 2.0, 0.0, 2.0]), np.array([0, 0, 1, 1]))
    assert (found.launch_sd, found.launch_share) == (0.0, 0.0)


def test_launches_of_unequal_size_are_weighed():
    # Sizes 1 and 3: means 4 and 2, overall 2.5. Within: 2/(4 - 2) = 1. Between: 2.25 + 0.75 = 3.
    # Size: (4 - 10/4)/1 = 1.5, so (3 - 1)/1.5 = 4/3.
    found = compute_spread(np.array([4.0, 1.0, 2.0, 3.0]), np.array([0, 1, 1, 1]))
    assert found.launch_sd == pytest.approx(math.sqrt(4 / 3))


@pytest.mark.parametrize("launch", [[0, 0, 0], [0, 1, 2]])
def test_nothing_is_said_of_one_launch_or_of_single_pairs(launch):
    assert compute_spread(np.array([0.1, 0.2, 0.3]), np.array(launch)) is None


def test_no_variance_at_all_has_no_share():
    assert Spread(0.0, 0.0, 4).to_json() == {
        "pair_sd_percent": 0.0,
        "launch_sd_percent": 0.0,
        "launch_share": None,
    }


def test_what_was_planted_is_found():
    rng = np.random.default_rng(1)
    launch = np.repeat(np.arange(400), 20)
    ratios = np.repeat(rng.normal(0, 0.004, 400), 20) + rng.normal(0, 0.01, 8000)
    found = compute_spread(ratios, launch)
    assert found.pair_sd == pytest.approx(0.01, rel=0.03)
    assert found.launch_sd == pytest.approx(0.004, rel=0.10)
