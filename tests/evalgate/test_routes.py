"""The client's own expectation of engine steps, worked out by hand."""

import pytest

from evalgate.routes import compute_expected_steps, merge_forms, strip_form


@pytest.mark.parametrize(
    ("prompt", "output", "cached", "expected"),
    [
        (512, 1, 0, {"first_chunk": 1}),
        (513, 1, 0, {"first_chunk": 1, "decode": 1}),  # a last chunk of one token is decode
        (514, 1, 0, {"first_chunk": 1, "prefix": 1}),
        (1600, 5, 0, {"first_chunk": 1, "prefix": 3, "decode": 4}),
        (1600, 5, 512, {"prefix": 3, "decode": 4}),  # cached history leaves no first chunk
        (10, 0, 0, {"first_chunk": 1}),
        (1, 3, 0, {"decode": 3}),  # and so is a prompt of one token
    ],
)
def test_steps_follow_from_token_counts(prompt, output, cached, expected):
    steps = compute_expected_steps(prompt, output, 512, cached)
    assert {route: n for route, n in steps.items() if n} == expected


def test_a_form_stands_for_its_route_and_a_plain_form_does_not():
    assert strip_form("prefix_unpacked") == "prefix"
    assert strip_form("first_chunk") == "first_chunk"
    assert strip_form("prefix_torch") == "prefix_torch"


def test_counts_of_a_route_and_its_forms_are_added_and_zeros_left_out():
    counts = {"prefix": 3, "prefix_unpacked": 40, "decode": 5, "fallback": 0}
    assert merge_forms(counts) == {"prefix": 43, "decode": 5}
