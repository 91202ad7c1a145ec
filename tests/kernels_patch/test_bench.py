"""The family of shapes and the verdict over it; nothing is timed here."""

import pytest

from kernels_patch import bench
from kernels_patch.bench import Shape, Timing


@pytest.mark.parametrize("quick", [True, False])
def test_every_route_has_shapes_in_the_family(quick):
    shapes = bench.list_shapes("9/3x64", quick)
    assert {shape.route for shape in shapes} == set(bench.ROUTES)
    assert len(set(shapes)) == len(shapes)


def test_a_chunk_without_history_is_a_first_chunk_and_one_token_a_decode():
    assert Shape("9/3x64", 512, 0).route == "first_chunk"
    assert Shape("9/3x64", 512, 1024).route == "prefix"
    assert Shape("9/3x64", 1, 1023).route == "decode"


def test_a_shape_regresses_against_stock_or_where_there_is_none_against_sdpa():
    shape = Shape("9/3x64", 1, 1023)
    faster, slower = Timing(shape, 0.9, 1.0, 0.1), Timing(shape, 1.1, 1.0, 2.0)
    alone_faster, alone_slower = Timing(shape, 0.9, None, 1.0), Timing(shape, 1.1, None, 1.0)
    timings = [faster, slower, alone_faster, alone_slower]
    assert bench.find_regressions(timings) == [slower, alone_slower]
    assert [t.ratio for t in timings] == [0.9, 1.1, None, None]
