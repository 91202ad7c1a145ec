import pytest
from factories import make_arm, make_request, make_spec, make_stored

from evalgate.compare import views_of_run
from evalgate.proof import BYTES_KEY, check_proof

LAUNCH = {"python": "python", "args": ["--max-num-batched-tokens", "4096"], "env": {}}
REQUIRED = ["prefix", "decode"]
LAYERS = 4


def make_evidence(**changes):
    """What a sound launch of a patched arm proves: 2 requests, 3 prefix and 20 decode steps."""
    return {
        "block": 0,
        "routes": {"first_chunk": 8, "prefix": 12, "decode": 80, "fallback": 0},
        "route_steps": {"first_chunk": 2, "prefix": 3, "decode": 20},
        "layers": LAYERS,
        "expected_steps": {"first_chunk": 2, "prefix": 3, "decode": 20},
        "kv_cache": {"dtype": "int8", "bytes_per_token_per_layer": 2080},
        **changes,
    }


def check(evidence=None, *, required=(), baseline=None, patch="int8_kv", **candidate):
    arms = {"baseline": LAUNCH, "candidate": {**LAUNCH, **({"patch": patch} if patch else {})}}
    values = {"kv_cache_dtype": "int8", **candidate}
    if evidence is not None:
        values["extra"] = {"evidence": evidence if isinstance(evidence, list) else [evidence]}
    stored = make_stored(
        [make_request(a, prompt_id=p) for a in ("baseline", "candidate") for p in ("p0", "p1")],
        spec=make_spec(arms=arms),
        arms={"baseline": baseline or make_arm(), "candidate": make_arm(**values)},
    )
    return check_proof(*views_of_run(stored), list(required))


def assert_only(found, *words):
    assert len(found.reasons) == 1, found.reasons
    for word in words:
        assert word in found.reasons[0]


def test_routes_that_add_up_are_proven():
    assert check(make_evidence(), required=REQUIRED).reasons == []


def test_a_required_route_that_never_ran_is_invalid():
    routes = {"first_chunk": 8, "prefix": 0, "decode": 80, "fallback": 0}
    assert_only(check(make_evidence(routes=routes), required=REQUIRED), "route prefix", "never")


@pytest.mark.parametrize("steps", [20, None])
def test_a_layer_does_not_make_up_for_another(steps):
    """Stage for stage and layer for layer: 4 x 20 launches in all prove nothing by themselves."""
    evidence = make_evidence(
        per_layer={"prefix": [3] * LAYERS, "decode": [20, 20, 19, 21]},
        route_steps={"prefix": 3} | ({"decode": steps} if steps else {}),
    )
    words = "route decode", "2 of 4 layers", "from 19 to 21 times"
    assert_only(check(evidence, required=REQUIRED), *words)
    even = {"prefix": [3] * LAYERS, "decode": [20] * LAYERS}
    assert check(evidence | {"per_layer": even}, required=REQUIRED).reasons == []


def test_no_counts_at_all_prove_nothing():
    found = check(patch=None, required=REQUIRED, kv_cache_dtype="auto")
    assert len(found.reasons) == 2


def test_a_route_in_its_plain_form_does_not_count_as_native():
    routes = {"prefix_torch": 12, "decode": 80, "fallback": 0}
    assert_only(check(make_evidence(routes=routes), required=REQUIRED), "plain form", "12 times")


def make_unpacked(**changes):
    """Two of the three prefix steps through unpacked pages, a short one read from the pages."""
    return make_evidence(
        routes={"first_chunk": 8, "prefix": 4, "prefix_unpacked": 8, "decode": 80, "fallback": 0},
        route_steps={"first_chunk": 2, "prefix": 1, "prefix_unpacked": 2, "decode": 20},
        **changes,
    )


def test_a_route_served_in_a_form_of_its_own_is_proven_under_that_name():
    assert check(make_unpacked(), required=["prefix_unpacked", "decode"]).reasons == []


def test_a_form_and_its_route_together_must_be_what_the_requests_needed():
    expected = {"first_chunk": 2, "prefix": 30, "decode": 20}
    found = check(make_unpacked(expected_steps=expected), required=["prefix_unpacked"])
    assert_only(found, "12 launches", "the requests needed 30 steps")


def test_a_required_route_served_in_a_form_alone_is_invalid_and_names_the_form():
    routes = {"first_chunk": 8, "prefix_unpacked": 12, "decode": 80, "fallback": 0}
    assert_only(check(make_evidence(routes=routes), required=REQUIRED), "prefix_unpacked", "alone")


def test_fallback_launches_are_invalid_when_routes_are_required():
    routes = {**make_evidence()["routes"], "fallback": 3}
    assert_only(check(make_evidence(routes=routes), required=REQUIRED), "3 launches", "fallback")
    lenient = check(make_evidence(routes=routes))
    assert lenient.reasons == []
    assert "3 launches" in lenient.warnings[0]


def test_a_layer_that_did_not_take_the_route_is_found():
    routes = {**make_evidence()["routes"], "decode": 60}
    found = check(make_evidence(routes=routes), required=REQUIRED)
    assert "60 launches, but 4 layers x 20 steps are 80" in found.reasons[0]


