"""Prompt sizes where a server has no /tokenize: its usage counts, or an estimate.

Stands in for ``tasks.Tokenizer``. The ids that it gives are word pieces of our own, good for
counting and cutting; they are never sent, as such a server is asked by chat messages.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

from evalgate.errors import ServerAnswerError

PIECE = re.compile(r"\s*\S{1,4}")  # about a token of English
TEMPLATE_TOKENS = 16


class UsageTokenizer:
    """Counts by ``count_prompt(messages)``: the prompt tokens that a one-token answer was billed
    for. Without it (no request may be sent before the measured ones) sizes are estimated, and the
    measured requests' own usage decides whether a prompt was in its bucket."""

    def __init__(
        self, count_prompt: Callable[[list[dict[str, str]]], int | None] | None = None
    ) -> None:
        self._count_prompt = count_prompt
        self._pieces: dict[int, str] = {}

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for piece in PIECE.findall(text):
            number = zlib.crc32(piece.encode())
            self._pieces[number] = piece
            ids.append(number)
        return ids

    def detokenize(self, ids: list[int]) -> str:
        return "".join(self._pieces[number] for number in ids)

    def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """As many ids as the server counts for these messages; the first tells texts apart."""
        text = "".join(message["content"] for message in messages)
        count: int | None = len(self.tokenize(text)) + TEMPLATE_TOKENS
        if self._count_prompt is not None:
            count = self._count_prompt(messages)
            if count is None:
                raise ServerAnswerError(
                    "the server has neither /tokenize nor usage counts, so prompts cannot be "
                    "sized: set warmup = 0 to size them by estimate, or use another server"
                )
        return [zlib.crc32(text.encode()), *[0] * (count - 1)]
