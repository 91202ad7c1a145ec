"""One OpenAI-compatible server as the measuring half sees it: requests out, measured answers back.

Generation requests never raise: what went wrong is part of the answer. The other calls (token
counts, model, metrics, worker calls) raise a ServerError that says what failed. The far end is not
trusted: sizes and times are bounded, redirects are not followed, no proxy stands between. Knows no
arm, no bucket and no record; how an answer is put together is in ``generation``, what the clock
reads in ``wire``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from evalgate.errors import ServerAnswerError, ServerError
from evalgate.generation import Generation, StreamError, StreamReader, build_failed
from evalgate.generation import find_error_message as _find_error_message
from evalgate.records import ErrorCategory
from evalgate.spec import TimeoutSpec
from evalgate.sse import SseDecoder, SseError
from evalgate.validation import show_value
from evalgate.wire import DeadlineError, Wire, WireTransport

CONNECT_S = 10.0
END_S = 1.0  # from [DONE] to the end of the body; nothing is missing when it does not come
CALL_S = 60.0  # the calls that generate nothing
MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_STREAM_BYTES = 64 * 1024 * 1024  # what comes of it must fit a line that can be read back
MAX_ERROR_BYTES = 64 * 1024
MAX_MESSAGE_CHARS = 500
MIN_SECRET_CHARS = 8
MAX_NAME_CHARS = 100  # of a version or another label that is stored
# A kept connection that the server let go fails at once; later than this, work may have been done.
RECONNECT_WITHIN_NS = 1_000_000_000

_OVERFLOW_STATUS = (400, 413, 422)
# As vLLM, SGLang, llama.cpp and OpenAI word it.
_OVERFLOW = re.compile(
    r"context[ _-]?(length|size|window)|max_model_len|maximum model length|context_length_exceeded",
    re.IGNORECASE,
)
_UNSUPPORTED_STATUS = (404, 405, 501)

Messages = list[dict[str, Any]]
Metrics = dict[str, list[tuple[dict[str, str], float]]]


class NotSupportedError(ServerAnswerError):
    """The server has no such endpoint: nothing failed, it cannot be asked."""


@dataclass(frozen=True)
class ModelCard:
    """What /v1/models says. ``ids`` are all names served; ``max_model_len`` None when unsaid."""

    id: str
    max_model_len: int | None
    ids: list[str]


@dataclass(frozen=True)
class PrefixCache:
    """Tokens looked up in and found in the prefix cache since the server started."""

    queries: float
    hits: float


class Client:
    """Talks to one server over one kept connection; not to be shared between threads.

    ``extensions`` says whether vLLM's additions to the protocol are used (token ids in the answer,
    cache salt, ignore_eos); ``probe`` finds out without generating anything, and is called by the
    first request if nobody did.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeouts: TimeoutSpec | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.extensions: bool | None = None
        # What is shorter is no secret, and may well be a part of an honest answer.
        self._hidden = api_key if api_key and len(api_key) >= MIN_SECRET_CHARS else None
        self._timeouts = timeouts or TimeoutSpec()
        self._wire = Wire()
        headers = {"Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.Client(
            base_url=self.base_url,
            headers=headers,
            timeout=httpx.Timeout(self._timeouts.request_s, connect=CONNECT_S),
            transport=transport or WireTransport(self._wire, tls=base_url.startswith("https")),
            trust_env=False,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def generate(
        self,
        prompt: Sequence[int] | str | Messages,
        max_tokens: int,
        *,
        ignore_eos: bool = False,
        cache_salt: str | None = None,
    ) -> Generation:
        """Stream one greedy answer to token ids, a text, or chat messages.

        Never raises for what the server or the network does: see ``Generation.error``. Sent once;
        only a kept connection that the server had already let go is opened again.
        """
        started_at = datetime.now(UTC).isoformat()
        if self.extensions is None:
            try:
                self.probe()
            except ServerError as exc:
                return build_failed(started_at, "connect", str(exc))
        path, body = self._build_request(prompt, max_tokens, ignore_eos, cache_salt)
        request = self._http.build_request("POST", path, json=body)
        try:
            try:
                return self._hide_key(self._stream(request))
            except _LostConnectionError:
                return self._hide_key(self._stream(request))
        except _LostConnectionError as exc:
            failure = StreamError("connect", str(exc))
        except StreamError as exc:
            failure = exc
        return build_failed(started_at, failure.category, self._clean(failure.message))

    def _build_request(
        self,
        prompt: Sequence[int] | str | Messages,
        max_tokens: int,
        ignore_eos: bool,
        cache_salt: str | None,
    ) -> tuple[str, dict[str, Any]]:
        """Path and body. Sampling is spelt out, or a model's generation_config would fill it in."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "top_p": 1,
            "repetition_penalty": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.extensions:
            body["return_token_ids"] = True
            if ignore_eos:
                body["ignore_eos"] = True
            if cache_salt is not None:
                body["cache_salt"] = cache_salt
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            return "/v1/chat/completions", body | {"messages": list(prompt)}
        return "/v1/completions", body | {
            "prompt": prompt if isinstance(prompt, str) else list(prompt)
        }

    def _stream(self, request: httpx.Request) -> Generation:
        """Send and read to the end. Raises StreamError with what ended it, never httpx's errors."""
        started_at = datetime.now(UTC).isoformat()
        wire, limits = self._wire, self._timeouts
        wire.begin(limits.request_s)
        wire.enter_phase("the first chunk", limits.first_chunk_s)
        begun_ns = perf_counter_ns()
        reader = StreamReader()
        try:
            response = self._http.send(request, stream=True)
            try:
                self._check_response(response)
                self._read_events(response, reader)
            finally:
                response.close()
        except DeadlineError as exc:
            if not reader.done:
                raise StreamError("timeout", str(exc)) from None
        except httpx.TimeoutException as exc:
            if isinstance(exc, httpx.ConnectTimeout):
                raise StreamError("connect", f"no connection within {CONNECT_S:g} s") from None
            raise StreamError("timeout", f"no answer in time ({exc})") from None
        except httpx.ConnectError as exc:
            raise StreamError("connect", f"cannot connect to {self.base_url}: {exc}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            if not reader.done:
                raise self._explain_break(exc, begun_ns) from None
        end_ns = wire.stamp_ns or perf_counter_ns()
        return reader.build(started_at, wire.sent_ns or begun_ns, end_ns)

    def _explain_break(self, exc: Exception, begun_ns: int) -> Exception:
        if self._wire.bytes_read:
            return StreamError("truncated", f"the connection broke before the answer's end: {exc}")
        early = perf_counter_ns() - begun_ns < RECONNECT_WITHIN_NS
        if early and not self._wire.connected and isinstance(exc, httpx.TransportError):
            return _LostConnectionError(str(exc))
        return StreamError("connect", f"the server closed the connection unanswered: {exc}")

    def _check_response(self, response: httpx.Response) -> None:
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        encoding = response.headers.get("content-encoding", "identity")
        if response.status_code == 200 and encoding != "identity":
            raise StreamError("stream_error", f"the stream is encoded as {encoding!r}, unasked")
        if response.status_code == 200 and kind != "application/json":
            return
        text = _read_start(response, MAX_ERROR_BYTES).decode("utf-8", "replace")
        message = _find_error_message(_parse_json(text)) or text.strip() or "no body"
        if response.status_code == 200:
            raise StreamError("stream_error", f"not a stream but one JSON answer: {message}")
        overflow = response.status_code in _OVERFLOW_STATUS and _OVERFLOW.search(message)
        category: ErrorCategory = "context_overflow" if overflow else "http"
        raise StreamError(category, f"HTTP {response.status_code}: {message}")

    def _read_events(self, response: httpx.Response, reader: StreamReader) -> None:
        wire, decoder, total = self._wire, SseDecoder(), 0
        try:
            for piece in response.iter_raw():
                stamp_ns = wire.stamp_ns or perf_counter_ns()
                total += len(piece)
                if total > MAX_STREAM_BYTES:
                    raise StreamError("stream_error", f"more than {MAX_STREAM_BYTES} bytes came")
                seen = reader.chunks
                for data in decoder.feed(piece):
                    reader.add(data, stamp_ns)
                if reader.done:
                    wire.enter_phase("the end of the stream", END_S)
                elif reader.chunks > seen:
                    wire.enter_phase("the next chunk", self._timeouts.chunk_s)
                wire.remaining_s()
            for data in decoder.finish():
                reader.add(data, wire.stamp_ns or perf_counter_ns())
        except SseError as exc:
            raise StreamError("stream_error", str(exc)) from None

    def probe(self) -> bool:
        """Find out whether the server is a vLLM, by its model list or its version; sets
        ``extensions``. Generates nothing. Raises ServerError when it cannot be reached."""
        owners = [entry.get("owned_by") for entry in self._read_models()]
        self.extensions = "vllm" in owners or self.read_version() is not None
        return self.extensions

    def read_model(self) -> ModelCard:
        """The card of our model. Raises ServerAnswerError when the server does not serve it."""
        entries = self._read_models()
        ids = [str(entry.get("id")) for entry in entries]
        for entry in entries:
            if entry.get("id") == self.model:
                length = entry.get("max_model_len")
                return ModelCard(self.model, length if type(length) is int else None, ids)
        raise ServerAnswerError(
            f"{self.base_url} serves {self._clean(', '.join(ids)) or 'no model'}, not "
            f"{self.model!r}: set model.name to a name it serves, or base_url to the right server"
        )

    def read_version(self) -> str | None:
        """The server's version, None where it has no /version."""
        try:
            body = self._call_json("GET", "/version")
        except ServerAnswerError:
            return None
        version = body.get("version") if isinstance(body, dict) else None
        return version[:MAX_NAME_CHARS] if isinstance(version, str) else None

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text as the server counts them. Raises NotSupportedError without one."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": add_special_tokens}
        return self._read_tokens(body)

    def tokenize_chat(self, messages: Messages) -> list[int]:
        """Token ids of messages with the chat template applied and the model's turn opened.

        Special tokens are the template's own: BOS is not added a second time.
        """
        return self._read_tokens(
            {
                "model": self.model,
                "messages": messages,
                "add_generation_prompt": True,
                "add_special_tokens": False,
            }
        )

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids. Raises NotSupportedError where the server cannot."""
        body = self._call_json("POST", "/detokenize", {"model": self.model, "tokens": list(ids)})
        text = body.get("prompt") if isinstance(body, dict) else None
        if not isinstance(text, str):
            raise ServerAnswerError(
                f"{self.base_url}/detokenize gave no prompt: {show_value(body)}"
            )
        return text

    def read_metrics(self) -> Metrics | None:
        """/metrics as {sample name: [(labels, value)]}; None where there is no such endpoint."""
        try:
            text = self._call("GET", "/metrics").decode("utf-8", "replace")
        except NotSupportedError:
            return None
        metrics: Metrics = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    metrics.setdefault(sample.name, []).append((sample.labels, sample.value))
        except ValueError as exc:
            raise ServerAnswerError(
                f"{self.base_url}/metrics is not Prometheus text: {exc}"
            ) from None
        return metrics

    def read_prefix_cache(self) -> PrefixCache | None:
        """vLLM's prefix-cache counters summed over its engines; None where it has none.

        Raises ServerAnswerError for a counter that counts nothing.
        """
        metrics = self.read_metrics() or {}
        sums = []
        for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"):
            if name not in metrics:
                return None
            total = sum(value for _, value in metrics[name])
            if not 0 <= total < math.inf:
                raise ServerAnswerError(f"{self.base_url}/metrics: {name} is {total}, not a count")
            sums.append(total)
        return PrefixCache(*sums)

    def read_cache_config(self) -> dict[str, str] | None:
        """Labels of vllm:cache_config_info (cache_dtype, block_size, ...), None without it."""
        infos = (self.read_metrics() or {}).get("vllm:cache_config_info")
        return {k: v[:MAX_NAME_CHARS] for k, v in infos[0][0].items()} if infos else None

    def call_rpc(self, method: str, timeout_s: float = CALL_S) -> list[Any]:
        """Call a method of every worker (vLLM's developer mode), one result each.

        Raises NotSupportedError when the server was not started in that mode.
        """
        body = self._call_json(
            "POST", "/collective_rpc", {"method": method, "timeout": timeout_s}, timeout_s + 5
        )
        if body is None:
            return []
        results = body.get("results") if isinstance(body, dict) else None
        if not isinstance(results, list):
            raise ServerAnswerError(
                f"{self.base_url}/collective_rpc {method} gave no results: {show_value(body)}"
            )
        return results

    def post_json(self, path: str, body: Any, timeout_s: float = CALL_S) -> Any:
        """The decoded answer to a request that is not streamed, None when it is empty.

        Raises NotSupportedError without such an endpoint, ServerAnswerError for any other refusal,
        ServerError when no answer came in time.
        """
        return self._call_json("POST", path, body, timeout_s)

    def _read_models(self) -> list[dict[str, Any]]:
        body = self._call_json("GET", "/v1/models")
        entries = body.get("data") if isinstance(body, dict) else None
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise ServerAnswerError(f"{self.base_url}/v1/models is no list: {show_value(body)}")
        return entries

    def _read_tokens(self, request: dict[str, Any]) -> list[int]:
        body = self._call_json("POST", "/tokenize", request)
        ids = body.get("tokens") if isinstance(body, dict) else None
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise ServerAnswerError(
                f"{self.base_url}/tokenize gave no token ids: {show_value(body)}"
            )
        return ids

    def _call_json(
        self, method: str, path: str, body: Any = None, timeout_s: float = CALL_S
    ) -> Any:
        """A call's answer as JSON, None when the answer is empty."""
        text = self._call(method, path, body, timeout_s).decode("utf-8", "replace")
        if not text.strip():
            return None
        answer = _parse_json(text)
        if answer is None:
            raise ServerAnswerError(f"{self.base_url}{path} is not JSON: {show_value(text)}")
        return answer

    def _call(self, method: str, path: str, body: Any = None, timeout_s: float = CALL_S) -> bytes:
        self._wire.begin(timeout_s)
        with self._map_call_errors(path):
            response = self._http.send(
                self._http.build_request(method, path, json=body), stream=True
            )
            try:
                answer = _read_start(response, MAX_BODY_BYTES + 1)
            finally:
                response.close()
        if len(answer) > MAX_BODY_BYTES:
            raise ServerAnswerError(f"{self.base_url}{path} is longer than {MAX_BODY_BYTES} bytes")
        if response.status_code == 200:
            return answer.replace(self._hidden.encode(), b"***") if self._hidden else answer
        text = answer[:MAX_ERROR_BYTES].decode("utf-8", "replace")
        message = self._clean(_find_error_message(_parse_json(text)) or text.strip())
        kind = (
            NotSupportedError if response.status_code in _UNSUPPORTED_STATUS else ServerAnswerError
        )
        raise kind(f"{method} {self.base_url}{path}: HTTP {response.status_code}: {message}")

    @contextmanager
    def _map_call_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (DeadlineError, httpx.HTTPError, httpx.InvalidURL) as exc:
            raise ServerError(
                f"no answer from {self.base_url}{path} ({self._clean(str(exc) or repr(exc))}): is "
                "the server running, and is the address right?"
            ) from None

    def _hide_key(self, done: Generation) -> Generation:
        """The answer as it may be stored, as a far end may well repeat what it was sent."""
        key = self._hidden
        if not key or key not in f"{done.text}{done.reasoning_text}":
            return done
        text, reasoning = (
            part and part.replace(key, "***") for part in (done.text, done.reasoning_text)
        )
        return replace(done, text=text, reasoning_text=reasoning)

    def _clean(self, message: str) -> str:
        """A far end's words as they may be stored: short, valid text, without our key."""
        text = message.encode("utf-8", "replace").decode("utf-8")
        if self._hidden:
            text = text.replace(self._hidden, "***")
        return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


class _LostConnectionError(Exception):
    """A kept connection turned out closed before anything of the answer came."""


def _read_start(response: httpx.Response, limit: int) -> bytes:
    """The body, or its first ``limit`` bytes."""
    pieces, total = [], 0
    for piece in response.iter_raw():
        pieces.append(piece)
        total += len(piece)
        if total > limit:
            break
    return b"".join(pieces)[:limit]


def _parse_json(text: str) -> Any:
    """Decoded JSON, None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
