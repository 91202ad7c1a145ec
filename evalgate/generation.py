"""One streamed answer, put together from its events: text, token chunks, usage, or the error.

Knows both OpenAI stream shapes (completions and chat) and vLLM's additions; knows no network and no
clock: every event comes with the time of the read that completed it.

A chunk counts when it carries at least one generated token:

- it has token ids (vLLM's return_token_ids): when there is at least one, whatever its text;
- it has none, but text or reasoning: yes;
- it has neither (half a character, or a stop token): when the usage leaves a token for it. If there
  are fewer such tokens than empty chunks, only the finishing chunk counts;
- it only says the role, or only the usage: no.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from evalgate.records import ErrorCategory, RequestError
from evalgate.validation import show_value

DONE = "[DONE]"
# vLLM ends a request that it gave up with one of these: an answer, but not the model's.
FAILED_FINISHES = ("abort", "error")
MAX_COUNT = 10**9  # tokens that a usage may claim; what says more does not count
MAX_TEXT_CHARS = 2 * 1024 * 1024  # of answer and reasoning; a line of it can still be read back


@dataclass(frozen=True)
class Generation:
    """What one request gave. With an ``error`` there is no latency, no count and no text.

    ``chunk_ns`` and ``end_ns`` count from the sending of the request; ``first_answer_ns`` is the
    first chunk with text that is not reasoning. Token counts are the server's usage, or None.
    """

    started_at: str
    chunk_ns: list[int]
    end_ns: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    text: str | None
    reasoning_text: str | None
    token_ids: list[int] | None
    error: RequestError | None
    first_answer_ns: int | None = None


class StreamError(Exception):
    """The stream cannot become an answer: why, as an error category and a sentence."""

    def __init__(self, category: ErrorCategory, message: str) -> None:
        super().__init__(message)
        self.category: ErrorCategory = category
        self.message = message


def build_failed(started_at: str, category: ErrorCategory, message: str) -> Generation:
    """A request without an answer."""
    return Generation(
        started_at=started_at,
        chunk_ns=[],
        end_ns=None,
        prompt_tokens=None,
        output_tokens=None,
        cached_tokens=None,
        finish_reason=None,
        text=None,
        reasoning_text=None,
        token_ids=None,
        error=RequestError(category=category, message=message),
    )


class StreamReader:
    """Takes the events of one stream in order, then gives the Generation.

    ``chunks`` is how many chunks surely carried a token so far; ``done`` is True after [DONE],
    ``finish_reason`` is None until the server gave one.
    """

    def __init__(self) -> None:
        self.done = False
        self.finish_reason: str | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._text_chars = 0
        self._stamps: list[int] = []
        self._empty_stamps: list[int] = []
        self._empty_finish = False
        self._ids: list[int] | None = None
        self._first_answer: int | None = None
        self._usage: dict[str, Any] | None = None

    @property
    def chunks(self) -> int:
        return len(self._stamps)

    def add(self, data: str, stamp_ns: int) -> None:
        """One event's data. Raises StreamError for an error object or a broken event."""
        if self.done:
            return
        if data.strip() == DONE:
            self.done = True
            return
        event = _parse_event(data)
        if event.get("usage") is not None:
            self._usage = _check_usage(event["usage"])
        choices = event.get("choices")
        if choices is None:
            choices = []
        if not isinstance(choices, list):
            raise StreamError("stream_error", f"choices is not a list: {show_value(choices)}")
        for choice in choices:
            self._add_choice(choice, stamp_ns)

    def build(self, started_at: str, sent_ns: int, end_ns: int) -> Generation:
        """The answer. Raises StreamError when the stream ended before the answer did."""
        if self.finish_reason is None:
            raise StreamError("truncated", "the stream ended without a finish_reason")
        if self.finish_reason in FAILED_FINISHES:
            raise StreamError("stream_error", f"the server gave up: {self.finish_reason!r}")
        usage = self._usage or {}
        output_tokens = usage.get("completion_tokens")
        if self._ids is not None and output_tokens not in (None, len(self._ids)):
            raise StreamError(
                "stream_error",
                f"the stream carried {len(self._ids)} tokens but its usage says {output_tokens}: "
                "a part of it is missing",
            )
        reasoning = _join(self._reasoning)
        return Generation(
            started_at=started_at,
            chunk_ns=[s - sent_ns for s in self._count_stamps(output_tokens)],
            end_ns=end_ns - sent_ns,
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=output_tokens,
            cached_tokens=usage.get("cached_tokens"),
            finish_reason=self.finish_reason,
            text=_join(self._text),
            reasoning_text=reasoning or None,
            token_ids=self._ids,
            error=None,
            first_answer_ns=None if self._first_answer is None else self._first_answer - sent_ns,
        )

    def _add_choice(self, choice: Any, stamp_ns: int) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            raise StreamError("stream_error", f"not the one choice asked for: {show_value(choice)}")
        delta = choice.get("delta")
        source = choice if delta is None else delta
        if not isinstance(source, dict):
            raise StreamError("stream_error", f"delta is not an object: {show_value(delta)}")
        text = _get_text(source, "content" if delta is not None else "text")
        # vLLM renamed the field; both names are in use.
        reasoning = _get_text(source, "reasoning") or _get_text(source, "reasoning_content")
        finish = _get_text(choice, "finish_reason") or None
        ids = _check_ids(choice.get("token_ids"))
        self._text_chars += len(text) + len(reasoning) + len(finish or "")
        if self._text_chars > MAX_TEXT_CHARS:
            raise StreamError("stream_error", f"more than {MAX_TEXT_CHARS} characters came")
        if self.finish_reason is not None:
            if text or reasoning or ids:
                raise StreamError("stream_error", "more text came after the finish_reason")
            return  # some servers hang an empty choice on their usage
        if text:
            self._text.append(text)
            if self._first_answer is None:
                self._first_answer = stamp_ns
        if reasoning:
            self._reasoning.append(reasoning)
        if ids is not None:
            self._ids = [] if self._ids is None else self._ids
            self._ids.extend(ids)
        if finish is not None:
            self.finish_reason = finish
        if ids if ids is not None else (text or reasoning):
            self._stamps.append(stamp_ns)
        elif ids is None and (finish is not None or "role" not in source):
            self._empty_stamps.append(stamp_ns)
            self._empty_finish = finish is not None

    def _count_stamps(self, output_tokens: int | None) -> list[int]:
        """Times of the chunks that carried a token, empty ones by what the usage leaves them."""
        left = 0 if output_tokens is None else output_tokens - len(self._stamps)
        if self._ids is not None or left <= 0:
            return self._stamps
        if left >= len(self._empty_stamps):
            return sorted(self._stamps + self._empty_stamps)
        if self._empty_finish:
            return sorted([*self._stamps, self._empty_stamps[-1]])
        return self._stamps


