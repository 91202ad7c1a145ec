"""The client against a real socket: what is asked for, when it came, what counts as a failure."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from stub_server import (
    DONE,
    Answer,
    StubServer,
    plain_answer,
    sse,
    text_chunk,
    usage_chunk,
)

from evalgate import client as client_module
from evalgate import generation
from evalgate.client import Client
from evalgate.errors import ServerError
from evalgate.generation import Generation
from evalgate.metrics import compute_tpot_s, compute_ttft_s
from evalgate.spec import TimeoutSpec
from evalgate.store import MAX_LINE_BYTES

S = 1_000_000_000


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


def make_client(stub: StubServer, **limits: float) -> Client:
    return Client(stub.base_url, stub.model, timeouts=TimeoutSpec(**limits))


def ask(stub: StubServer, answer: Answer, **limits: float) -> Generation:
    stub.answers.append(answer)
    with make_client(stub, **limits) as client:
        return client.generate([1, 2, 3], 8)


def get_failure(failed: Generation) -> tuple[str, str]:
    """Category and message of a failed request, which must have no latency and no counts."""
    assert failed.error is not None
    assert failed.chunk_ns == []
    assert (failed.end_ns, failed.output_tokens, failed.text) == (None, None, None)
    return failed.error.category, failed.error.message


def test_an_answer_in_vllms_form_comes_back_whole(stub: StubServer) -> None:
    g = ask(stub, plain_answer(["Hé", "llo"], prompt_tokens=3))
    assert g.error is None
    assert (g.text, g.finish_reason) == ("Héllo", "stop")
    assert (g.prompt_tokens, g.output_tokens, g.cached_tokens) == (3, 3, 0)
    assert len(g.chunk_ns) == 3
    assert 0 < g.chunk_ns[0] <= g.chunk_ns[-1] <= (g.end_ns or 0)


def test_greedy_sampling_and_usage_are_asked_for_in_full(stub: StubServer) -> None:
    with make_client(stub) as client:
        client.generate([7, 8], 16, ignore_eos=True, cache_salt="s1")
        client.generate([{"role": "user", "content": "a\nb"}], 16)
    (path, body, _), (chat_path, chat_body, _) = [r for r in stub.requests if "completions" in r[0]]
    assert path == "/v1/completions"
    assert body["prompt"] == [7, 8]
    assert (body["temperature"], body["top_p"], body["repetition_penalty"]) == (0, 1, 1)
    assert body["stream_options"] == {"include_usage": True}
    assert (body["ignore_eos"], body["cache_salt"], body["return_token_ids"]) == (True, "s1", True)
    assert chat_path == "/v1/chat/completions"
    assert chat_body["messages"][0]["content"] == "a\nb"
    assert "ignore_eos" not in chat_body


def test_a_server_that_is_no_vllm_is_sent_no_extensions() -> None:
    with StubServer(vllm=False) as stub, make_client(stub) as client:
        assert client.generate("hello", 4, ignore_eos=True, cache_salt="s").error is None
        assert client.extensions is False
    body = stub.requests[-1][1]
    assert body["prompt"] == "hello"
    assert not {"return_token_ids", "ignore_eos", "cache_salt"} & body.keys()


def test_the_time_to_the_first_chunk_is_the_servers_wait(stub: StubServer) -> None:
    with make_client(stub) as client:
        client.probe()
        stub.answers.append(plain_answer(["a"] * 5, ttft_s=0.2, tpot_s=0.02))
        g = client.generate([1], 8)
    ttft_s, tpot_s = compute_ttft_s(g.chunk_ns), compute_tpot_s(g.chunk_ns, g.output_tokens)
    assert ttft_s is not None
    assert 0.2 <= ttft_s < 0.5
    assert tpot_s is not None
    assert 0.019 <= tpot_s < 0.1


def test_events_cut_at_every_byte_are_read_alike(stub: StubServer) -> None:
    whole = b": ping\r\n" + text_chunk("é\u2028", [1]) + text_chunk("", [2], "stop") + DONE
    g = ask(stub, Answer([whole[i : i + 1] for i in range(len(whole))]))
    assert (g.text, len(g.chunk_ns)) == ("é\u2028", 2)


@pytest.mark.parametrize("tail", [[], [None]], ids=["clean end", "cut connection"])
def test_an_end_without_finish_reason_is_truncated(stub: StubServer, tail: list[Any]) -> None:
    category, _ = get_failure(ask(stub, Answer([text_chunk("a", [1]), *tail])))
    assert category == "truncated"


def test_done_without_finish_reason_is_truncated_too(stub: StubServer) -> None:
    assert get_failure(ask(stub, Answer([text_chunk("a", [1]), DONE])))[0] == "truncated"


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_an_end_without_done_but_with_finish_reason_succeeds(
    stub: StubServer, framing: str
) -> None:
    steps = [text_chunk("a", [1], "length"), usage_chunk(3, 1)]
    g = ask(stub, Answer(steps, framing=framing))
    assert (g.error, g.text, g.output_tokens) == (None, "a", 1)


def test_a_connection_cut_before_the_usage_is_truncated(stub: StubServer) -> None:
    assert get_failure(ask(stub, Answer([text_chunk("a", [1], "stop"), None])))[0] == "truncated"


def test_a_server_that_keeps_the_body_open_after_done_costs_nothing(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "END_S", 0.1)
    g = ask(stub, Answer([*plain_answer(["a"]).steps, 0.5]))
    assert (g.error, g.text) == (None, "a")
    assert (g.end_ns or 0) < 0.4 * S


@pytest.mark.parametrize(
    "event",
    [
        sse({"error": {"message": "engine died", "code": 500}}),
        sse({"object": "error", "message": "engine died"}),
        b"event: error\n" + sse({"error": "engine died"}),
    ],
)
def test_an_error_object_inside_a_200_is_a_stream_error(stub: StubServer, event: bytes) -> None:
    failure = get_failure(ask(stub, Answer([text_chunk("a", [1]), event, DONE])))
    assert failure == ("stream_error", "engine died")


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (sse("{not json"), "not JSON"),
        (sse("[" * 100_000), "not JSON"),
        (sse("[1]"), "not an object"),
        (sse({"choices": [{"index": 1, "text": "x"}]}), "not the one choice"),
        (sse({"choices": [{"text": 5}]}), "text is not text"),
        (sse({"choices": [], "usage": {"completion_tokens": -1}}), "not a count"),
        (sse({"choices": [], "usage": {"completion_tokens": 1.5}}), "not a count"),
        (sse({"choices": [], "usage": {"prompt_tokens": 10**30}}), "not a count"),
        (b"data: \xff\n\n", "not UTF-8"),
    ],
)
def test_a_broken_event_is_a_stream_error(stub: StubServer, event: bytes, word: str) -> None:
    steps = [text_chunk("a", [1], "stop"), event, DONE]
    category, message = get_failure(ask(stub, Answer(steps)))
    assert category == "stream_error"
    assert word in message


def test_a_lost_token_chunk_is_seen_by_the_usage(stub: StubServer) -> None:
    steps = [text_chunk("a", [1]), text_chunk("c", [3], "stop"), usage_chunk(3, 3), DONE]
    category, message = get_failure(ask(stub, Answer(steps)))
    assert category == "stream_error"
    assert "carried 2 tokens but its usage says 3" in message


def test_text_after_the_finish_reason_is_a_stream_error(stub: StubServer) -> None:
    steps = [text_chunk("a", [1], "stop"), text_chunk("b", [2]), usage_chunk(3, 2), DONE]
    failure = get_failure(ask(stub, Answer(steps)))
    assert failure == ("stream_error", "more text came after the finish_reason")


def test_a_request_that_the_server_aborted_is_no_answer(stub: StubServer) -> None:
    assert get_failure(ask(stub, Answer([text_chunk("a", [1], "abort")])))[0] == "stream_error"


def test_one_json_answer_instead_of_a_stream_is_a_stream_error(stub: StubServer) -> None:
    body = json.dumps({"choices": [{"text": "a", "finish_reason": "stop"}]}).encode()
    category, message = get_failure(ask(stub, Answer([body], content_type="application/json")))
    assert category == "stream_error"
    assert "not a stream" in message


def test_a_compressed_stream_is_refused(stub: StubServer) -> None:
    answer = Answer([b"\x1f\x8b"], headers={"Content-Encoding": "gzip"})
    assert "encoded as 'gzip'" in get_failure(ask(stub, answer))[1]


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 2048 tokens. However, your prompt contains 4000",
        "max_tokens=9000 cannot be greater than max_model_len=2048.",
        "Input length (9) exceeds model's maximum context length (8).",
    ],
)
def test_a_400_about_the_context_length_is_its_own_category(stub: StubServer, message: str) -> None:
    body = json.dumps({"error": {"message": message, "code": 400}}).encode()
    failure = get_failure(ask(stub, Answer([body], 400, "application/json")))
    assert failure == ("context_overflow", f"HTTP 400: {message}")
    assert sum("completions" in path for path, _, _ in stub.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503, 302])
def test_any_other_status_is_an_http_error_and_not_retried(stub: StubServer, status: int) -> None:
    headers = {"Location": "/elsewhere"} if status == 302 else {}
    answer = Answer([b'{"detail": "no"}'], status, "application/json", headers=headers)
    assert get_failure(ask(stub, answer)) == ("http", f"HTTP {status}: no")
    assert sum("completions" in path for path, _, _ in stub.requests) == 1


@pytest.mark.parametrize(
    ("steps", "limits", "phase"),
    [
        ([text_chunk("")[:5], 0.5], {"first_chunk_s": 0.1}, "the first chunk"),
        ([text_chunk("a", [1]), 0.5], {"chunk_s": 0.1}, "the next chunk"),
        ([b": ping\n\n", 0.05] * 12, {"first_chunk_s": 0.2}, "the first chunk"),
        ([text_chunk("a", [1]), 0.05] * 12, {"request_s": 0.2}, "the whole request"),
    ],
    ids=["slow first chunk", "stalled", "pings are not chunks", "endless"],
)
def test_each_phase_has_its_own_time_out(
    stub: StubServer, steps: list[Any], limits: dict[str, float], phase: str
) -> None:
    category, message = get_failure(ask(stub, Answer(steps), **limits))
    assert category == "timeout"
    assert message.startswith(phase)


def test_no_server_is_a_connect_error() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        client = Client(f"http://127.0.0.1:{held.getsockname()[1]}", "m")
        with client:
            assert get_failure(client.generate([1], 1))[0] == "connect"
            with pytest.raises(ServerError, match="is the server running"):
                client.read_model()


def test_a_stream_without_end_is_bounded(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_STREAM_BYTES", 10_000)
    failure = get_failure(ask(stub, Answer([text_chunk("x" * 1000, [1])] * 50)))
    assert failure == ("stream_error", "more than 10000 bytes came")


def test_an_answer_that_could_not_be_read_back_is_no_answer(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_TEXT_CHARS", 2_000)
    failure = get_failure(ask(stub, Answer([text_chunk("x" * 1000, [1])] * 5)))
    assert failure == ("stream_error", "more than 2000 characters came")


def test_the_longest_answer_still_fits_a_line_that_is_read() -> None:
    """Control characters take six bytes in JSON; a chunk takes 32 bytes on the wire at least, and
    its time 16 in the line."""
    times = client_module.MAX_STREAM_BYTES // 32 * 16
    assert 6 * 2 * generation.MAX_TEXT_CHARS + times < MAX_LINE_BYTES


def test_one_connection_is_kept_for_all_requests(stub: StubServer) -> None:
    with make_client(stub) as client:
        for _ in range(5):
            assert client.generate([1], 4).error is None
        assert client.probe()
    assert stub.connections == 1


def test_a_connection_that_the_server_closed_when_idle_is_opened_again() -> None:
    with StubServer(idle_close_s=0.05) as stub, make_client(stub) as client:
        assert client.generate([1], 4).error is None
        threading.Event().wait(0.2)
        assert client.generate([1], 4).error is None
    assert stub.connections == 2


class DroppingServer:
    """Answers each connection's first ``answered`` requests, then hangs up on the next."""

    def __init__(self, answered: Sequence[int]) -> None:
        self.answered = answered
        self.seen = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        body = text_chunk("a", [1], "stop") + DONE
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
        for count in self.answered:
            connection, _ = self.socket.accept()
            for i in range(count + 1):
                if not self.read_request(connection):
                    break
                self.seen += 1
                if i < count:
                    connection.sendall(head % len(body) + body)
            connection.close()

    @staticmethod
    def read_request(connection: socket.socket) -> bool:
        """Headers and body may come in any number of reads; False when the client left."""
        request = b""
        while True:
            read = connection.recv(65536)
            request += read
            head, found, body = request.partition(b"\r\n\r\n")
            if not read:
                return False
            if found and len(body) == int(head.lower().split(b"content-length: ")[1].split()[0]):
                return True


