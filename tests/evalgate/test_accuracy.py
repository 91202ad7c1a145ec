import numpy as np
import pytest
from factories import make_fidelity, make_pair_of_samples, make_sample, make_spec, make_stored
from msgspec.structs import replace

from evalgate.accuracy import estimate_fidelity, estimate_score
from evalgate.compare import pair_samples, view, views_of_run


def score(samples, **options):
    base, cand = views_of_run(make_stored([], samples, spec=make_spec()))
    return estimate_score(pair_samples(base, cand), base, **options)


def test_repeats_of_a_sample_are_not_new_evidence():
    once = make_pair_of_samples([1, 1, 0], [1, 0, 0])
    thrice = [replace(s, block=b) for b in range(3) for s in once]
    assert score(thrice).n_pairs == 3
    assert score(thrice).n_blocks == 3
    assert score(thrice).estimate.bounds() == score(once).estimate.bounds()


def test_binary_scores_get_tango_and_mcnemar_beside_it():
    effect = score(make_pair_of_samples([1, 1, 1, 0], [1, 0, 0, 1]))
    assert "Tango" in effect.details["method"]
    assert (effect.details["gains"], effect.details["losses"]) == (1, 2)
    assert effect.details["mcnemar_p"] == 1.0
    assert effect.value == pytest.approx(-0.25)


def test_other_scores_are_bootstrapped_and_wait_for_min_samples():
    samples = make_pair_of_samples([0.5, 0.4, 0.9], [0.5, 0.3, 0.8])
    effect = score(samples, min_samples=5)
    assert effect.problem == "3 samples, and scores other than 0/1 are judged from 5 up"
    assert effect.more == {"unit": "samples", "more": 2}
    assert score(samples, min_samples=3).problem is None
    low, high = effect.estimate.bounds()
    assert low < effect.value < high


def test_a_sample_without_a_score_is_left_out_and_counted():
    samples = [*make_pair_of_samples([1, 1], [1, 1]), make_sample(sample_id="x"),
               make_sample("candidate", sample_id="x", error="scoring")]  # fmt: skip
    effect = score(samples)
    assert (effect.n_pairs, effect.n_dropped) == (2, 1)


def test_a_samples_bucket_follows_its_prompt_tokens():
    samples = [
        *make_pair_of_samples([1, 1], [1, 0], prompt_tokens=8191),
        *make_pair_of_samples([1], [1], prompt_tokens=8192, prefix="t"),
    ]
    assert score(samples, bucket="4K-8K").n_pairs == 2
    assert score(samples, bucket="8K-16K").n_pairs == 1
    assert score(samples, bucket="16K-32K").estimate is None


def test_one_sample_has_no_bounds():
    effect = score(make_pair_of_samples([1], [0]))
    assert effect.estimate is None
    assert effect.more == {"unit": "samples", "more": 1}


def fidelity(candidate, yardsticks, metric="top1_agreement"):
    stored = make_stored(fidelity=candidate)
    return estimate_fidelity(view(stored, "candidate"), yardsticks, metric)


def make_texts(values, arm="candidate", **changes):
    return [
        make_fidelity(arm, sample_id=f"t{i}", top1_agreement=v, **changes)
        for i, v in enumerate(values)
    ]


def test_agreement_is_judged_against_base_against_base():
    effect = fidelity(
        make_texts([0.96, 0.97, 0.95]),
        [("second pass", make_texts([0.98, 0.98, 0.98], "baseline"))],
    )
    assert effect.value == pytest.approx(-0.02)
    assert effect.n_pairs == 3
    # Differences -0.02, -0.01, -0.03: se 0.01/sqrt(3), t(0.95; 2) = 2.919986.
    low, _ = effect.estimate.bounds()
    assert low == pytest.approx(-0.02 - 2.919986 * 0.01 / np.sqrt(3), abs=1e-6)


def test_the_first_yardstick_that_exists_counts():
    records = make_texts([1.0, 1.0], "baseline")
    effect = fidelity(make_texts([1.0, 1.0]), [("second pass", []), ("calibration", records)])
    assert effect.details["yardstick"] == "calibration"


def test_full_agreement_of_few_positions_is_no_proof():
    # 2 texts of 10 positions, all agreeing: 20 positions still allow a loss of 1 - 0.05^(1/20).
    records = make_texts([1.0, 1.0], positions=10)
    effect = fidelity(records, [("second pass", make_texts([1.0, 1.0], "baseline"))])
    assert effect.estimate.bounds()[0] == pytest.approx(-(1 - 0.05 ** (1 / 20)))


def test_routes_of_a_text_are_one_piece_of_evidence():
    records = [
        make_fidelity(arm, sample_id=f"t{i}", route=route, mean_gap=gap)
        for i in range(2)
        for route in ("decode", "prefix")
        for arm, gap in (("candidate", 0.03), ("baseline", 0.01))
    ]
    own = [r for r in records if r.arm == "candidate"]
    theirs = [r for r in records if r.arm == "baseline"]
    effect = fidelity(own, [("second pass", theirs)], "logprob_gap")
    assert effect.n_pairs == 2
    assert effect.value == pytest.approx(0.02)


def test_fidelity_is_told_by_prompt_length_too():
    # Buckets 4K-8K and 8K-16K; a text of 600 tokens lies in neither and counts in the whole only.
    lengths = {"a": 5000, "b": 6000, "c": 9000, "d": 600}
    gaps = {"a": (0.01, 0.03), "b": (0.03, 0.05), "c": (0.0, 0.1), "d": (0.0, 0.02)}
    theirs, own = (
        [
            make_fidelity(arm, sample_id=name, prompt_tokens=lengths[name], mean_gap=gap[place])
            for name, gap in gaps.items()
        ]
        for place, arm in enumerate(("baseline", "candidate"))
    )
    effect = fidelity(own, [("second pass", theirs)], "logprob_gap")
    assert effect.details["value"] == pytest.approx(0.05)
    buckets = effect.details["buckets"]
    assert list(buckets) == ["4K-8K", "8K-16K"]
    assert buckets["4K-8K"] == pytest.approx({"n": 2, "yardstick_value": 0.02, "value": 0.04})
    assert buckets["8K-16K"] == pytest.approx({"n": 1, "yardstick_value": 0.0, "value": 0.1})


def test_without_records_or_yardstick_it_says_what_to_run():
    assert "no fidelity records of the candidate" in fidelity([], []).problem
    assert "base-against-base" in fidelity(make_texts([1.0]), [("second pass", [])]).problem
