"""Stored lines are read in one step or the long way round, and both say the same of every line.

The quick decoder may refuse what the other takes (then the other is asked); it may never take what
the other refuses, nor make another record of it.
"""

from __future__ import annotations

import json
from typing import Any

import factories
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.errors import EvidenceError
from evalgate.records import (
    REFUSALS,
    FidelityRecord,
    LineRecord,
    RequestRecord,
    SampleRecord,
    find_decoder,
    parse_line,
    render_record,
)
from evalgate.validation import build_model

SOUND: dict[type[LineRecord], LineRecord] = {
    RequestRecord: factories.make_request(output_text="h\u00e9 \u2028 \U0001f600"),
    SampleRecord: factories.make_sample(extra={"scoring": "passage", "depth": 0.25}),
    FidelityRecord: factories.make_fidelity(),
}
# One JSON value a line: each may stand where another belongs.
TOKENS = r"""
null
true
0
-0
-1
1
1.0
1e2
0.5
NaN
-Infinity
1e400
01
1.
9223372036854775808
-9223372036854775809
""
"5"
"measure"
"length"
"\ud800"
"\ud83d\ude00"
"\u0000"
"\x"
"NaN"
[]
[1, 2]
[1.0]
[true]
[null]
["1"]
[9223372036854775808]
{}
{"a": NaN}
{"a": 1e400}
{"a": 1, "a": 2}
{"a": 123456789012345678901234567890}
{"a": [1.5, null, "\ud800"]}
{"category": "timeout", "message": "m"}
{"category": "scoring", "message": "m"}
{"category": "x", "message": "m"}
{"category": "http"}
{"categry": "http", "message": "m"}
""".strip().splitlines()
TOKENS += ["9" * 5000, '"a\x01"', '{"a":' + "[" * 3000 + "]" * 3000 + "}"]


@st.composite
def damage_lines(draw: st.DrawFn) -> tuple[type[LineRecord], bytes]:
    """A sound line of one kind with other values, keys, orders or bytes."""
    kind = draw(st.sampled_from(list(SOUND)))
    data = json.loads(render_record(SOUND[kind]))
    pairs = [(key, json.dumps(value)) for key, value in data.items()]
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(pairs) - 1))
        key, value = pairs[i]
        match draw(st.sampled_from(["value", "value", "value", "key", "again", "gone", "extra"])):
            case "value":
                pairs[i] = (key, draw(st.sampled_from(TOKENS)))
            case "key":
                pairs[i] = (key + draw(st.sampled_from(["s", "\u00e9", " "])), value)
            case "again":
                pairs.append((key, draw(st.sampled_from([value, *TOKENS]))))
            case "gone":
                del pairs[i]
            case "extra":
                pairs.append(("extra", draw(st.sampled_from(TOKENS))))
    text = "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in pairs) + "}"
    line = text.encode() + draw(st.sampled_from([b"\n", b"\r\n", b"", b" \n"]))
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(line)))
        byte = draw(
            st.sampled_from([b"", b'"', b",", b"]", b"0", b"\x00", b"\xff", b"\xed\xa0\x80"])
        )
        line = line[:at] + byte + line[at + draw(st.integers(0, 1)) :]
    return kind, line


@settings(max_examples=400, deadline=None)
@given(damage_lines())
def test_what_is_read_in_one_step_is_what_the_long_way_gives(case: tuple[type[Any], bytes]) -> None:
    kind, line = case
    try:
        quick = find_decoder(kind).decode(line)
    except REFUSALS:
        return
    assert parse_line(kind, line, "w") == quick


@pytest.mark.parametrize("kind", SOUND)
def test_sound_lines_are_read_in_one_step(kind: type[LineRecord]) -> None:
    line = render_record(SOUND[kind]).encode()
    assert find_decoder(kind).decode(line) == SOUND[kind] == parse_line(kind, line, "w")


def test_a_line_that_only_the_long_way_takes_is_taken() -> None:
    line = render_record(SOUND[RequestRecord]).replace("\U0001f600", "\\ud800").encode()
    with pytest.raises(msgspec.DecodeError):
        find_decoder(RequestRecord).decode(line)
    assert parse_line(RequestRecord, line, "w").output_text == "h\u00e9 \u2028 \ud800"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"block": 1.0}, "w: block is 1.0: Input should be a valid integer"),
        ({"block": True}, "w: block is True: Input should be a valid integer"),
        ({"chunk_ns": [1.5]}, "w: chunk_ns.0 is 1.5: Input should be a valid integer"),
        ({"chunk_ns": [10**25]}, "w: chunk_ns: a time beyond 292 years is none: the file is "),
        ({"error": {"category": "x", "message": "m"}}, "w: error.category is 'x': Input should be"),
        ({"error": {"categry": "http"}}, "w: unknown key 'error.categry', did you mean 'category'"),
        ({"phas": "measure"}, "w: unknown key 'phas', did you mean 'phase'?"),
        ({"extra": {"x": float("nan")}}, "w: not JSON (NaN is not allowed in a record)"),
    ],
)
def test_a_refused_line_has_its_sentence(change: dict[str, Any], sentence: str) -> None:
    data = {**json.loads(render_record(SOUND[RequestRecord])), **change}
    with pytest.raises(EvidenceError) as caught:
        parse_line(RequestRecord, json.dumps(data).encode(), "w")
    assert str(caught.value).startswith(sentence)


def test_a_line_that_is_no_object_is_named_by_what_it_should_be() -> None:
    with pytest.raises(EvidenceError, match="dictionary or instance of RequestRecord"):
        parse_line(RequestRecord, b"[1]\n", "w")


@pytest.mark.parametrize("kind", SOUND)
def test_both_ways_know_the_same_keys(kind: type[LineRecord]) -> None:
    assert tuple(build_model(kind).model_fields) == kind.__struct_fields__


@pytest.mark.parametrize(
    "record",
    [
        factories.make_request(repetition=-1),
        factories.make_request(block=1.0),
        factories.make_sample(score=1.5),
        factories.make_sample(flags=None),
    ],
)
def test_what_could_not_be_read_back_is_not_written(record: LineRecord) -> None:
    with pytest.raises(msgspec.ValidationError):
        render_record(record)


def test_a_number_that_is_none_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render_record(factories.make_fidelity(mean_gap=float("nan")))