@pytest.mark.parametrize(
    ("answered", "errors", "seen"),
    [((1, 1), [None, None], 3), ((1, 0), [None, "connect"], 3), ((0,), ["connect"], 1)],
    ids=["a kept connection is opened again once", "only once", "a new one never"],
)
def test_a_dropped_request_is_sent_again_only_on_a_kept_connection(
    answered: tuple[int, ...], errors: list[str | None], seen: int
) -> None:
    server = DroppingServer(answered)
    with server.socket, Client(server.base_url, "m") as client:
        client.extensions = True
        results = [client.generate([1], 1).error for _ in errors]
    assert [e and e.category for e in results] == errors
    assert server.seen == seen


def test_the_key_is_sent_and_never_comes_back_in_a_message(stub: StubServer) -> None:
    stub.answers.append(Answer([b'{"detail": "bad key sk-12345"}'], 401, "application/json"))
    with Client(stub.base_url, stub.model, api_key="sk-12345") as client:
        assert get_failure(client.generate([1], 1)) == ("http", "HTTP 401: bad key ***")
    assert stub.requests[-1][2]["Authorization"] == "Bearer sk-12345"


def test_a_server_that_repeats_the_key_does_not_get_it_stored(stub: StubServer) -> None:
    stub.answers.append(plain_answer(["it is sk", "-12345"]))
    with Client(stub.base_url, stub.model, api_key="sk-12345") as client:
        assert client.generate([1], 4).text == "it is ***"


def test_a_key_that_is_a_word_changes_no_answer(stub: StubServer) -> None:
    """VLLM_API_KEY=test in somebody's shell, and an answer about a test."""
    stub.answers.append(plain_answer(["a test", " of it"]))
    with Client(stub.base_url, stub.model, api_key="test") as client:
        assert client.generate([1], 4).text == "a test of it"
        assert client.detokenize(list(b"the test")) == "the test"


def test_every_error_of_httpx_becomes_a_record() -> None:
    kinds = [
        kind
        for kind in vars(httpx).values()
        if isinstance(kind, type) and issubclass(kind, httpx.HTTPError)
    ]
    assert len(kinds) > 15
    for kind in kinds:
        if kind is httpx.HTTPStatusError:
            continue  # only raise_for_status, which is not used, raises it

        def fail(request: httpx.Request, kind: Any = kind) -> httpx.Response:
            raise kind("planted")

        with Client("http://x", "m", transport=httpx.MockTransport(fail)) as client:
            client.extensions = False
            category = get_failure(client.generate([1], 1))[0]
            assert category in ("timeout", "connect")
