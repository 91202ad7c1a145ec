"""retrieval: find one thing in a long context: a passage, a needle among needles, a key's value.

Scores by kind, each under its public name:

passage           LongBench's rule: right paragraph numbers / numbers listed
needle            RULER's recall of the references; whole numbers or words only, so 1234 is not
needle_multikey   found in 12345 (RULER looks for substrings)
kv                lost-in-the-middle's rule: the value stands in the first line of the answer

Recall rewards an answer that lists everything; such an answer carries the flag ``over_listing``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from evalgate_tasks.base import ReferenceTextError, Sample, Score, Task
from evalgate_tasks.corpus import Corpus, count_words, fill_up
from evalgate_tasks.text import contains_whole

_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_PARAGRAPH_WORDS = 80
_MAX_PARAGRAPHS = 300
_PAIR_WORDS = 14  # a key-value pair has about the tokens of 14 words of prose
_N_KEYS = 4

_PASSAGE = """Here are numbered paragraphs about towns, and then a short description. Find the \
paragraph that the description was written from.

{context}

Description: {input}

Which paragraph was the description written from? Reply with its number in the form \
"Paragraph 1", "Paragraph 2" and so on, and nothing else.

The answer is:"""

_NEEDLE = """Some access codes are hidden in the text below. Remember them: you will be asked for \
one of them.

{context}

{input} Reply with the code only.

The code is:"""

_KV = """Below is a JSON object. Look up the value of one of its keys.

{context}

Key: "{input}"
Reply with the value only. The value of this key is:"""


class Retrieval(Task):
    name = "retrieval"
    version = 1
    scoring = "passage:longbench_retrieval,needle:ruler_recall,kv:first_line_contains"
    max_tokens = 64
    templates: ClassVar[Mapping[str, str]] = {
        "passage": _PASSAGE,
        "needle": _NEEDLE,
        "needle_multikey": _NEEDLE,
        "kv": _KV,
    }

    def check_references(self, references: Sequence[str], kind: str | None = None) -> None:
        super().check_references(references, kind)
        if self.check_kind(kind) == "passage":
            for reference in references:
                _read_paragraph(reference)

    def score(self, prediction: str, references: Sequence[str], kind: str | None = None) -> Score:
        self.check_references(references, kind)
        kind = self.check_kind(kind)
        listed = _NUMBER.findall(prediction)
        if kind == "passage":
            best = max(compute_right_share(listed, _read_paragraph(r)) for r in references)
            return Score(best, _flag_over_listing(listed, 1))
        if kind == "kv":
            first_line = prediction.strip().split("\n")[0]
            return Score(float(any(contains_whole(first_line, r) for r in references)))
        found = sum(contains_whole(prediction, r) for r in references)
        return Score(found / len(references), _flag_over_listing(listed, len(references)))

    def generate(self, seed: str, kind: str, depth: float, words: int, sample_id: str) -> Sample:
        write = {"passage": _write_passage, "kv": _write_kv}.get(self.check_kind(kind))
        if write is not None:
            question, answer, context = write(seed, depth, words)
        else:
            n_keys = _N_KEYS if kind == "needle_multikey" else 1
            question, answer, context = _write_needle(seed, depth, words, n_keys)
        return Sample(question, context, [answer], sample_id, kind, depth)


def compute_right_share(listed: Sequence[str], wanted: str) -> float:
    """LongBench's rule for numbers: how many of those listed are the wanted one."""
    return sum(number == wanted for number in listed) / len(listed) if listed else 0.0


def _read_paragraph(reference: str) -> str:
    """ "Paragraph 19" or "19" gives "19"."""
    match = _PARAGRAPH.search(reference) or _NUMBER.fullmatch(reference.strip())
    if match is None:
        raise ReferenceTextError(
            f'reference {reference!r} names no paragraph: write it as "Paragraph 19", or give '
            "the item the kind it belongs to (needle, kv)"
        )
    return match.group(match.lastindex or 0)


def _flag_over_listing(listed: Sequence[str], n_wanted: int) -> list[str]:
    return ["over_listing"] if len(set(listed)) > 2 * n_wanted else []


def _write_passage(seed: str, depth: float, words: int) -> tuple[str, str, str]:
    corpus = Corpus(random.Random(f"{seed}/facts"))
    n = max(3, min(words // _PARAGRAPH_WORDS, _MAX_PARAGRAPHS))
    target = round(depth * (n - 1))
    described = ""
    paragraphs = []
    for i in range(n):
        town, river, goods, job = corpus.town(), corpus.river(), corpus.goods(), corpus.job()
        year, person = corpus.year(), corpus.person()
        paragraphs.append(
            f"Paragraph {i + 1}: {town} lies on the {river} and lives by making {goods}. Its "
            f"bridge was opened in {year}, after the {job} {person} had drawn up the plans."
        )
        if i == target:
            described = (
                f"A place known for its {goods}, on the banks of the {river}. A {job} named "
                f"{person} planned the bridge, which has been in use since {year}."
            )
    context = "\n\n".join(fill_up(paragraphs, words, f"{seed}/filler"))
    return described, f"Paragraph {target + 1}", context


def _write_needle(seed: str, depth: float, words: int, n_keys: int) -> tuple[str, str, str]:
    corpus = Corpus(random.Random(f"{seed}/facts"))
    places = [corpus.town() for _ in range(n_keys)]
    codes = corpus.rng.sample(range(10_000, 100_000), n_keys)
    needles = [
        f"The access code of {place} is {code}." for place, code in zip(places, codes, strict=True)
    ]
    # The needle that is asked for lies at ``depth``; the others are spread over the rest.
    where = [depth, *((depth + i / n_keys) % 1.0 for i in range(1, n_keys))]
    order = sorted(range(n_keys), key=lambda i: where[i])
    missing = words - sum(count_words(needle) for needle in needles)
    filler = Corpus(random.Random(f"{seed}/filler"))
    parts, written = [], 0
    for i in order:
        upto = round(where[i] * max(missing, 0))
        parts += [filler.prose(upto - written), needles[i]]
        written = upto
    parts.append(filler.prose(missing - written))
    question = f"What is the access code of {places[0]}?"
    return question, str(codes[0]), " ".join(p for p in parts if p)


def _write_kv(seed: str, depth: float, words: int) -> tuple[str, str, str]:
    rng = random.Random(f"{seed}/facts")
    n_pairs, rest = divmod(max(words, 3 * _PAIR_WORDS), _PAIR_WORDS)
    hexes: set[str] = set()
    pairs = []
    for _ in range(n_pairs):
        key, value = (_draw_hex(rng, hexes) for _ in range(2))
        pairs.append((key, value))
    key, value = pairs[round(depth * (n_pairs - 1))]
    lines = [f' "{k}": "{v}"' for k, v in pairs]
    if rest:
        note = Corpus(random.Random(f"{seed}/filler")).prose(rest)
        lines.append(f' "note": "{note}"')
    return key, value, "{" + ",\n".join(lines)[1:] + "}"


def _draw_hex(rng: random.Random, used: set[str]) -> str:
    """Eight hexadecimal digits in two groups, each drawn once."""
    while True:
        digits = f"{rng.getrandbits(16):04x}-{rng.getrandbits(16):04x}"
        if digits not in used:
            used.add(digits)
            return digits


TASK = Retrieval()
