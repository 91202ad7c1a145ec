"""An OpenAI-compatible server of a few lines on a real socket, whose faults are scripted.

In a test: ``with StubServer() as stub: Client(stub.base_url, stub.model)``. What it answers to a
generation request is ``stub.answers`` (one Answer each, first come first served), then
``stub.default``; ``stub.requests`` holds what was asked. As a program (``python -m stub_server``)
it takes vLLM's flags, so that it can be launched in vLLM's place.

A token is a UTF-8 byte: tokenize and detokenize are exact inverses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Step = bytes | float | None  # bytes to send, seconds to wait, None: cut the connection


@dataclass
class Answer:
    """Steps in order. ``framing`` "chunked" ends the body properly, "close" by closing.

    With ``headers_first`` the head of the answer is sent at once, as vLLM does, else with the first
    bytes of its body.
    """

    steps: Sequence[Step]
    status: int = 200
    content_type: str = "text/event-stream"
    framing: str = "chunked"
    headers: dict[str, str] = field(default_factory=dict)
    headers_first: bool = False


def sse(data: Any) -> bytes:
    """One event; a string is sent as it is, anything else as JSON."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def text_chunk(text: str, ids: list[int] | None = None, finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return sse({"object": "text_completion", "choices": [choice]})


def chat_chunk(finish: str | None = None, **delta: str) -> bytes:
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def usage_chunk(prompt: int, output: int, cached: int | None = None) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return sse({"object": "text_completion", "choices": [], "usage": usage})


DONE = sse("[DONE]")


def plain_answer(pieces: Sequence[str], prompt_tokens: int = 3, **timing: float) -> Answer:
    """Pieces one token each, then the stop token with empty text, as vLLM 0.32 sends it.

    ``ttft_s`` and ``tpot_s`` wait before the first and the further chunks.
    """
    steps: list[Step] = []
    for i, piece in enumerate(pieces):
        steps += [timing.get("tpot_s" if i else "ttft_s", 0.0), text_chunk(piece, [i])]
    steps += [timing.get("tpot_s", 0.0), text_chunk("", [len(pieces)], "stop")]
    return Answer([*steps, usage_chunk(prompt_tokens, len(pieces) + 1, 0), DONE])


