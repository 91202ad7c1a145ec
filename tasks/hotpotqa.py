"""hotpotqa: questions on two of many given passages. Score: LongBench's token F1.

Exact match and HotpotQA's own F1 (which gives an answer of yes, no or noanswer nothing unless both
sides are exactly that) stand beside the score. One named deviation from LongBench: prediction and
reference that normalisation empties score 1 when they are the same text ("The The").
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from evalgate_tasks.base import Sample, Score, Task
from evalgate_tasks.corpus import Corpus, fill_up
from evalgate_tasks.text import is_same_bare_text, normalize_answer, normalize_exact

_CLOSED_ANSWERS = ("yes", "no", "noanswer")
_PASSAGE_WORDS = 70
_TOWNS_A_PAIR = 10
# Small models answer in sentences, which leaves a right name of four words an F1 of about 0.7 and a
# right year 0.15: most questions ask for names, so that a wrong answer shows in the score.
_BRIDGE_WEIGHTS = (3, 3, 1, 1)
_MAX_PASSAGES = 300  # beyond that passages grow longer: the corpus has 240 agencies

_TEMPLATE = """Read the passages and answer the question. Reply with the answer only, in a few \
words, and write nothing else.

{context}

Use the passages above. Reply with the answer only, in a few words, and write nothing else.

Question: {input}
Answer:"""


class HotpotQA(Task):
    name = "hotpotqa"
    version = 2
    scoring = "longbench_f1"
    max_tokens = 32
    templates: ClassVar[Mapping[str, str]] = {"bridge": _TEMPLATE, "comparison": _TEMPLATE}

    def score(self, prediction: str, references: Sequence[str], kind: str | None = None) -> Score:
        self.check_references(references, kind)
        return Score(
            score=max(compute_f1(prediction, r) for r in references),
            extra={
                "exact_match": max(compute_exact_match(prediction, r) for r in references),
                "hotpotqa_f1": max(compute_hotpotqa_f1(prediction, r) for r in references),
            },
        )

    def generate(self, seed: str, kind: str, depth: float, words: int, sample_id: str) -> Sample:
        rng = random.Random(f"{seed}/facts")
        corpus = Corpus(rng)
        write = _write_bridge if self.check_kind(kind) == "bridge" else _write_comparison
        question, answer, gold = write(corpus)
        n_distractors = max(2, min(words // _PASSAGE_WORDS, _MAX_PASSAGES) - len(gold))
        passages: list[tuple[str, str]] = []
        while len(passages) < n_distractors:
            # One person and one agency in twelve passages are told of in the words of the gold
            # ones, so that only names tell them apart; the rest is about towns.
            person, agency = corpus.person(), corpus.agency()
            passages.append((person, _describe_person(corpus, person, agency)[0]))
            passages.append((agency, _describe_agency(corpus, agency)[0]))
            for town in (corpus.town() for _ in range(_TOWNS_A_PAIR)):
                passages.append((town, f"{town} makes {corpus.goods()} and {corpus.goods()}."))
        passages = passages[:n_distractors]
        corpus.rng.shuffle(passages)
        # The second gold passage lies half a context away from the first.
        for passage, where in zip(gold, (depth, (depth + 0.5) % 1.0), strict=True):
            passages.insert(round(where * len(passages)), passage)
        texts = [f"Passage {i}:\n{title}\n{facts}" for i, (title, facts) in enumerate(passages, 1)]
        context = "\n\n".join(fill_up(texts, words, f"{seed}/filler"))
        return Sample(question, context, [answer], sample_id, kind, depth)


def compute_f1(prediction: str, reference: str) -> float:
    """LongBench's qa F1: harmonic mean of token precision and recall, repeats counted."""
    got, wanted = normalize_answer(prediction).split(), normalize_answer(reference).split()
    if not got or not wanted:
        both_empty = not got and not wanted and prediction.strip() != ""
        return float(both_empty and is_same_bare_text(prediction, reference))
    common = sum((Counter(got) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(got), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def compute_exact_match(prediction: str, reference: str) -> float:
    """HotpotQA's exact match, except that 3.14 is not 314: marks between digits are kept."""
    got, wanted = normalize_exact(prediction), normalize_exact(reference)
    if not got or not wanted:
        return compute_f1(prediction, reference)
    return float(got == wanted)


def compute_hotpotqa_f1(prediction: str, reference: str) -> float:
    got, wanted = normalize_answer(prediction), normalize_answer(reference)
    if got != wanted and (got in _CLOSED_ANSWERS or wanted in _CLOSED_ANSWERS):
        return 0.0
    return compute_f1(prediction, reference)


def _write_bridge(corpus: Corpus) -> tuple[str, str, list[tuple[str, str]]]:
    """As in HotpotQA most answers are names, and some questions name the passage to go to."""
    person, agency = corpus.person(), corpus.agency()
    about_person, job = _describe_person(corpus, person, agency)
    about_agency, town, year = _describe_agency(corpus, agency)
    question, answer = corpus.rng.choices(
        [
            (f"Which agency, founded in {year}, does the {job} {person} direct?", agency),
            (f"Which agency with its head office in {town} is directed by a {job}?", agency),
            (f"{person} directs the {agency}. In which year was it founded?", str(year)),
            (f"In which town is the head office of the agency that {person} directs?", town),
        ],
        weights=_BRIDGE_WEIGHTS,
    )[0]
    return question, answer, [(person, about_person), (agency, about_agency)]


def _write_comparison(corpus: Corpus) -> tuple[str, str, list[tuple[str, str]]]:
    first, second = corpus.agency(), corpus.agency()
    about_first, first_town, first_year = _describe_agency(corpus, first)
    about_second, second_town, second_year = _describe_agency(corpus, second)
    if first_year != second_year and corpus.rng.random() < 0.75:
        question = f"Which was founded first, the {first} or the {second}?"
        answer = first if first_year < second_year else second
    else:
        same = corpus.rng.random() < 0.5
        if same:
            about_second = about_second.replace(second_town, first_town)
        question = (
            f"Do the {first} and the {second} have their head office in the same town, yes or no?"
        )
        answer = "yes" if same else "no"
    return question, answer, [(first, about_first), (second, about_second)]


def _describe_person(corpus: Corpus, person: str, agency: str) -> tuple[str, str]:
    job = corpus.job()
    text = (
        f"{person} is a {job} who was born in {corpus.town()}. "
        f"{person} directs the {agency} and has written about {corpus.goods()}."
    )
    return text, job


def _describe_agency(corpus: Corpus, agency: str) -> tuple[str, str, int]:
    town, year = corpus.town(), corpus.year()
    text = (
        f"The {agency} was founded in {year}. "
        f"The head office of the {agency} is in {town}, near the river {corpus.river()}."
    )
    return text, town, year


TASK = HotpotQA()
