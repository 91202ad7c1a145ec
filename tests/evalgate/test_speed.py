import math

import numpy as np
import pytest
from factories import make_request, make_spec, make_stored, simulate_requests
from msgspec.structs import replace

from evalgate.compare import find_common_baseline, pair_requests, view, views_of_run
from evalgate.speed import estimate_speed


def estimate(records, metric, **options):
    base, cand = views_of_run(make_stored(records, spec=make_spec()))
    return estimate_speed(pair_requests(base, cand), metric, base.buckets, **options)


def make_pair(ratio, *, block=0, prompt_id="p0", bucket="8K-16K", tokens=(11, 11), **options):
    """A pair whose TPOT and TTFT have the given ratio."""
    return [
        make_request(
            "baseline", block=block, prompt_id=prompt_id, bucket=bucket, output_tokens=tokens[0],
            **options,
        ),
        make_request(
            "candidate", block=block, prompt_id=prompt_id, bucket=bucket, output_tokens=tokens[1],
            ttft_s=0.5 * ratio, tpot_s=0.02 * ratio, **options,
        ),
    ]  # fmt: skip


def test_the_change_is_the_geometric_mean_over_launches():
    # Block values log 1.1 and log 0.9: exp(mean) - 1 = sqrt(0.99) - 1.
    effect = estimate([*make_pair(1.1), *make_pair(0.9, block=1)], "tpot")
    assert math.expm1(effect.value) == pytest.approx(math.sqrt(0.99) - 1)
    assert (effect.n_pairs, effect.n_blocks) == (2, 2)


def test_launches_count_once_however_many_pairs_they_hold():
    records = [*make_pair(1.0, block=1)]
    for i in range(9):
        records += make_pair(1.1, prompt_id=f"p{i}")
    assert estimate(records, "tpot").value == pytest.approx(math.log(1.1) / 2)


def test_raw_throughput_rewards_longer_outputs_and_the_normalised_does_not():
    # Same pace, but the candidate says 22 tokens: 22/0.92 against 11/0.70 tokens/s.
    records = [*make_pair(1.0, tokens=(11, 22)), *make_pair(1.0, block=1, tokens=(11, 22))]
    raw = estimate(records, "output_throughput")
    normalised = estimate(records, "normalised_output_throughput")
    assert math.exp(raw.value) == pytest.approx((22 / 0.92) / (11 / 0.70))
    assert normalised.value == pytest.approx(0.0, abs=1e-12)


def test_a_throughput_is_the_log_ratio_of_the_two_figures_of_a_block():
    records = [
        make_request("baseline", ttft_s=1.0, tpot_s=0.1, output_tokens=11),  # 11 tokens in 2 s
        make_request("candidate", ttft_s=0.5, tpot_s=0.05, output_tokens=11),  # 1 s
        make_request("baseline", prompt_id="p1", ttft_s=1.0, tpot_s=0.2, output_tokens=21),  # 5 s
        make_request("candidate", prompt_id="p1", ttft_s=1.0, tpot_s=0.2, output_tokens=21),
    ]
    assert math.exp(estimate(records, "output_throughput").value) == pytest.approx(7 / 6)


def test_a_bucket_that_the_spec_lacks_has_no_weight():
    records = [
        make_request(arm, bucket=bucket, prompt_id=prompt)
        for arm in ("baseline", "candidate")
        for bucket in ("4K-8K", "8K-16K", "16K-32K", "of another run")
        for prompt in ("p0", "p1")
    ]
    effect = estimate(records, "weighted_output_throughput")
    assert effect.estimate.bounds() == pytest.approx((0, 0))


def test_source_vectors_weigh_the_buckets():
    # 12.400507/11.574609/10.174793 -> 11.319844; 12.606487/12.319985/11.403174 -> 12.102242.
    figures = {
        "baseline": (12.400507, 11.574609, 10.174793),
        "candidate": (12.606487, 12.319985, 11.403174),
    }
    # 11 tokens at the bucket's rate: 0.1 s to the first, the rest of 11/rate in ten steps.
    records = [
        make_request(arm, bucket=bucket, block=block, ttft_s=0.1, tpot_s=(11 / rate - 0.1) / 10)
        for arm, rates in figures.items()
        for bucket, rate in zip(("4K-8K", "8K-16K", "16K-32K"), rates, strict=True)
        for block in (0, 1)
    ]
    effect = estimate(records, "weighted_output_throughput")
    assert 100 * math.expm1(effect.value) == pytest.approx(6.91, abs=0.005)


def test_source_rows_of_the_8k_16k_bucket_keep_their_signs():
    # +0.536 % output throughput, -0.295 % mean TTFT, -0.970 % mean TPOT at equal lengths.
    ttft, tpot, n = 2.0, 0.05, 101
    records = []
    for block in (0, 1):
        records += [
            make_request("baseline", block=block, ttft_s=ttft, tpot_s=tpot, output_tokens=n),
            make_request("candidate", block=block, ttft_s=ttft * (1 - 0.00295),
                         tpot_s=tpot * (1 - 0.00970), output_tokens=n),
        ]  # fmt: skip
    changes = {
        metric: 100 * math.expm1(estimate(records, metric, bucket="8K-16K").value)
        for metric in ("ttft", "tpot", "output_throughput")
    }
    assert changes["ttft"] == pytest.approx(-0.295, abs=1e-4)
    assert changes["tpot"] == pytest.approx(-0.970, abs=1e-4)
    # (2 + 5) / (1.9941 + 4.9515) - 1.
    assert changes["output_throughput"] == pytest.approx(100 * (7 / 6.9456 - 1), abs=1e-3)


