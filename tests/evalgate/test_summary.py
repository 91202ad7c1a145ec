import pytest
from factories import make_pair_of_samples, make_request, make_sample, make_spec, make_stored

from evalgate.compare import pair_requests, views_of_run
from evalgate.summary import summarise


def summarise_both(requests=(), samples=()):
    base, cand = views_of_run(make_stored(requests, samples, spec=make_spec()))
    return summarise(base), summarise(cand, pair_requests(base, cand))


def test_scores_are_told_by_length_and_depth_of_the_answer():
    # Buckets 4K-8K and 8K-16K; 0.1 lies nearest to the depth 0, 0.9 to 1.
    cells = [(5000, 0.1, 1.0), (5000, 0.0, 0.5), (5000, 0.5, 0.0), (9000, 0.9, 0.25)]
    samples = [
        make_sample(arm, sample_id=f"s{i}", prompt_tokens=n, score=score, extra={"depth": depth})
        for i, (n, depth, score) in enumerate(cells)
        for arm in ("baseline", "candidate")
    ]
    samples += [make_sample(arm, task="aggregation") for arm in ("baseline", "candidate")]
    tasks = summarise_both(samples=samples)[1]["tasks"]
    assert tasks["retrieval"]["depths"] == {
        "4K-8K": {"0": {"n": 2, "mean": 0.75}, "0.5": {"n": 1, "mean": 0.0}},
        "8K-16K": {"1": {"n": 1, "mean": 0.25}},
    }
    assert "depths" not in tasks["aggregation"]


@pytest.mark.parametrize("depth", ["nan", float("inf"), [0.5], {}])
def test_a_depth_that_is_no_number_is_not_known(depth):
    samples = [make_sample(arm, extra={"depth": depth}) for arm in ("baseline", "candidate")]
    assert "depths" not in summarise_both(samples=samples)[1]["tasks"]["retrieval"]


def test_tpot_is_the_mean_of_requests_not_of_gaps():
    # r1: TTFT 0.1, E2EL 1.1, 11 tokens; r2: 0.1, 2.1, 101 tokens. By gaps it would be 0.02727.
    records = [
        make_request(prompt_id="r1", ttft_s=0.1, tpot_s=0.1, output_tokens=11),
        make_request(prompt_id="r2", ttft_s=0.1, tpot_s=0.02, output_tokens=101),
    ]
    base, _ = summarise_both(records)
    assert base["buckets"]["8K-16K"]["tpot_s"]["mean"] == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 4], {"p50": 2.5, "p99": 3.97}),
        (range(1, 11), {"p90": 9.1}),
        ([10], {"p50": 10, "p90": 10, "p95": 10, "p99": 10}),
    ],
)
def test_percentiles_interpolate_linearly(values, expected):
    records = [make_request(prompt_id=f"p{v}", ttft_s=float(v)) for v in values]
    found = summarise_both(records)[0]["buckets"]["8K-16K"]["ttft_s"]
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_throughput_is_tokens_over_time():
    # 128 tokens in 1.5441598830 s.
    chunks = [100_000_000, 1_544_159_883]
    record = make_request(output_tokens=128, chunk_ns=chunks, end_ns=chunks[-1])
    base, _ = summarise_both([record])
    assert base["output_throughput"] == pytest.approx(82.893, abs=5e-4)


def test_weighted_throughput_reproduces_the_source_vectors():
    figures = {"4K-8K": 12.400507, "8K-16K": 11.574609, "16K-32K": 10.174793}
    better = {"4K-8K": 12.606487, "8K-16K": 12.319985, "16K-32K": 11.403174}
    records = [
        make_request(arm, bucket=name, ttft_s=0.1, tpot_s=(11 / rate - 0.1) / 10)
        for arm, rates in (("baseline", figures), ("candidate", better))
        for name, rate in rates.items()
    ]
    base, cand = summarise_both(records)
    assert base["weighted_output_throughput"] == pytest.approx(11.319844, abs=1e-5)
    assert cand["weighted_output_throughput"] == pytest.approx(12.102242, abs=1e-5)
    assert cand["buckets"]["4K-8K"]["output_throughput"] == pytest.approx(12.606487, abs=1e-5)


def test_a_weighted_figure_is_none_when_a_bucket_is_empty():
    base, _ = summarise_both([make_request()])
    assert base["weighted_output_throughput"] is None
    assert base["buckets"]["4K-8K"]["n"] == 0
    assert base["buckets"]["4K-8K"]["ttft_s"] == {
        "n": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None,
    }  # fmt: skip


def test_normalised_throughput_gives_the_candidate_the_baselines_lengths():
    # 11 tokens of the baseline at the candidate's pace: 11 / (0.5 + 10 x 0.02); raw: 31 / 1.1.
    records = [
        make_request("baseline", tpot_s=0.03),
        make_request("candidate", tpot_s=0.02, output_tokens=31),
    ]
    base, cand = summarise_both(records)
    assert base["normalised_output_throughput"] == pytest.approx(11 / 0.8)
    assert cand["normalised_output_throughput"] == pytest.approx(11 / 0.7)
    assert cand["output_throughput"] == pytest.approx(31 / 1.1)


def test_failed_requests_and_warm_up_count_nowhere():
    records = [
        make_request(),
        make_request(prompt_id="p1", error="timeout"),
        make_request(prompt_id="p2", phase="warmup"),
    ]
    assert summarise_both(records)[0]["buckets"]["8K-16K"]["n"] == 1


def test_a_sample_counts_once_however_often_it_was_repeated():
    samples = [
        make_sample(sample_id="a", score=1.0),
        make_sample(sample_id="a", score=0.0, block=1),
        make_sample(sample_id="b", score=1.0, prompt_tokens=20_000),
        make_sample(sample_id="c", error="timeout"),
    ]
    tasks = summarise_both(samples=samples)[0]["tasks"]
    assert tasks == {
        "retrieval": {
            "n": 2,
            "mean": 0.75,
            "buckets": {"8K-16K": {"n": 1, "mean": 0.5}, "16K-32K": {"n": 1, "mean": 1.0}},
        }
    }


def test_an_arm_without_records_has_none_not_zero():
    base, _ = summarise_both(samples=make_pair_of_samples([1], [1]))
    assert base["output_throughput"] is None
    assert base["normalised_output_throughput"] is None
