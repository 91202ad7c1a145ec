import pytest
from factories import (
    make_arm,
    make_environment,
    make_pair_of_samples,
    make_request,
    make_sample,
    make_spec,
    make_stored,
    simulate_requests,
)
from msgspec.structs import replace

from evalgate.compare import pair_requests, pair_samples, view, views_of_run
from evalgate.policy import Validity
from evalgate.validity import check_validity

ARMS = ("baseline", "candidate")
LAUNCH = {"python": "python", "args": ["--max-num-batched-tokens", "4096"], "env": {}}
PATCHED = {"baseline": LAUNCH, "candidate": {**LAUNCH, "patch": "int8_kv"}}


def check(requests=(), samples=(), *, limits=None, allow=(), **run):
    run.setdefault("spec", make_spec())
    views = views_of_run(make_stored(requests, samples, **run))
    return check_views(*views, limits=limits, allow=allow, apart=False)


def check_views(base, cand, *, apart, limits=None, allow=()):
    return check_validity(
        base,
        cand,
        pair_requests(base, cand),
        pair_samples(base, cand),
        Validity(**(limits or {})),
        apart=apart,
        allow=allow,
    )


def make_both(**changes):
    """A request of each arm; ``changes`` go to the candidate's."""
    return [make_request("baseline"), make_request("candidate", **changes)]


def assert_only(found, *words):
    assert len(found.reasons) == 1, found.reasons
    for word in words:
        assert word in found.reasons[0]


def test_sound_evidence_has_no_reason():
    found = check(simulate_requests(), make_pair_of_samples([1, 0.5], [1, 0]))
    assert found.reasons == []
    assert found.differing_fields == []


@pytest.mark.parametrize("status", ["started", "failed"])
def test_a_run_that_is_not_complete_carries_no_verdict(status):
    found = check(make_both(), status=status, extra={"failure": "disk full"})
    assert_only(found, repr(status), "disk full", "--resume")


def test_what_both_arms_lack_of_a_completed_block_is_missed():
    requests = [r for r in simulate_requests() if r.prompt_id != "16K-32K/3"]
    extra = {"completed_blocks": [0, 1, 2]}
    found = check(requests, spec=make_spec(prompts=4, blocks=3), extra=extra)
    assert len(found.reasons) == 2
    assert "3 measured requests of completed blocks are missing" in found.reasons[0]


def test_a_cache_that_nothing_tells_of_is_warned_of():
    """A server that is no vLLM tells neither cached tokens nor counters."""

    def warn(cached_tokens, evidence):
        arms = {name: make_arm(extra={"evidence": [evidence]}) for name in ARMS}
        requests = [make_request(name, cached_tokens=cached_tokens) for name in ARMS]
        return [w for w in check(requests, arms=arms).warnings if "prefix cache was hit" in w]

    assert len(warn(None, {"block": 0})) == 2
    assert warn(0, {"block": 0}) == []
    assert warn(None, {"block": 0, "prefix_cache": {"queries": 0.0, "hits": 0.0}}) == []


def test_nothing_in_common_is_invalid():
    one = make_stored([make_request(bucket="4K-8K", prompt_tokens=5000)], label="r1")
    two = make_stored(
        [make_request("candidate", bucket="16K-32K", prompt_tokens=20_000)], label="r2"
    )
    found = check_views(view(one, "baseline"), view(two, "candidate"), apart=True)
    assert_only(found, "nothing in common", "{4K-8K}", "{16K-32K}")


def test_a_failed_request_on_either_side_counts_against_min_success():
    requests = [*simulate_requests(), *make_both(error="timeout", prompt_id="x")]
    requests[-2] = make_request("baseline", prompt_id="x")
    assert_only(check(requests), "1 of 37 pairs failed", "candidate: timeout 1", "97.3%")
    assert check(requests, limits={"min_success": 0.95}).reasons == []


def test_a_request_that_one_arm_lacks_counts_as_failed():
    found = check([*make_both(), make_request("baseline", prompt_id="p1")])
    assert_only(found, "1 of 2 pairs failed", "baseline: without a partner 1")


def test_a_sample_that_could_not_be_scored_counts_as_failed():
    samples = [make_sample(), make_sample("candidate", error="scoring")]
    assert_only(check(make_both(), samples), "task retrieval: 1 of 1", "scoring 1")


