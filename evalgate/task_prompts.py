"""Prompts of a wanted length, in the server's own tokens: growing embedded text, cutting files.

Every call of the tokenizer is a request to a server, so a length is found in a few steps. Knows no
task: what is measured comes in as a function of a word count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from evalgate.errors import TaskDataError

TRUNCATION_POLICY = "middle"
TOKENS_PER_WORD = 1.4  # of English prose with a chat template, for the first guess only
MAX_STEPS = 12

T = TypeVar("T")


class Tokenizer(Protocol):
    """What a server says about tokens; ``evalgate.client.Client`` is one.

    ``tokenize_chat`` applies the chat template once, generation prompt added, BOS once;
    ``tokenize`` adds nothing.
    """

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: list[int]) -> str: ...

    def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    """A user's text and its token ids under the chat template."""

    text: str
    ids: list[int]


def tokenize_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    return Prompt(text, tokenizer.tokenize_chat([{"role": "user", "content": text}]))


def truncate_ids(ids: Sequence[int], length: int) -> list[int]:
    """Cut out the middle: ids 0..9 to 6 gives [0, 1, 2, 7, 8, 9]; an odd one stays in front."""
    if length >= len(ids):
        return list(ids)
    tail = length // 2
    return [*ids[: length - tail], *ids[len(ids) - tail :]]


def truncate_prompt(tokenizer: Tokenizer, prompt: Prompt, max_tokens: int) -> Prompt:
    """The prompt with the middle of its text cut out so that it has at most ``max_tokens``.

    The text is cut, not the templated ids, so that a server asked by chat messages sees the same.
    Tokens can merge differently at the seam; then a few more go.
    """
    text_ids = tokenizer.tokenize(prompt.text)
    kept = len(text_ids) - (len(prompt.ids) - max_tokens)
    for _ in range(MAX_STEPS):
        if kept < 1:
            break
        cut = tokenize_prompt(tokenizer, tokenizer.detokenize(truncate_ids(text_ids, kept)))
        if len(cut.ids) <= max_tokens:
            return cut
        kept -= len(cut.ids) - max_tokens
    raise TaskDataError(
        f"a prompt of {len(prompt.ids)} tokens cannot be cut to {max_tokens}: the chat template "
        "alone may be longer; raise the length range"
    )


def find_size(
    build: Callable[[int], tuple[T, int]], *, low: int, high: int, target: int, guess_words: int
) -> tuple[T, int]:
    """Find what has low <= tokens < high, aiming at ``target``: (built, its word count).

    ``build`` maps a word count to (built, tokens). Each step divides the missing tokens by the
    tokens a word measured last. Raises TaskDataError with the nearest length that was seen.
    """
    words, before = max(1, guess_words), None
    seen: dict[int, int] = {}
    for _ in range(MAX_STEPS):
        built, tokens = build(words)
        if low <= tokens < high:
            return built, words
        seen[words] = tokens
        slope = tokens / words
        if before is not None and before[0] != words and before[1] != tokens:
            slope = min(max((tokens - before[1]) / (words - before[0]), slope / 8), slope * 8)
        before = (words, tokens)
        step = round((target - tokens) / slope)
        words = max(1, words + (step or (1 if tokens < low else -1)))
        while words in seen and words > 1:
            words += 1 if tokens < low else -1
        if words in seen:
            break
    nearest = min(seen.values(), key=lambda t: abs(t - target))
    raise TaskDataError(
        f"no prompt of {low} to {high - 1} tokens could be built, the nearest has {nearest}: "
        "widen the range, or move it"
    )
