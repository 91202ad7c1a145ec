"""Launch counters in device memory; the CPU stands in for the device."""

from kernels_patch.counters import Planned
from kernels_patch.gpu.counters import DeviceRouteCounters

DECODE = [Planned("decode", requests=2, tokens=2)]


def placed() -> DeviceRouteCounters:
    counters = DeviceRouteCounters()
    counters.place(["layers.0", "layers.1"], "cpu")
    return counters


def run_step(counters: DeviceRouteCounters) -> None:
    counters.count_step(DECODE)
    for name in counters.layer_names:
        counters.tick(name, "decode").add_(1)


def test_launches_are_what_the_device_holds():
    counters = placed()
    run_step(counters)
    run_step(counters)
    report = counters.as_dict()
    assert report["routes"]["decode"] == 4
    assert report["route_steps"]["decode"] == 2
    assert report["tokens"]["decode"] == 4
    assert report["layers_mismatch"] == []


def test_a_layer_whose_launch_the_device_did_not_count_is_named():
    counters = placed()
    counters.count_step(DECODE)
    counters.tick("layers.1", "decode").add_(1)
    assert counters.as_dict()["layers_mismatch"] == [
        "layer layers.0 launched decode 0 times in 1 steps"
    ]


def test_what_a_capture_ran_is_forgotten_with_the_next_step():
    counters = placed()
    run_step(counters)
    counters.begin_anew()
    counters.tick("layers.0", "decode").add_(7)  # the warm-up of the capture
    run_step(counters)
    report = counters.as_dict()
    assert report["steps"] == 1
    assert report["per_layer"]["decode"] == [1, 1]
    assert report["layers_mismatch"] == []


def test_what_a_capture_ran_is_forgotten_by_the_first_report_too():
    counters = placed()
    counters.begin_anew()
    counters.tick("layers.0", "decode").add_(7)
    assert counters.as_dict()["routes"]["decode"] == 0
    run_step(counters)
    assert counters.as_dict()["routes"]["decode"] == 2


def test_known_layers_keep_their_addresses_which_graphs_hold():
    counters = placed()
    run_step(counters)
    before = counters.tick("layers.1", "decode").data_ptr()
    counters.place(["layers.1"], "cpu")
    assert counters.tick("layers.1", "decode").data_ptr() == before


def test_a_new_layer_begins_at_zero_and_the_others_go_on():
    counters = placed()
    run_step(counters)
    counters.place(["layers.2"], "cpu")
    assert counters.as_dict()["per_layer"]["decode"] == [1, 1, 0]


def test_writes_that_rotate_are_counted_apart_from_the_routes_and_anew_with_them():
    counters = placed()
    counters.begin_anew()
    counters.rope_tick("layers.1").add_(7)  # the warm-up of the capture
    run_step(counters)
    for name, writes in (("layers.0", 1), ("layers.1", 2)):
        counters.rope_tick(name).add_(writes)
    report = counters.as_dict()
    assert report["rope_writes"] == [1, 2]
    assert report["per_layer"]["decode"] == [1, 1]
    assert report["layers_mismatch"] == []


def test_before_any_layer_is_placed_the_report_is_empty():
    assert DeviceRouteCounters().as_dict()["layers"] == 0