def test_a_server_that_died_is_invalid_whatever_min_success_says():
    found = check(make_both(error="server_died"), limits={"min_success": 0.0})
    assert_only(found, "arm candidate", "died in block 0")


def test_prompt_counts_that_differ_between_the_arms_are_invalid():
    assert_only(check(make_both(prompt_tokens=10_001)), "1 of 1", "10000", "10001")


def test_the_servers_count_decides_the_bucket():
    # A target of 4,000 arrives as 4,106 in a bucket that holds 3,900 to below 4,100.
    spec = make_spec(buckets=[("4K", 3900, 4100, 1.0)])

    def make(tokens):
        return [
            make_request(a, bucket="4K", prompt_tokens=tokens) for a in ("baseline", "candidate")
        ]

    found = check(make(4106), spec=spec)
    assert len(found.reasons) == 2
    assert "4106 tokens, bucket 4K holds 3900 to below 4100" in found.reasons[0]
    assert check(make(3900), spec=spec).reasons == []
    assert len(check(make(4100), spec=spec).reasons) == 2


def test_task_prompts_that_differ_are_invalid():
    samples = [make_sample(), make_sample("candidate", prompt_sha256="0" * 64)]
    assert_only(check(make_both(), samples), "prompts differ in 1 of 1")


def test_prefix_cache_hits_by_the_servers_counters_are_invalid():
    # 3,072 hits of 4,096 queries.
    evidence = {"block": 0, "prefix_cache": {"queries": 4096.0, "hits": 3072.0}}
    arms = {"baseline": make_arm(), "candidate": make_arm(extra={"evidence": [evidence]})}
    assert_only(check(make_both(), arms=arms), "3072 hits", "4096 queries", "75.0%")


def test_prefix_cache_hits_by_usage_are_invalid():
    found = check(make_both(cached_tokens=2500))
    assert_only(found, "1 of 1 measured requests", "2500 tokens", "25.0%", "front")


def test_hits_of_warm_up_requests_do_no_harm():
    warm = [make_request(a, phase="warmup", cached_tokens=9) for a in ("baseline", "candidate")]
    assert check([*make_both(), *(replace(w, prompt_id="w") for w in warm)]).reasons == []


def test_task_versions_that_differ_are_refused():
    samples = [make_sample(task_version=2), make_sample("candidate", task_version=3)]
    assert_only(check(make_both(), samples), "task_version 2", "has 3")


def test_scoring_variants_that_differ_are_refused():
    samples = [
        make_sample(extra={"scoring": "rougeL"}),
        make_sample("candidate", extra={"scoring": "rougeLsum"}),
    ]
    assert_only(check(make_both(), samples), "scoring rougeL", "rougeLsum")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"chunk_ns": [0, 10], "end_ns": 10}, "0 ns after sending"),
        ({"chunk_ns": [-5, 10], "end_ns": 10}, "-5 ns after sending"),
        ({"chunk_ns": [10, 30, 20], "end_ns": 40}, "backwards"),
        ({"chunk_ns": [10, 10, 10], "end_ns": 40}, "3 chunks in no time"),
        ({"chunk_ns": [10, 20], "end_ns": 15}, "before its last chunk"),
        ({"chunk_ns": []}, "11 output tokens, no chunk"),
    ],
)
def test_times_that_cannot_be_are_invalid(changes, fault):
    assert_only(check(make_both(**changes)), "arm candidate", fault)


def test_an_empty_output_and_a_single_chunk_are_no_time_faults():
    for changes in ({"output_tokens": 0}, {"chunk_ns": [10], "end_ns": 12}):
        assert check([make_request(arm, **changes) for arm in ARMS]).reasons == []


def test_one_launch_and_a_busy_machine_are_warned_of():
    found = check(simulate_requests(blocks=1), extra={"machine": {"other_cpu_cores_mean": 0.8}})
    assert any("launches were not sampled" in w for w in found.warnings)
    assert any("0.8 processor cores" in w for w in found.warnings)
    assert found.reasons == []


def test_a_clock_that_was_held_down_is_warned_of():
    def warn(**machine):
        return check(simulate_requests(), extra={"machine": machine}).warnings

    (warning,) = warn(slowdowns={"GPU 0: power cap": 0.25})
    assert "GPU 0: power cap in 25% of samples" in warning
    assert warn(slowdowns={}) == warn(slowdowns={"GPU 0": "?"}) == warn(slowdowns=None) == []


