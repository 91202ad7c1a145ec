"""Which problems decode serves on the GPU, and that each plan fits into an SM (no GPU)."""

import pytest

from kernels_patch.gpu.shape import HEAD_DIMS, MAX_Q_LEN, MAX_ROWS, SHARED_BYTES, DecodeShape
from kernels_patch.gpu.tuning import DecodeTuning


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", range(1, MAX_ROWS + 1))
def test_the_default_plan_fits_and_gives_each_team_its_own_stages(head_dim, group):
    """For every number of query heads a KV head, whatever model or tensor parallelism makes it."""
    for q_len in range(1, min(MAX_Q_LEN, MAX_ROWS // group) + 1):
        plan = DecodeShape(head_dim, group, q_len, 64).plan()
        assert plan.shared_bytes <= SHARED_BYTES
        assert plan.stages >= plan.tuning.teams
        assert plan.stages % plan.tuning.teams == 0
        assert plan.row_blocks * plan.tuning.rows_a_warp >= group * q_len
        assert plan.threads <= 1024


def test_shared_memory_of_the_headline_shape_worked_out_by_hand():
    plan = DecodeShape(head_dim=256, group=6, q_len=1, block_size=64).plan(DecodeTuning(teams=4))
    stage = 2 * 16 * (2 * 256 + 8) + 128  # two units, and the room that keeps their banks apart
    partials = 4 * 6 * (256 + 8) * 4 + 4 * 6 * 8
    assert plan.stages == 12
    assert plan.shared_bytes == 12 * (stage + 16) + partials == 226944


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((96, 4, 1, 64), "head_dim is 96"),
        ((256, 6, 9, 64), "q_len is 9"),
        ((256, 6, 0, 64), "q_len is 0"),
        ((256, 16, 5, 64), "is 80 rows"),
        ((256, 6, 1, 40), "block_size is 40"),
    ],
)
def test_what_decode_does_not_serve_is_refused_by_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        DecodeShape(*arguments)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (DecodeTuning(teams=5, rows_a_warp=16), "do not fit"),
        (DecodeTuning(teams=4, rows_a_warp=32), "a warp takes 32 rows"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tuning, message):
    with pytest.raises(ValueError, match=message):
        DecodeShape(256, 6, 8, 64).plan(tuning)
