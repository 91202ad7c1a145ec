"""What an output looks like, apart from its score: flags that a mean would hide.

``truncated``, ``repetition`` (a loop), ``script_change``, ``language_change``. Knows no task; the
numbers below were set on loops of real decoding failures (one word or one sentence until the budget
ends) and on prose, tables and numbered lists that must stay unflagged.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from evalgate_tasks.text import is_unspaced

LOOP_MAX_PERIOD_UNITS = 64
LOOP_MIN_REPEATS = 3
LOOP_MIN_UNITS = 12
LOOP_MIN_SHARE = 0.25  # of the output, unless the loop is LOOP_LONG_UNITS long
LOOP_LONG_UNITS = 64
NGRAM = 4
NGRAM_MIN_UNITS = 100
NGRAM_MIN_DISTINCT_SHARE = 0.5
LONG_WORD_CHARS = 40  # a longer "word" is looked at by its characters: "ababab..."
SCRIPT_MIN_LETTERS = 5
SCRIPT_MIN_SHARE = 0.2
LANGUAGE_MIN_WORDS = 20
LANGUAGE_MIN_SHARE = 0.12  # of the words are the language's own small words
LANGUAGE_MIN_LEAD = 1.5  # times as many as of the next language, else it is not known

# Small words that prose of a language cannot do without, and that its neighbours use less.
_SMALL_WORDS = {
    "English": "the of and to was that for with are by were it this from which",
    "French": "le les des est et dans une pour qui sur avec du pas aux sont",
    "German": "der die und das ist nicht ein eine mit den von zu auf für im",
    "Spanish": "el los las y es una por para del se como más su al fue",
    "Italian": "il di che è per della non sono gli nel una le dei alla si",
    "Portuguese": "o os uma não com para em do da é são pelo ao das foi",
    "Dutch": "de het een van en dat niet op voor zijn te aan werd door",
}
_LANGUAGES_OF: dict[str, list[str]] = defaultdict(list)
for _language, _words in _SMALL_WORDS.items():
    for _word in _words.split():
        _LANGUAGES_OF[_word].append(_language)
_WORD = re.compile(r"[^\W\d_]+")
_UNIT = re.compile(r"\w+|[^\w\s]")


def find_flags(output_text: str, references: Sequence[str], finish_reason: str | None) -> list[str]:
    """Flags of a raw output, in a fixed order."""
    flags = []
    if finish_reason == "length":
        flags.append("truncated")
    if has_repetition(output_text):
        flags.append("repetition")
    if has_script_change(output_text, references):
        flags.append("script_change")
    elif has_language_change(output_text, references):
        flags.append("language_change")
    return flags


def has_repetition(text: str) -> bool:
    """True for a loop: a run of equal periods, or mostly repeated 4-grams in a long text.

    A loop has a period of at most 64 units (words, marks, or characters where there are no
    spaces), at least 3 repeats and 12 units, and fills a quarter of the text or 64 units.
    """
    units = _split_units(text)
    n = len(units)
    if n < LOOP_MIN_UNITS:
        return False
    counts = Counter(units)
    # A loop repeats two thirds of its units, so a text with few repeated units has none.
    if n - len(counts) < LOOP_MIN_UNITS * (LOOP_MIN_REPEATS - 1) / LOOP_MIN_REPEATS:
        return False
    numbers = {unit: i for i, unit in enumerate(counts)}
    ids = np.fromiter((numbers[u] for u in units), dtype=np.int64, count=n)
    needed = max(LOOP_MIN_UNITS, min(LOOP_LONG_UNITS, n * LOOP_MIN_SHARE))
    for period in range(1, min(LOOP_MAX_PERIOD_UNITS, n // LOOP_MIN_REPEATS) + 1):
        equal = ids[period:] == ids[:-period]
        wanted = max(needed, LOOP_MIN_REPEATS * period) - period
        if np.count_nonzero(equal) >= wanted and _longest_run(equal) >= wanted:
            return True
    if n < NGRAM_MIN_UNITS:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(ids, NGRAM)
    distinct = len(np.unique(windows, axis=0))
    return distinct < NGRAM_MIN_DISTINCT_SHARE * len(windows)


def has_script_change(text: str, references: Sequence[str]) -> bool:
    """True when a fifth or more of the letters are of a script that no reference uses."""
    if text.isascii() and any(c.isascii() and c.isalpha() for r in references for c in r):
        return False
    known = {_script(c) for r in references for c in r if c.isalpha()}
    scripts = Counter(_script(c) for c in text if c.isalpha())
    foreign = sum(count for script, count in scripts.items() if script not in known)
    if not known or foreign < SCRIPT_MIN_LETTERS:
        return False
    return foreign >= SCRIPT_MIN_SHARE * sum(scripts.values())


def has_language_change(text: str, references: Sequence[str]) -> bool:
    """True when text and references are prose of two known languages of the Latin script.

    Short texts, names and numbers have no language here, so only long outputs can be flagged.
    """
    wanted = find_language(" ".join(references))
    found = find_language(text) if wanted is not None else None
    return found is not None and found != wanted


def find_language(text: str) -> str | None:
    """The language whose small words stand out, None when there are few words or no clear lead."""
    words = _WORD.findall(text.lower())
    if len(words) < LANGUAGE_MIN_WORDS:
        return None
    counts = Counter(language for word in words for language in _LANGUAGES_OF.get(word, ()))
    (first, most), (_, next_most) = [*counts.most_common(2), (None, 0), (None, 0)][:2]
    needed = max(LANGUAGE_MIN_SHARE * len(words), LANGUAGE_MIN_LEAD * next_most)
    return first if most >= needed else None


def _split_units(text: str) -> list[str]:
    units: list[str] = []
    for word in _UNIT.findall(text):
        if len(word) > LONG_WORD_CHARS or (not word.isascii() and is_unspaced(word[0])):
            units.extend(word)
        else:
            units.append(word)
    return units


def _longest_run(equal: np.ndarray) -> int:
    """Length of the longest run of True."""
    breaks = np.flatnonzero(~equal)
    edges = np.concatenate(([-1], breaks, [len(equal)]))
    return int(np.max(np.diff(edges))) - 1


@lru_cache(maxsize=65536)
def _script(char: str) -> str:
    """The script by the first word of the character's Unicode name: LATIN, CJK, ARABIC, ..."""
    first = unicodedata.name(char, "UNKNOWN").split()[0]
    return "CJK" if first in ("HIRAGANA", "KATAKANA") else first