def test_a_difference_that_the_spec_does_not_set_is_invalid_until_allowed():
    other = make_environment(packages={"torch": "2.12.0", "vllm": "0.32.0"})
    arms = {"baseline": make_arm(), "candidate": make_arm(environment=other)}
    found = check(make_both(), arms=arms)
    assert found.differing_fields == ["arms.environment.packages.torch"]
    assert_only(found, "arms.environment.packages.torch", '"2.13.0"', '"2.12.0"', "--allow")
    allow = ["arms.environment.packages.torch"]
    assert check(make_both(), arms=arms, allow=allow).reasons == []
    limits = {"allow_differences": ["arms.environment.*"]}
    assert check(make_both(), arms=arms, limits=limits).reasons == []


def test_packages_that_only_one_arm_knows_are_one_difference():
    attached = make_environment(packages={}, driver="570")
    arms = {"baseline": make_arm(), "candidate": make_arm(environment=attached)}
    fields = check(make_both(), arms=arms).differing_fields
    assert fields == ["arms.environment.driver", "arms.environment.packages"]
    both = dict.fromkeys(arms, make_arm(environment=attached))
    assert check(make_both(), arms=both).differing_fields == []


def test_what_follows_from_a_patch_is_the_treatment():
    candidate = make_arm(
        env={"KERNELS_PATCH": "int8_kv"},
        kv_cache_dtype="int8",
        command=["python", "-m", "x", "--worker-extension-cls", "y", "--port", "9"],
    )
    spec = make_spec(arms=PATCHED)
    found = check(make_both(), arms={"baseline": make_arm(), "candidate": candidate}, spec=spec)
    assert found.reasons == []
    assert found.differing_fields == [
        "arms.command",
        "arms.env.KERNELS_PATCH",
        "arms.kv_cache_dtype",
    ]


def test_a_calibration_whose_arms_were_served_differently_is_invalid():
    arms = {"baseline": make_arm(), "candidate": make_arm(kv_cache_dtype="fp8")}
    assert_only(check(make_both(), arms=arms), "arms.kv_cache_dtype", '"auto"', '"fp8"')


def make_apart(**candidate):
    one = make_stored([make_request()], label="r1")
    two = make_stored(
        [make_request("candidate")],
        label="r2",
        arms={"baseline": make_arm(), "candidate": make_arm(**candidate)},
    )
    return view(one, "baseline"), view(two, "candidate")


def test_between_two_runs_the_build_may_differ():
    found = check_views(
        *make_apart(
            environment=make_environment(
                git={"commit": "beef"}, packages={"torch": "2.13.0", "vllm": "0.33.0"}
            ),
            server_version="0.33.0",
            attention_backend="CUSTOM",
            env={"A": "1"},
        ),
        apart=True,
    )
    assert found.reasons == []
    assert found.differing_fields == [
        "arms.attention_backend",
        "arms.env.A",
        "arms.environment.git",
        "arms.environment.packages.vllm",
        "arms.server_version",
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"environment": make_environment(gpu=["H200"])}, "arms.environment.gpu"),
        ({"environment": make_environment(cpu="another")}, "arms.environment.cpu"),
        ({"environment": make_environment(driver="570")}, "arms.environment.driver"),
        ({"model": "other"}, "arms.model"),
    ],
)
def test_between_two_runs_machine_and_model_must_be_equal(change, field):
    assert_only(check_views(*make_apart(**change), apart=True), field)


def test_two_runs_that_asked_for_different_lengths_are_not_comparable():
    one = make_stored([make_request()], label="r1")
    two = make_stored([make_request("candidate")], label="r2", spec=make_spec(output_tokens=64))
    found = check_views(view(one, "baseline"), view(two, "candidate"), apart=True)
    assert_only(found, "spec.load.output_tokens", "128", "64")


def test_ports_and_paths_are_never_compared():
    arms = {
        "baseline": make_arm(command=["/a/python", "-m", "x", "--port", "1", "--model", "/m1"]),
        "candidate": make_arm(command=["/b/python", "-m", "x", "--port=2", "--model", "/m2"]),
    }
    arms["baseline"] = make_arm(command=["/a/python", "-m", "x", "--port=1", "--model", "/m1"])
    assert check(make_both(), arms=arms).differing_fields == []