def find_error_message(body: Any) -> str | None:
    """The message of an error object as OpenAI, vLLM (old and new) or FastAPI write it."""
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    if error:
        return str(error)
    if body.get("object") == "error":
        return str(body.get("message") or body)
    return str(body["detail"]) if body.get("detail") else None


def _parse_event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise StreamError("stream_error", f"an event is not JSON: {show_value(data)}") from None
    if not isinstance(event, dict):
        raise StreamError("stream_error", f"an event is not an object: {show_value(event)}")
    message = None if "choices" in event and not event.get("error") else find_error_message(event)
    if message is not None:
        raise StreamError("stream_error", message)
    return event


def _check_usage(usage: Any) -> dict[str, int | None]:
    if not isinstance(usage, dict):
        raise StreamError("stream_error", f"usage is not an object: {show_value(usage)}")
    details = usage.get("prompt_tokens_details")
    counts = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": details.get("cached_tokens") if isinstance(details, dict) else None,
    }
    for name, value in counts.items():
        if value is not None and (type(value) is not int or not 0 <= value <= MAX_COUNT):
            raise StreamError("stream_error", f"usage.{name} is {show_value(value)}, not a count")
    return counts


def _check_ids(ids: Any) -> list[int] | None:
    if ids is None:
        return None
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise StreamError("stream_error", f"token_ids is not a list of numbers: {show_value(ids)}")
    return ids


def _get_text(source: dict[str, Any], key: str) -> str:
    value = source.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise StreamError("stream_error", f"{key} is not text: {show_value(value)}")
    return value


def _join(pieces: list[str]) -> str:
    r"""One text; halves of a surrogate pair (JSON's \ud83d ...) are joined across chunks.

    A half that stays alone becomes U+FFFD, as it can be neither stored nor digested.
    """
    return "".join(pieces).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
