"""Which routes a serial request must take, from its own token counts alone.

The client's expectation of what the kernels counted: a check that does not trust the patch. Knows
no server and no kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

FIRST_CHUNK = "first_chunk"
PREFIX = "prefix"
DECODE = "decode"
FALLBACK = "fallback"
UNPACKED = "_unpacked"  # ending of a route served through unpacked pages: proven under its own name


def strip_form(route: str) -> str:
    """The route whose steps a form of it serves: ``prefix`` for ``prefix_unpacked``."""
    return route.removesuffix(UNPACKED)


def merge_forms(counts: Mapping[str, int]) -> Counter[str]:
    """Counts by route with those of its forms; zeros are left out."""
    merged: Counter[str] = Counter()
    for route, count in counts.items():
        merged[strip_form(route)] += count
    return +merged


def split_prompt(
    prompt_tokens: int, chunk_tokens: int, cached_tokens: int = 0
) -> Iterator[tuple[str, int]]:
    """Route and tokens of each chunk in which a prompt, alone in the server, is read.

    ``chunk_tokens`` is --max-num-batched-tokens. A chunk without history is the first chunk; one of
    a single token is a decode wherever it stands, as a captured graph knows only its length.
    """
    position = cached_tokens
    while position < prompt_tokens:
        length = min(chunk_tokens, prompt_tokens - position)
        longer = FIRST_CHUNK if position == 0 else PREFIX
        yield DECODE if length == 1 else longer, length
        position += length


def compute_expected_steps(
    prompt_tokens: int, output_tokens: int, chunk_tokens: int, cached_tokens: int = 0
) -> Counter[str]:
    """Engine steps by route that one request alone in the server needs (see ``split_prompt``).

    Each output token but the first, which the last chunk yields, is one decode step.
    """
    chunks = split_prompt(prompt_tokens, chunk_tokens, cached_tokens)
    steps = Counter(route for route, _ in chunks)
    steps[DECODE] += max(output_tokens - 1, 0)
    return steps