def test_a_weighted_figure_needs_every_bucket():
    effect = estimate(make_pair(1.0), "weighted_output_throughput")
    assert effect.estimate is None
    assert "4K-8K, 16K-32K" in effect.problem


def test_a_one_token_output_is_left_out_of_tpot_and_counted():
    records = [*make_pair(1.1), *make_pair(1.0, prompt_id="p1", tokens=(11, 1))]
    effect = estimate(records, "tpot")
    assert (effect.n_pairs, effect.n_dropped) == (1, 1)
    assert estimate(records, "ttft").n_dropped == 0


def test_one_launch_is_bootstrapped_over_prompts_with_their_repetitions():
    effect = estimate(simulate_requests(blocks=1, prompts=10, repetitions=3), "tpot")
    assert (effect.estimate.unit, effect.estimate.n) == ("prompts", 30)
    assert effect.n_pairs == 90
    assert "launches were not sampled" in effect.details["method"]
    low, high = effect.estimate.bounds()
    assert low < effect.value < high


@pytest.mark.parametrize("statistic", ["mean", "p50"])
def test_one_launch_finds_a_planted_change(statistic):
    records = simulate_requests(blocks=1, prompts=12, repetitions=2, tpot_change=0.05, launch_sd=0)
    low, high = estimate(records, "tpot", statistic=statistic).estimate.bounds()
    assert (low, high) == pytest.approx((math.log(1.05), math.log(1.05)), abs=0.003)
    assert low < high


def test_one_prompt_in_one_launch_has_no_bounds():
    effect = estimate(make_pair(1.1), "tpot")
    assert effect.estimate is None
    assert effect.value == pytest.approx(math.log(1.1))


def test_p50_is_the_log_ratio_of_the_two_medians_of_a_block():
    records = []
    for i, (a, b) in enumerate([(0.01, 0.02), (0.03, 0.03), (0.05, 0.03)]):
        records += [
            make_request("baseline", prompt_id=f"p{i}", tpot_s=a),
            make_request("candidate", prompt_id=f"p{i}", tpot_s=b),
        ]
    assert estimate(records, "tpot", statistic="p50").value == pytest.approx(0.0, abs=1e-6)


def test_p99_is_gated_from_100_values_up():
    few = simulate_requests(blocks=2, prompts=33)
    assert "a block has 99" in estimate(few, "ttft", statistic="p99").problem
    enough = simulate_requests(blocks=2, prompts=34)
    assert estimate(enough, "ttft", statistic="p99").problem is None


def test_an_unknown_token_count_leaves_no_pair_for_tpot():
    records = [
        replace(make_request(arm, output_tokens=11), output_tokens=None)
        for arm in ("baseline", "candidate")
    ]
    effect = estimate(records, "tpot")
    assert (effect.estimate, effect.n_dropped) == (None, 1)
    assert "no pair has TPOT" in effect.problem


def make_runs_with_drift(drift):
    """Two runs of the same arms; everything in the second is slower by ``drift``."""
    records = [
        simulate_requests(seed=seed, blocks=4, tpot_change=change, launch_sd=0.0005)
        for seed, change in ((1, 0.0), (2, 0.03))
    ]
    slowed = [replace(r, chunk_ns=[round(t * (1 + drift)) for t in r.chunk_ns]) for r in records[1]]
    return make_stored(records[0], label="r1"), make_stored(slowed, label="r2")


def test_builds_measured_apart_are_compared_by_welch():
    one, two = make_runs_with_drift(0.0)
    sides = view(one, "candidate"), view(two, "candidate")
    effect = estimate_speed(pair_requests(*sides), "tpot", sides[0].buckets, apart=True)
    assert effect.details["method"] == "Welch's t over launches"
    assert math.expm1(effect.value) == pytest.approx(0.03, abs=0.003)


@pytest.mark.parametrize("arm", ["candidate", "baseline"])
def test_a_common_baseline_arm_takes_the_drift_out(arm):
    one, two = make_runs_with_drift(0.10)
    sides = view(one, arm), view(two, "candidate")
    pairs = pair_requests(*sides, find_common_baseline(*sides))
    effect = estimate_speed(pairs, "tpot", sides[0].buckets, apart=True)
    assert effect.details["method"].startswith("ratio of ratios")
    assert math.expm1(effect.value) == pytest.approx(0.03, abs=0.003)
    plain = estimate_speed(pair_requests(*sides), "tpot", sides[0].buckets, apart=True)
    assert math.expm1(plain.value) == pytest.approx(1.03 * 1.10 - 1, abs=0.004)


def test_many_prompts_are_resampled_in_groups():
    rng = np.random.default_rng(5)
    records = []
    for i in range(700):
        records += make_pair(float(np.exp(rng.normal(0, 0.02))), prompt_id=f"p{i}")
    effect = estimate(records, "tpot")
    assert effect.n_pairs == 700
    # The standard error over 700 pairs is 0.02/sqrt(700) = 0.00076, however they are grouped.
    low, high = effect.estimate.bounds()
    assert (high - low) / 2 == pytest.approx(1.645 * 0.00076, rel=0.15)
