"""What counts as a token chunk, by hand-made clocks: no socket."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from stub_server import chat_chunk, sse, text_chunk, usage_chunk

from evalgate.generation import Generation, StreamReader
from evalgate.metrics import compute_tpot_s, compute_ttft_s

S = 1_000_000_000


def read_stream(events: Sequence[tuple[float, bytes]]) -> Generation:
    """Events with the second each was read at, sent at 0."""
    reader = StreamReader()
    for second, event in events:
        reader.add(event.decode().removeprefix("data: ").strip(), round(second * S))
    return reader.build("2026-01-01T00:00:00+00:00", 0, round(events[-1][0] * S))


def test_a_role_only_delta_is_no_token() -> None:
    g = read_stream(
        [
            (0.90, chat_chunk(role="assistant", content="")),
            (2.20, chat_chunk(content="Hi")),
            (2.22, chat_chunk(content=" there")),
            (2.24, chat_chunk(content=".", finish="stop")),
            (2.25, usage_chunk(10, 3)),
        ]
    )
    assert compute_ttft_s(g.chunk_ns) == pytest.approx(2.20)
    assert compute_tpot_s(g.chunk_ns, g.output_tokens) == pytest.approx(0.020)
    assert (g.text, g.output_tokens) == ("Hi there.", 3)


def test_a_usage_only_chunk_is_no_token() -> None:
    g = read_stream(
        [
            (1.00, text_chunk("a")),
            (1.05, text_chunk("b", finish="length")),
            (1.30, usage_chunk(4, 2)),
        ]
    )
    assert compute_tpot_s(g.chunk_ns, g.output_tokens) == pytest.approx(0.05)
    assert g.end_ns == round(1.30 * S)


def test_without_usage_the_token_count_is_absent_not_counted() -> None:
    g = read_stream([(1.0, text_chunk("a")), (1.1, text_chunk("b", finish="stop"))])
    assert (g.prompt_tokens, g.output_tokens, g.cached_tokens) == (None, None, None)
    assert compute_tpot_s(g.chunk_ns, g.output_tokens) is None


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_counts_for_time_and_not_for_the_answer(field: str) -> None:
    g = read_stream(
        [
            (0.4, chat_chunk(**{field: "Let me"})),
            (0.6, chat_chunk(**{field: " think"})),
            (2.0, chat_chunk(content="42", finish="stop")),
            (2.0, usage_chunk(5, 3)),
        ]
    )
    assert compute_ttft_s(g.chunk_ns) == pytest.approx(0.4)
    assert g.first_answer_ns == 2 * S
    assert compute_tpot_s(g.chunk_ns, g.output_tokens) == pytest.approx(0.8)
    assert (g.text, g.reasoning_text) == ("42", "Let me think")


def test_reasoning_only_leaves_an_empty_answer() -> None:
    g = read_stream([(0.4, chat_chunk(reasoning="Hm", finish="length")), (0.5, usage_chunk(5, 1))])
    assert (g.text, g.reasoning_text, g.first_answer_ns) == ("", "Hm", None)


def test_a_stop_token_with_ids_and_empty_text_is_a_token_chunk() -> None:
    g = read_stream(
        [
            (1.0, text_chunk("a", [5])),
            (1.5, text_chunk("", [2], finish="stop")),
            (1.6, usage_chunk(4, 2, 0)),
        ]
    )
    assert g.chunk_ns == [1 * S, round(1.5 * S)]
    assert (g.token_ids, g.cached_tokens) == ([5, 2], 0)


@pytest.mark.parametrize(
    ("output_tokens", "expected"),
    [
        (2, [1.0, 1.1]),  # the empty chunk only closes
        (3, [1.0, 1.1, 1.2]),  # the usage counts a stop token
        (9, [1.0, 1.1, 1.2]),  # several tokens in a chunk, and one left for the last
    ],
)
def test_an_empty_last_chunk_counts_by_usage(output_tokens: int, expected: list[float]) -> None:
    g = read_stream(
        [
            (1.0, chat_chunk(content="a")),
            (1.1, chat_chunk(content="b")),
            (1.2, chat_chunk(finish="stop")),
            (1.3, usage_chunk(4, output_tokens)),
        ]
    )
    assert g.chunk_ns == [round(t * S) for t in expected]


def test_half_a_character_is_a_token_chunk_when_the_usage_has_room_for_it() -> None:
    g = read_stream(
        [
            (1.0, text_chunk("")),
            (1.1, text_chunk("\U0001f600")),
            (1.2, text_chunk("!", finish="length")),
            (1.3, usage_chunk(4, 3)),
        ]
    )
    assert compute_ttft_s(g.chunk_ns) == pytest.approx(1.0)


def test_several_tokens_in_a_chunk_are_one_stamp() -> None:
    g = read_stream(
        [
            (1.0, text_chunk("a", [1])),
            (1.4, text_chunk("bcd", [2, 3, 4])),
            (1.5, text_chunk("e", [5], "length")),
            (1.5, usage_chunk(1, 5)),
        ]
    )
    assert len(g.chunk_ns) == 3
    assert compute_tpot_s(g.chunk_ns, g.output_tokens) == pytest.approx(0.125)


def test_an_empty_choice_beside_the_usage_changes_nothing() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 1}
    late = sse({"choices": [{"index": 0, "delta": {"content": ""}}], "usage": usage})
    g = read_stream([(1.0, chat_chunk(content="a", finish="stop")), (1.5, late)])
    assert (g.chunk_ns, g.output_tokens, g.finish_reason) == ([S], 1, "stop")


def test_a_surrogate_pair_cut_between_chunks_is_one_character() -> None:
    g = read_stream(
        [
            (1.0, b'data: {"choices": [{"text": "\\ud83d"}]}'),
            (1.1, b'data: {"choices": [{"text": "\\ude00 \\ud83d", "finish_reason": "stop"}]}'),
        ]
    )
    assert g.text == "\U0001f600 \ufffd"
