"""Text rules that several tasks share: LongBench's answer normalisation, thinking, word tokens.

Knows no task and no sample. The normalisation is the one that SQuAD's scorer introduced and that
HotpotQA and LongBench kept: lower case, ASCII punctuation out, English articles out, white space
folded.
"""

from __future__ import annotations

import re
import string
import unicodedata

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MARK = f"[{re.escape(string.punctuation)}]"
# A mark that stands between two digits and is no comma, or a sign before a number, is kept.
_LOOSE_PUNCTUATION = re.compile(rf"(?<!\d)(?!(?<!\w)-\d){_MARK}|{_MARK}(?!\d)|,")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL | re.IGNORECASE)
_OPEN = re.compile(r"<think>", re.IGNORECASE)
_CLOSE = re.compile(r"</think>", re.IGNORECASE)
_ASCII_WORD = re.compile(r"[a-z0-9]+")

# Scripts written without spaces between words: there a word is a character.
_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # Han, extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, compatibility
    (0x20000, 0x3FFFF),  # Han, further extensions
)


def strip_thinking(text: str) -> tuple[str, bool]:
    """Remove <think> blocks; (text, False) with empty text when one is opened and never closed.

    A lone closing tag ends thinking that the chat template opened: what precedes it goes too.
    """
    text = _CLOSED_THINKING.sub("", text)
    text = _CLOSE.split(text)[-1]
    if _OPEN.search(text):
        return "", False
    return text, True


def normalize_answer(text: str) -> str:
    """LongBench's form of an answer: "The  City of Light." gives "city of light"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def normalize_exact(text: str) -> str:
    """As normalize_answer, but marks that make another number of it stay: 3.14, 10:30, -5."""
    return " ".join(_ARTICLES.sub(" ", _LOOSE_PUNCTUATION.sub("", text.lower())).split())


def is_same_bare_text(a: str, b: str) -> bool:
    """Equality of two texts that normalisation leaves empty, such as the band "The The"."""

    def fold(text: str) -> str:
        words = text.lower().split()
        return " ".join(w.translate(_PUNCTUATION) or w for w in words)

    return fold(a) == fold(b)


def is_unspaced(char: str) -> bool:
    point = ord(char)
    return any(first <= point <= last for first, last in _UNSPACED)


def split_words(text: str) -> list[str]:
    """Lower-case word tokens of any script, for ROUGE.

    On ASCII text exactly the tokens of the rouge-score package without stemming: runs of [a-z0-9].
    Elsewhere runs of letters, digits and combining marks after NFKC; a character of a script
    written without spaces is a token of its own. Empty for text that has no word at all.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    text = text.lower()
    if text.isascii():
        return _ASCII_WORD.findall(text)
    words: list[str] = []
    within = ""  # what a further character joins: a run of letters, one unspaced character, nothing
    for char in text:
        category = unicodedata.category(char)[0]
        if category == "M" and within:
            words[-1] += char
        elif category not in "LN":
            within = ""
        elif is_unspaced(char):
            words.append(char)
            within = "character"
        elif within == "run":
            words[-1] += char
        else:
            words.append(char)
            within = "run"
    return words


def contains_whole(text: str, wanted: str) -> bool:
    """True when ``wanted`` stands in ``text``, case folded, and not inside a longer ASCII word."""
    text, wanted = text.lower(), wanted.strip().lower()
    return re.search(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9])", text) is not None
