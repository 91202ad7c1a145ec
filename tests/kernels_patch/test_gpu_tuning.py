"""Launch shapes as data: each device's own, the default for the others."""

from dataclasses import replace

import pytest

from kernels_patch.gpu import tuning
from kernels_patch.gpu.shape import DecodeShape
from kernels_patch.gpu.tuning import DEFAULT, DecodeTuning, ProducerTuning, describe_unmeasured

H200 = ("NVIDIA H200", "2.11.0+cu130", "3.6.0")


@pytest.mark.parametrize(
    ("rows", "head_dim", "wanted"),
    [
        (1, 256, DecodeTuning(4, 8)),
        (8, 256, DecodeTuning(4, 8)),
        (8, 128, DecodeTuning(6, 8)),
        (3, 64, DecodeTuning(6, 8)),
        (9, 256, DecodeTuning(3, 8)),
        (16, 64, DecodeTuning(4, 8)),
        (16, 128, DecodeTuning(4, 8)),
        (24, 64, DecodeTuning(4, 8)),
        (25, 64, DecodeTuning(4, 16)),
        (17, 128, DecodeTuning(4, 16)),
        (32, 256, DecodeTuning(3, 16)),
        (33, 256, DecodeTuning(2, 16)),
        (64, 64, DecodeTuning(2, 16)),
    ],
)
def test_decode_takes_the_first_rule_that_fits(rows, head_dim, wanted):
    assert DEFAULT.decode_tuning(rows, head_dim) == wanted


def test_few_tokens_are_written_one_a_program_and_chunks_eight():
    few, many = ProducerTuning(1, 1, split=True), ProducerTuning(8, 4)
    assert [DEFAULT.producer_tuning(n) for n in (1, 64, 65, 4096)] == [few, few, many, many]
    assert [DEFAULT.producer_tuning(n) for n in DEFAULT.write_sizes] == [few, many]


def test_a_device_has_its_own_table_and_an_unknown_one_the_default(monkeypatch):
    other = replace(DEFAULT, device="NVIDIA H100", decode=((None, None, DecodeTuning(1, 16)),))
    monkeypatch.setitem(tuning.TABLES, other.device, other)
    assert tuning.table_for("NVIDIA H100") is other
    assert tuning.table_for("NVIDIA GH200") is DEFAULT
    shape = DecodeShape(head_dim=64, group=3, q_len=1, block_size=16)
    assert shape.plan(table=other).tuning == DecodeTuning(1, 16)
    assert shape.plan().tuning == DecodeTuning(6)


@pytest.mark.parametrize("table", tuning.TABLES.values(), ids=lambda table: table.device)
def test_every_table_writes_a_power_of_two_of_tokens(table):
    for n_tokens in (1, 2, 64, 65, 4096):
        tokens = table.producer_tuning(n_tokens).tokens
        assert tokens & (tokens - 1) == 0


def test_what_was_measured_is_silent_and_anything_else_is_told():
    assert describe_unmeasured(*H200) is None
    note = describe_unmeasured("NVIDIA H100", "2.11.0+cu130", "3.9.0")
    assert note == (
        "launch shapes were measured with device NVIDIA H200, triton 3.6.0, and here is "
        "device NVIDIA H100, triton 3.9.0: right, maybe slower"
    )
