"""Records: exact keys, known versions, finite numbers, and text that comes back the same."""

import json

import pytest

from evalgate.errors import EvidenceError
from evalgate.records import (
    Environment,
    RequestRecord,
    Run,
    compare_environments,
    compute_canonical_json,
    parse_json,
    parse_record,
    render_record,
)

REQUEST = {
    "arm": "baseline",
    "block": 0,
    "bucket": "4K-8K",
    "prompt_id": "p1",
    "repetition": 0,
    "phase": "measure",
    "started_at": "2026-11-29T10:00:00.000Z",
    "prompt_tokens": 4100,
    "output_tokens": 3,
    "cached_tokens": None,
    "chunk_ns": [2_200_000_000, 2_220_000_000, 2_240_000_000],
    "end_ns": 2_250_000_000,
    "finish_reason": "stop",
    "output_sha256": "00",
    "output_text": "Hi there.",
    "error": None,
}
RUN = {
    "schema_version": 1,
    "run_id": "r1",
    "name": "n",
    "status": "complete",
    "started_at": "t",
    "finished_at": "t",
    "spec": {},
    "spec_sha256": "00",
    "evalgate_version": "0.1.0",
    "arms": {},
}


def parse_request(**changes):
    return parse_record(RequestRecord, {**REQUEST, **changes}, "requests.jsonl:7")


def test_a_record_survives_a_round_trip():
    record = parse_request(output_text="caf\u00e9 \u2028 <b>")
    assert parse_record(RequestRecord, json.loads(render_record(record)), "x") == record


def test_extra_is_left_out_when_there_is_none():
    assert "extra" not in json.loads(render_record(parse_request()))
    assert json.loads(render_record(parse_request(extra={"a": 1})))["extra"] == {"a": 1}


def test_a_misspelt_key_is_named_with_the_nearest_right_one():
    data = {**REQUEST, "chunks_ns": REQUEST["chunk_ns"]}
    del data["chunk_ns"]
    with pytest.raises(EvidenceError, match=r"requests\.jsonl:7.*'chunks_ns'.*'chunk_ns'"):
        parse_record(RequestRecord, data, "requests.jsonl:7")


def test_a_missing_key_is_named():
    data = {k: v for k, v in REQUEST.items() if k != "arm"}
    with pytest.raises(EvidenceError, match="'arm' is missing"):
        parse_record(RequestRecord, data, "x")


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_a_foreign_schema_version_is_refused_by_number(version):
    with pytest.raises(EvidenceError, match=r"schema_version is .*reads version 1"):
        parse_record(Run, {**RUN, "schema_version": version}, "run.json")


def test_an_unknown_status_is_refused_with_its_value():
    with pytest.raises(EvidenceError, match="'done'"):
        parse_record(Run, {**RUN, "status": "done"}, "run.json")


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": Infinity}', "{", ""])
def test_json_that_is_damaged_or_not_finite_is_refused(text):
    with pytest.raises(EvidenceError, match=r"requests\.jsonl:3"):
        parse_json(text, "requests.jsonl:3")


def test_a_failed_request_has_no_latency():
    record = parse_request(error={"category": "timeout", "message": "no chunk in 600 s"})
    assert (record.ttft_s, record.tpot_s, record.e2el_s) == (None, None, None)


def test_times_come_out_in_seconds():
    record = parse_request()
    assert record.ttft_s == pytest.approx(2.2)
    assert record.tpot_s == pytest.approx(0.02)
    assert record.e2el_s == pytest.approx(2.24)


def test_a_negative_token_count_is_refused():
    with pytest.raises(EvidenceError, match="output_tokens is -1"):
        parse_request(output_tokens=-1)


def test_canonical_json_sorts_keys_and_keeps_text():
    assert compute_canonical_json({"b": 1, "a": ["\u00e9"]}) == '{"a":["\u00e9"],"b":1}'


def test_two_environments_are_compared_field_by_field():
    a = Environment(gpu=["H200"], driver="570", cpu="c", packages={"vllm": "1"}, git=None)
    assert compare_environments(a, a) == {}
    git = {"commit": "b", "dirty": True}
    b = Environment(gpu=None, driver="570", cpu="c", packages={"torch": "3"}, git=git)
    assert compare_environments(a, b) == {
        "gpu": (["H200"], None),
        "packages.torch": (None, "3"),
        "packages.vllm": ("1", None),
        "git": (None, git),
    }
