from __future__ import annotations

import pytest

from evalgate.arguments import count_engines, count_workers, find_value, parse_number


@pytest.mark.parametrize(
    "args",
    [["--max-len", "9"], ["--max-len=9"], ["--max_len", "9"], ["--max-len", "8", "--max_len=9"]],
)
def test_a_flag_is_found_in_every_way_that_vllm_takes_it(args):
    assert find_value(args, ("--max-len",)) == "9"


def test_what_is_not_there_or_no_number_has_no_number():
    assert parse_number([], ("--max-len",)) is None
    assert parse_number(["--max-len"], ("--max-len",)) is None
    assert parse_number(["--max-len", "8k"], ("--max-len",)) is None


@pytest.mark.parametrize(
    ("args", "workers", "engines"),
    [
        ([], 1, 1),
        (["-tp", "2", "--pipeline_parallel_size=3"], 6, 1),
        (["--tensor-parallel-size", "2", "-dp=4"], 2, 4),
        (["--tensor-parallel-size", "0", "-dp", "many"], 1, 1),
    ],
)
def test_workers_and_engines_of_a_server(args, workers, engines):
    assert (count_workers(args), count_engines(args)) == (workers, engines)
