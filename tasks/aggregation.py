"""aggregation: what only the whole context tells: distinct passages, the most frequent words.

Scores by kind, each under its public name:

count            LongBench's passage count: right numbers / numbers listed
common_words     RULER's common-words extraction: recall of the references
frequent_words   RULER's frequent-words extraction over coded words, the same recall

Recall is of whole words (RULER looks for substrings); an answer that lists more than twice as many
words as were asked for carries the flag ``over_listing``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from evalgate_tasks.base import ReferenceTextError, Sample, Score, Task
from evalgate_tasks.corpus import Corpus, compute_vocabulary, draw_coded_word
from evalgate_tasks.retrieval import compute_right_share
from evalgate_tasks.text import contains_whole, split_words

_NUMBER = re.compile(r"\d+")
_PARAGRAPH_WORDS = 60
_N_COMMON = 5
_COMMON_SHARE = 0.5  # of the list belongs to the common words
_RARE_COUNT = 2
_N_FREQUENT = 3
_ZIPF_WORDS = 40

_COUNT = """Below are numbered paragraphs. Some of them are copies of others. Read them all and \
find out how many different paragraphs there are when copies are left out.

{context}

How many different paragraphs are there? Reply with the number only.

The number is:"""

_COMMON = """Below is a numbered list of words. Some words come far more often than the others. \
Remember the ones that come most often.

{context}

{input} Reply with the words only, separated by commas.

The words are:"""

_FREQUENT = """Below is a text in an unknown language. Find out which of its words come most often.

{context}

{input} Reply with the words only, separated by commas.

The words are:"""


class Aggregation(Task):
    name = "aggregation"
    version = 1
    scoring = "count:longbench_count,words:ruler_recall"
    max_tokens = 64
    templates: ClassVar[Mapping[str, str]] = {
        "count": _COUNT,
        "common_words": _COMMON,
        "frequent_words": _FREQUENT,
    }

    def resolve_kind(self, references: Sequence[str], kind: str | None) -> str:
        """Without a kind, one number as the reference means ``count``, words ``common_words``."""
        if kind is not None or not references:
            return self.check_kind(kind)
        is_number = all(_NUMBER.fullmatch(r.strip()) for r in references)
        return "count" if is_number else "common_words"

    def check_references(self, references: Sequence[str], kind: str | None = None) -> None:
        kind = self.resolve_kind(references, kind)
        super().check_references(references, kind)
        for reference in references:
            if kind == "count" and _NUMBER.fullmatch(reference.strip()) is None:
                raise ReferenceTextError(
                    f"reference {reference!r} is not a number: a count needs one, word lists have "
                    "the kind common_words or frequent_words"
                )

    def score(self, prediction: str, references: Sequence[str], kind: str | None = None) -> Score:
        self.check_references(references, kind)
        if self.resolve_kind(references, kind) == "count":
            listed = _NUMBER.findall(prediction)
            best = max(compute_right_share(listed, r.strip()) for r in references)
            return Score(best, ["over_listing"] if len(set(listed)) > 2 else [])
        found = sum(contains_whole(prediction, r) for r in references)
        # Numbers of a numbered list are no answers.
        named = {w for w in split_words(prediction) if not w.isdigit()}
        flags = ["over_listing"] if len(named) > 2 * len(references) else []
        return Score(found / len(references), flags)

    def generate(self, seed: str, kind: str, depth: float, words: int, sample_id: str) -> Sample:
        write = {"count": _write_count, "common_words": _write_common}.get(self.check_kind(kind))
        question, answers, context = (write or _write_frequent)(seed, words)
        return Sample(question, context, answers, sample_id, kind)


def _write_count(seed: str, words: int) -> tuple[str, list[str], str]:
    rng = random.Random(f"{seed}/facts")
    n = max(3, words // (_PARAGRAPH_WORDS + 2))
    n_distinct = rng.randint(2, n - 1)
    corpus = Corpus(random.Random(f"{seed}/filler"))
    each = max(8, words // n - 2)  # two words are the paragraph's number
    texts = [corpus.prose(each) for _ in range(n_distinct)]
    # The last one has no copy and takes the words that do not divide evenly.
    texts[-1] = f"{texts[-1]} {corpus.prose(words - n * (each + 2))}".rstrip()
    texts += [rng.choice(texts[: n_distinct - 1]) for _ in range(n - n_distinct)]
    rng.shuffle(texts)
    context = "\n\n".join(f"Paragraph {i}: {text}" for i, text in enumerate(texts, 1))
    return "", [str(n_distinct)], context


def _write_common(seed: str, words: int) -> tuple[str, list[str], str]:
    rng = random.Random(f"{seed}/facts")
    vocabulary = compute_vocabulary()
    rng.shuffle(vocabulary)
    common, rare = vocabulary[:_N_COMMON], vocabulary[_N_COMMON:]
    n = max(30, words // 2)  # each entry is a number and a word
    listed = common * max(4, int(n * _COMMON_SHARE / _N_COMMON))
    rest = n - len(listed)
    listed += [rare[i // _RARE_COUNT % len(rare)] for i in range(rest)]
    rng.shuffle(listed)
    question = f"Which {_N_COMMON} words come most often in the list?"
    return question, common, " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


def _write_frequent(seed: str, words: int) -> tuple[str, list[str], str]:
    rng = random.Random(f"{seed}/facts")
    coded: dict[str, None] = {}
    while len(coded) < _ZIPF_WORDS:
        coded[draw_coded_word(rng)] = None
    names = list(coded)
    n = max(30, words)
    # Counts fall as 1/rank, and the words asked for stay ahead of the next one.
    total = sum(1 / rank for rank in range(1, _ZIPF_WORDS + 1))
    counts = [max(1, int(n / total / rank)) for rank in range(1, _ZIPF_WORDS + 1)]
    counts[_N_FREQUENT - 1] = max(counts[_N_FREQUENT - 1], counts[_N_FREQUENT] + 1)
    text = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    # Rounding leaves a few places free: they go to the most frequent word.
    text += [names[0]] * (n - len(text))
    rng.shuffle(text)
    question = f"Which {_N_FREQUENT} words come most often in the text?"
    return question, names[:_N_FREQUENT], " ".join(text)


TASK = Aggregation()
