import pytest
from factories import make_pair_of_samples, make_request, make_sample, make_stored

from evalgate.compare import pair_requests, pair_samples, views_of_run
from evalgate.lengths import check_lengths
from evalgate.policy import Validity


def make_load(baseline, candidate, **changes):
    return [
        make_request(arm, prompt_id=f"p{i}", output_tokens=n, tpot_s=0.001, **changes)
        for arm, lengths in (("baseline", baseline), ("candidate", candidate))
        for i, n in enumerate(lengths)
    ]


def check(requests=(), samples=(), *, forced=False, **limits):
    base, cand = views_of_run(make_stored(requests, samples))
    return check_lengths(
        pair_requests(base, cand), pair_samples(base, cand), Validity(**limits), forced=forced
    )


def test_outputs_that_run_away_are_caught_from_two_pairs():
    (reason,) = check(make_load([95, 12], [1024, 1024])).reasons
    assert "19.14 times as long" in reason
    assert "2048 against 107" in reason


def test_outputs_that_break_off_are_caught_too():
    (reason,) = check(make_load([1024, 1024], [95, 12])).reasons
    assert "19.14 times as short" in reason


def test_a_ratio_below_two_needs_a_bound_that_excludes_one():
    # 1.5 in sum; in the first case one pair makes it, in the second every pair does.
    assert check(make_load([20, 20, 20, 20], [60, 20, 20, 20])).reasons == []
    (reason,) = check(make_load([20, 20, 20, 20], [30, 31, 29, 30])).reasons
    assert "1.50 times" in reason


def test_a_few_tokens_more_or_less_are_no_fault():
    assert check(make_load([100, 80, 90], [105, 77, 92])).reasons == []


def test_a_limit_of_zero_judges_nothing():
    assert check(make_load([95, 12], [1024, 1024]), max_length_ratio=0.0).reasons == []


def test_an_arm_that_says_nothing_is_caught():
    (reason,) = check(make_load([10, 10], [0, 0])).reasons
    assert "candidate produced no output token" in reason


def test_more_outputs_cut_by_the_limit_are_caught():
    requests = [
        make_request(arm, prompt_id=f"p{i}", finish_reason="length" if i < cut else "stop")
        for arm, cut in (("baseline", 1), ("candidate", 3))
        for i in range(10)
    ]
    (reason,) = check(requests).reasons
    assert "from 10.0% to 30.0%" in reason
    assert check(requests, max_length_finish_increase=0.2).reasons == []


def test_more_repetition_is_caught_and_less_is_not():
    def make(arm, flagged):
        return [
            make_sample(arm, sample_id=f"s{i}", flags=["repetition"] if i < flagged else [])
            for i in range(10)
        ]

    (reason,) = check(samples=[*make("baseline", 0), *make("candidate", 1)]).reasons
    assert "from 0.0% to 10.0%" in reason
    assert check(samples=[*make("baseline", 9), *make("candidate", 0)]).reasons == []


def test_forced_lengths_take_the_evidence_from_the_tasks():
    requests = make_load([128, 128], [128, 128], finish_reason="length")
    samples = [
        make_sample("baseline", sample_id=s, output_tokens=10) for s in ("a", "b")
    ] + [make_sample("candidate", sample_id=s, output_tokens=300) for s in ("a", "b")]  # fmt: skip
    (reason,) = check(requests, samples, forced=True).reasons
    assert reason.startswith("tasks: ")


def test_forced_lengths_without_tasks_are_warned_of():
    requests = make_load([128], [128])
    assert "nothing here shows" in check(requests, forced=True).warnings[0]
    assert check(requests, make_pair_of_samples([1], [1]), forced=True).warnings == []
    assert check(requests).warnings == []


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_pairs_with_a_failure_are_no_evidence_of_length(side):
    requests = make_load([10, 10], [10, 10])
    requests += [
        make_request(arm, prompt_id="x", output_tokens=None if arm == side else 5000,
                     error="timeout" if arm == side else None, tpot_s=1e-4)
        for arm in ("baseline", "candidate")
    ]  # fmt: skip
    assert check(requests).reasons == []
