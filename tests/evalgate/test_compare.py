import numpy as np
import pytest
from factories import (
    make_arm,
    make_pair_of_samples,
    make_request,
    make_run,
    make_sample,
    make_spec,
    make_stored,
    simulate_requests,
)

from evalgate.compare import (
    compute_identical_share,
    find_common_baseline,
    pair_requests,
    pair_samples,
    view,
    views_of_run,
)
from evalgate.errors import EvidenceError, UsageError
from evalgate.records import StoredRun


def make_views(requests, samples=(), **run):
    return views_of_run(make_stored(requests, samples, **run))


def test_pairs_form_by_key_whatever_the_order_in_the_file():
    records = simulate_requests(blocks=2, prompts=2)
    straight, backwards = (
        pairs.select(np.ones(len(pairs), dtype=bool))
        for pairs in (pair_requests(*make_views(order)) for order in (records, records[::-1]))
    )
    assert [a.key for a, _ in straight] == [a.key for a, _ in backwards]
    assert all(a.key == b.key and a.arm != b.arm for a, b in backwards)


def test_warm_up_is_in_no_pair():
    records = [make_request(arm, phase="warmup") for arm in ("baseline", "candidate")]
    assert len(pair_requests(*make_views(records))) == 0


def test_a_request_without_a_partner_is_counted_on_its_side():
    records = [
        make_request("baseline"),
        make_request("candidate"),
        make_request("candidate", prompt_id="p1"),
    ]
    pairs = pair_requests(*make_views(records))
    assert (len(pairs), pairs.unpaired) == (1, (0, 1))


def test_a_block_of_one_arm_only_is_dropped_by_number():
    records = [make_request("baseline"), make_request("candidate"), make_request(block=3)]
    pairs = pair_requests(*make_views(records))
    assert (pairs.dropped_blocks, pairs.unpaired) == ((3,), (0, 0))


def test_blocks_that_a_resumed_run_excluded_are_not_seen():
    records = [make_request(arm, block=b) for arm in ("baseline", "candidate") for b in (0, 1)]
    base, cand = make_views(records, extra={"excluded_blocks": [0]})
    assert pair_requests(base, cand).blocks == [1]


def test_a_key_that_occurs_twice_cannot_be_paired():
    base, cand = make_views([make_request(), make_request(), make_request("candidate")])
    with pytest.raises(EvidenceError, match=r"two request records have the key \(0, '8K-16K'"):
        pair_requests(base, cand)


def test_a_failed_request_has_no_value_in_any_column():
    records = [make_request(), make_request("candidate", error="timeout")]
    pairs = pair_requests(*make_views(records))
    assert pairs.candidate.e2el_s != pairs.candidate.e2el_s
    assert pairs.baseline.e2el_s[0] == pytest.approx(0.7)


def test_tokens_that_came_in_one_chunk_have_no_tpot():
    records = [
        make_request(),
        make_request("candidate", chunk_ns=[500_000_000], end_ns=500_000_000, output_tokens=12),
    ]
    pairs = pair_requests(*make_views(records))
    assert pairs.candidate.tpot_s != pairs.candidate.tpot_s


def test_samples_pair_by_block_task_and_id():
    samples = [
        *make_pair_of_samples([1, 0], [1, 1]),
        make_sample("candidate", task="other"),
    ]
    pairs = pair_samples(*make_views([], samples))
    assert [(a.sample_id, b.sample_id) for a, b in pairs.pairs] == [("s0", "s0"), ("s1", "s1")]
    assert pairs.unpaired == (0, 1)


def test_an_arm_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(UsageError, match="no arm 'candidat'; it has baseline, candidate"):
        view(make_stored(), "candidat")


def test_a_run_of_one_arm_says_what_it_is_good_for():
    one = make_stored(arms={"baseline": make_arm()}, spec=make_spec(arms={"baseline": {}}))
    with pytest.raises(UsageError, match=r"it has baseline: one arm has no verdict, compare it"):
        views_of_run(one)


def test_a_run_of_several_arms_needs_one_named():
    with pytest.raises(UsageError, match="baseline, candidate: name one"):
        view(make_stored())


def test_a_run_that_broke_off_before_an_arm_says_so():
    run = make_run(arms={"baseline": make_arm()}, spec=make_spec(), status="failed")
    with pytest.raises(EvidenceError, match="status failed"):
        view(StoredRun("r1", run), "candidate")


def test_identical_outputs_is_the_share_of_equal_texts():
    records = [
        *(make_request(prompt_id=name) for name in "pqr"),
        make_request("candidate", prompt_id="p"),
        make_request("candidate", prompt_id="q", output_text="else"),
        make_request("candidate", prompt_id="r", error="timeout"),
    ]
    same = pair_requests(*make_views(records)).same_text
    assert compute_identical_share(same) == 0.5
    assert compute_identical_share(same[2:]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"min_tokens": None},
        {"weight": -1.0},
        {"max_tokens": 1},
    ],
)
def test_a_damaged_bucket_in_a_stored_spec_is_named(change):
    spec = make_spec()
    spec["load"]["buckets"][0].update(change)
    with pytest.raises(EvidenceError, match=r"spec\.load\.buckets is damaged"):
        _ = view(make_stored(spec=spec), "baseline").buckets


def test_damaged_evidence_is_named_with_its_run():
    arms = {name: make_arm(extra={"evidence": 5}) for name in ("baseline", "candidate")}
    with pytest.raises(EvidenceError, match=r"run r1, arm baseline: .*evidence is 5, not a list"):
        _ = view(make_stored(arms=arms), "baseline").evidence
    with pytest.raises(EvidenceError, match=r"run r1: .*excluded_blocks is 7, not a list"):
        view(make_stored(extra={"excluded_blocks": 7}), "baseline")


def test_two_runs_have_a_common_baseline_only_when_its_build_is_the_same():
    one, two = make_stored(label="r1"), make_stored(label="r2")
    assert find_common_baseline(view(one, "candidate"), view(two, "candidate")) is not None
    other = make_stored(
        label="r3", arms={"baseline": make_arm(server_version="0.33.0"), "candidate": make_arm()}
    )
    assert find_common_baseline(view(one, "candidate"), view(other, "candidate")) is None
    assert find_common_baseline(*views_of_run(one)) is None