@pytest.mark.parametrize(("extra_steps", "sound"), [(0, True), (2, True), (3, False), (-1, False)])
def test_one_step_past_a_stop_is_allowed_for_each_request(extra_steps, sound):
    steps = 20 + extra_steps
    evidence = make_evidence(
        routes={**make_evidence()["routes"], "decode": LAYERS * steps},
        route_steps={"prefix": 3, "decode": steps},
    )
    assert (check(evidence, required=REQUIRED).reasons == []) is sound


def test_a_patch_that_leaves_layers_to_the_stock_kernels_is_invalid():
    evidence = make_evidence(patch={"active": False})
    assert_only(check(evidence, required=REQUIRED), "every attention layer", "block 0")


def test_the_clients_expectation_is_enough_without_a_count_of_steps():
    assert check(make_evidence(route_steps=None), required=REQUIRED).reasons == []
    found = check(make_evidence(route_steps=None, expected_steps=None), required=REQUIRED)
    assert all("no count of steps" in r for r in found.reasons)
    assert len(found.reasons) == 2


def test_a_baseline_that_took_the_route_is_patched_too():
    baseline = make_arm(extra={"evidence": [make_evidence()]})
    found = check(make_evidence(), required=REQUIRED, baseline=baseline)
    assert any("the baseline took route prefix 12 times" in r for r in found.reasons)


def test_bare_counts_without_evidence_by_launch_are_warned_of():
    found = check(required=REQUIRED, routes={"prefix": 12, "decode": 80, "fallback": 0})
    assert found.reasons == []
    assert any("not reconciled" in w for w in found.warnings)


def test_int8_that_was_asked_for_and_not_served_is_invalid():
    # The server says "auto": not "no difference, pass".
    assert_only(check(kv_cache_dtype="auto"), "asked for an INT8 KV cache", "'auto'")


def test_int8_asked_for_by_flag_is_held_to_it_too():
    spec_arms = {
        "baseline": LAUNCH,
        "candidate": {**LAUNCH, "args": ["--kv-cache-dtype", "int8_per_token"]},
    }
    stored = make_stored([], spec=make_spec(arms=spec_arms))
    assert "'auto'" in check_proof(*views_of_run(stored), []).reasons[0]


def test_pages_that_the_worker_reports_otherwise_are_invalid():
    evidence = make_evidence(kv_cache={"dtype": "bfloat16"})
    assert_only(check(evidence), "block 0", "'bfloat16'")
    assert_only(check(make_evidence(kv_cache=None)), "reports nothing")


def test_pages_that_save_nothing_are_invalid():
    baseline = make_arm(
        extra={"evidence": [{"block": 0, "kv_cache": {"bytes_per_token_per_layer": 2080}}]}
    )
    assert_only(check(make_evidence(), baseline=baseline), "2080 bytes", "not less")


def test_scales_of_one_that_nobody_chose_are_a_warning():
    found = check(make_evidence(kv_cache={"dtype": "int8", "unit_scales": True}))
    assert found.reasons == []
    assert "scales of the KV cache are 1.0" in found.warnings[0]


def test_layers_with_pages_of_different_sizes_are_held_to_the_largest():
    """A worker lists what differs between its layers."""
    baseline = make_arm(
        extra={
            "evidence": [{"block": 0, "kv_cache": {"dtype": "auto", BYTES_KEY: 4096}}],
        }
    )
    pages = {"dtype": "int8", BYTES_KEY: [2080, 4096]}
    assert_only(check(make_evidence(kv_cache=pages), baseline=baseline), "4096", "not less")
    pages = {"dtype": "int8", BYTES_KEY: [1040, 2080]}
    assert check(make_evidence(kv_cache=pages), baseline=baseline).reasons == []


def test_what_is_no_number_and_no_text_in_a_strangers_evidence_is_passed_over():
    evidence = make_evidence(
        kv_cache={"dtype": "int8", BYTES_KEY: "many"}, canary={"cold_text": 5, "warm_text": 6}
    )
    assert check(evidence).reasons == []


def test_int8_without_any_evidence_is_invalid_and_by_the_servers_word_a_warning():
    assert_only(check(kv_cache_dtype=None), "nothing shows what it serves")
    found = check()
    assert found.reasons == []
    assert "rests on the server's word 'int8'" in found.warnings[0]


def make_canary(cold, warm):
    return {"block": 0, "canary": {"cold_text": cold, "warm_text": warm}}


def test_a_corrupt_first_answer_in_the_candidate_alone_is_invalid():
    sound = make_arm(extra={"evidence": [make_canary("Paris", "Paris")]})
    evidence = make_evidence(canary=make_canary("!!!!", "Paris")["canary"])
    assert_only(check(evidence, baseline=sound), "'!!!!'", "'Paris'")


def test_a_first_answer_that_changes_in_both_arms_is_a_warning():
    tied = make_arm(extra={"evidence": [make_canary("Rome", "Paris")]})
    found = check(make_evidence(canary=make_canary("Rome", "Paris")["canary"]), baseline=tied)
    assert found.reasons == []
    assert any("both arms" in w for w in found.warnings)


def test_a_planted_fault_is_announced():
    found = check(make_evidence(patch={"fault": "one_sv_after_sum"}))
    assert any("one_sv_after_sum" in w for w in found.warnings)
