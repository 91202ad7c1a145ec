import json

from kernels_patch.counters import Planned, RouteCounters

PREFILL = [Planned("first_chunk", requests=1, tokens=512)]
MIXED = [Planned("prefix", requests=1, tokens=88), Planned("decode", requests=3, tokens=3)]


def run_step(counters: RouteCounters, planned: list[Planned]) -> None:
    counters.count_step(planned)
    for name in counters.layer_names:
        for route in {share.route for share in planned}:
            counters.count_launch(name, route)


def two_layers() -> RouteCounters:
    counters = RouteCounters()
    counters.add_layers(["layers.0", "layers.1"])
    return counters


def test_a_mixed_step_is_a_launch_of_both_its_routes_in_every_layer():
    counters = two_layers()
    run_step(counters, PREFILL)
    run_step(counters, MIXED)
    report = counters.as_dict()
    assert report["steps"] == 2
    assert report["routes"] == {
        "first_chunk": 2,
        "prefix": 2,
        "prefix_unpacked": 0,
        "decode": 2,
        "prefix_torch": 0,
        "decode_torch": 0,
        "fallback": 0,
    }
    assert report["route_steps"]["decode"] == 1
    assert report["tokens"]["first_chunk"] == 512
    assert report["tokens"]["prefix"] == 88
    assert report["requests"]["decode"] == 3
    assert report["per_layer"]["decode"] == [1, 1]
    assert report["layers_mismatch"] == []


def test_two_planned_routes_served_by_the_fallback_are_one_launch_of_it():
    counters = two_layers()
    run_step(counters, [Planned("fallback", 1, 88), Planned("fallback", 3, 3)])
    report = counters.as_dict()
    assert report["routes"]["fallback"] == 2
    assert report["route_steps"]["fallback"] == 1
    assert report["tokens"]["fallback"] == 91
    assert report["layers_mismatch"] == []


def test_a_layer_that_missed_a_step_is_named():
    counters = two_layers()
    counters.count_step(PREFILL)
    counters.count_launch("layers.0", "first_chunk")
    assert counters.mismatches() == ["layer layers.1 launched first_chunk 0 times in 1 steps"]


def test_layers_added_again_keep_their_counts():
    counters = two_layers()
    run_step(counters, PREFILL)
    counters.add_layers(["layers.1", "layers.2"])
    assert counters.layer_names == ["layers.0", "layers.1", "layers.2"]
    assert counters.as_dict()["per_layer"]["first_chunk"] == [1, 1, 0]


def test_the_report_is_plain_json():
    counters = two_layers()
    run_step(counters, MIXED)
    assert json.loads(json.dumps(counters.as_dict())) == counters.as_dict()