class StubServer:
    """Serves from a thread until the ``with`` block ends."""

    def __init__(
        self,
        model: str = "stub",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        vllm: bool = True,
        max_model_len: int = 4096,
        idle_close_s: float | None = None,
        reply: Callable[[dict[str, Any]], Answer] | None = None,
    ) -> None:
        self.model = model
        self.vllm = vllm
        self.max_model_len = max_model_len
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.answers: deque[Answer] = deque()
        self.default = plain_answer(["A", "B"])
        self.reply = reply
        self.metrics = ""
        self.connections = 0
        self.rpc: dict[str, list[Any]] = {}
        self.version = "0.0.0+stub"
        self.api_key: str | None = None  # as vLLM, it asks for it below /v1 only
        # perf_counter_ns of each answer: when its request arrived, then before each piece sent.
        self.times: list[list[int]] = []
        self.on_answer: Callable[[str], None] | None = None  # called when all of one is sent
        stub = self

        class Handler(_Handler):
            server_stub = stub
            timeout = idle_close_s

        class HttpServer(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_port = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that went away in the middle is part of many tests."""

        self._http = HttpServer((host, port), Handler)
        self.port = self._http.server_address[1]
        self.base_url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def __enter__(self) -> StubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def serve_forever(self) -> None:
        self._http.serve_forever()

    def choose(self, body: dict[str, Any]) -> Answer:
        if self.answers:
            return self.answers.popleft()
        return self.reply(body) if self.reply else self.default


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_stub: StubServer

    def setup(self) -> None:
        super().setup()
        self.server_stub.connections += 1

    def parse_request(self) -> bool:
        self._arrived_ns = time.perf_counter_ns()  # the first line is read, the headers are not
        return super().parse_request()

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        raw = self.rfile.read(length)
        self._serve(json.loads(raw) if raw else {})

    def _serve(self, body: dict[str, Any]) -> None:
        stub = self.server_stub
        path = self.path.split("?")[0]
        stub.requests.append((path, body, dict(self.headers)))
        wanted = stub.api_key and f"Bearer {stub.api_key}"
        if wanted and path.startswith("/v1") and self.headers.get("Authorization") != wanted:
            self._json({"error": "Unauthorized"}, 401)
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self._stream(stub.choose(body))
            if stub.on_answer is not None:
                stub.on_answer(path)
        elif path == "/v1/models":
            owner = "vllm" if stub.vllm else "someone"
            card = {"id": stub.model, "owned_by": owner, "max_model_len": stub.max_model_len}
            self._json({"object": "list", "data": [card]})
        elif path == "/stub/times":
            self._json(stub.times)
        elif path == "/metrics" and stub.metrics:
            self._send(stub.metrics.encode(), kind="text/plain; version=0.0.4")
        elif not stub.vllm:
            self._json({"detail": "Not Found"}, 404)
        elif path == "/version":
            self._json({"version": stub.version})
        elif path == "/tokenize":
            text = body.get("prompt") or "".join(
                f"<{m['role']}>{m['content']}" for m in body["messages"]
            )
            ids = list(text.encode())
            self._json({"tokens": ids, "count": len(ids), "max_model_len": stub.max_model_len})
        elif path == "/detokenize":
            self._json({"prompt": bytes(body["tokens"]).decode("utf-8", "replace")})
        elif path == "/collective_rpc" and body.get("method") in stub.rpc:
            self._json({"results": stub.rpc[body["method"]]})
        else:
            self._json({"detail": "Not Found"}, 404)

    def _stream(self, answer: Answer) -> None:
        times = [self._arrived_ns]
        self.server_stub.times.append(times)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        chunked = answer.framing == "chunked"
        self.send_header(
            *(("Transfer-Encoding", "chunked") if chunked else ("Connection", "close"))
        )
        started = answer.headers_first
        if started:
            self.end_headers()
        for step in answer.steps:
            if step is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if isinstance(step, float):
                time.sleep(step)
                continue
            if not started:
                self.end_headers()
                started = True
            times.append(time.perf_counter_ns())
            self.wfile.write(b"%x\r\n%b\r\n" % (len(step), step) if chunked else step)
        if not started:
            self.end_headers()
        if chunked:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = not chunked

    def _json(self, data: Any, status: int = 200) -> None:
        self._send(json.dumps(data).encode(), status)

    def _send(self, body: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet: a test's output is the test's."""


def full_answer(pieces: Sequence[str], prompt_tokens: int, **timing: float) -> Answer:
    """As ``plain_answer``, but cut off by max_tokens: every chunk has text, no stop token comes."""
    steps: list[Step] = []
    for i, piece in enumerate(pieces):
        finish = "length" if i == len(pieces) - 1 else None
        steps += [timing["tpot_s" if i else "ttft_s"], text_chunk(piece, [i], finish)]
    steps += [usage_chunk(prompt_tokens, len(pieces), 0), DONE]
    return Answer(steps, headers_first=True)


def count_prompt(body: dict[str, Any]) -> int:
    """Tokens of a prompt given as ids, and bytes of any other."""
    prompt = body.get("prompt")
    if prompt is None:
        prompt = "".join(str(message["content"]) for message in body["messages"])
    return len(prompt.encode() if isinstance(prompt, str) else prompt)


def main() -> None:
    """Be launched as a vLLM would be; the words of STUB_MODE say what is special about it.

    ``fail``: print STUB_TEXT and exit 1; ``mute``: stay alive without listening; ``stubborn``:
    ignore SIGTERM; ``children``: start an engine of its own session that outlives its parent;
    ``die``: exit 3 a moment after the first request for an answer; ``timed``: answer with
    STUB_TIMING (JSON: pieces, ttft_s, tpot_s), for GET /stub/times to tell when, and print a line
    for each whole answer.
    """
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--served-model-name", "--host", "--port"):
        parser.add_argument(flag, required=True)
    args, _ = parser.parse_known_args()
    mode = os.environ.get("STUB_MODE", "").split()
    print(f"stub started in {os.getcwd()}", flush=True)
    if "fail" in mode:
        sys.exit(os.environ.get("STUB_TEXT", "") or 1)
    if "mute" in mode:
        time.sleep(600)
    if "stubborn" in mode:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "children" in mode:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    stub = StubServer(args.served_model_name, host=args.host, port=int(args.port))
    stub.api_key = os.environ.get("VLLM_API_KEY")
    if "timed" in mode:
        timing = json.loads(os.environ["STUB_TIMING"])
        pieces = [" the"] * timing.pop("pieces")  # one token each to most tokenizers
        stub.reply = lambda body: full_answer(pieces, count_prompt(body), **timing)
        stub.on_answer = lambda path: print(f"answered {path}", flush=True)
    if "die" in mode:

        def die(_: dict[str, Any]) -> Answer:
            threading.Timer(0.05, os._exit, (3,)).start()
            return Answer([0.3])

        stub.reply = die
    stub.serve_forever()


if __name__ == "__main__":
    main()
