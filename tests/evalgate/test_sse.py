"""SSE out of bytes: the grammar, however the network cuts it, within bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalgate.sse import SseDecoder, SseError


def decode(*reads: bytes) -> list[str]:
    decoder = SseDecoder()
    events = [event for read in reads for event in decoder.feed(read)]
    return events + decoder.finish()


def test_frames_split_anywhere_give_the_same_events() -> None:
    reads = (b'data: {"a":"A"}\n\ndata: {"a', b'":"B"}\n', b"\ndata: [DONE]\n\n")
    assert decode(*reads) == ['{"a":"A"}', '{"a":"B"}', "[DONE]"]


def test_comments_other_fields_crlf_and_a_missing_space_are_one_event() -> None:
    stream = ': ping\r\nevent: x\r\nid: 7\r\ndata:{"t":"a\u2028b"}\r\n\r\n'.encode()
    assert decode(stream) == ['{"t":"a\u2028b"}']


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_each_line_end_of_the_grammar_ends_a_line(end: bytes) -> None:
    assert decode(b"data: 1" + end + b"data: 2" + end + end + b"data: 3" + end + end) == [
        "1\n2",
        "3",
    ]


def test_an_event_is_given_at_its_last_line_end_not_at_the_next_read() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\r\r") == ["1"]
    assert decoder.feed(b"\ndata: 2\r\n\r") == ["2"]
    assert decoder.feed(b"\n") == []


def test_only_one_space_belongs_to_the_field_and_a_bom_to_the_stream() -> None:
    assert decode(b"\xef\xbb", b"\xbfdata:  x \n\n") == [" x "]


def test_an_event_that_the_stream_ends_in_is_kept_only_with_whole_lines() -> None:
    assert decode(b"data: whole\n") == ["whole"]
    assert decode(b"data: cut") == []


def test_a_line_of_many_kilobytes_comes_through() -> None:
    payload = "x" * 300_000
    line = f"data: {payload}\n\n".encode()
    assert decode(*(line[i : i + 1000] for i in range(0, len(line), 1000))) == [payload]


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 200, b"data: 0123456789\n" * 20])
def test_a_line_or_an_event_beyond_the_bound_is_refused(stream: bytes) -> None:
    with pytest.raises(SseError, match="longer than 100 bytes"):
        SseDecoder(max_line_bytes=100).feed(stream)


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(SseError, match="not UTF-8"):
        decode(b"data: \xff\n\n")


TEXT = 'data: {"t": "h\u00e9\u2028\U0001f600"}\r\n\r\n: c\r\ndata: 1\rdata: 2\r\rdata:3\n\n'


@given(st.lists(st.integers(0, len(TEXT.encode())), max_size=12))
def test_no_cut_changes_what_is_read(cuts: list[int]) -> None:
    stream = TEXT.encode()
    edges = [0, *sorted(cuts), len(stream)]
    reads = [stream[a:b] for a, b in pairwise(edges)]
    assert decode(*reads) == ['{"t": "h\u00e9\u2028\U0001f600"}', "1\n2", "3"]
