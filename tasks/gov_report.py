"""gov_report: one-page summaries of public reports. Score: rougeL F-measure of rouge-score.

rougeL (the whole text as one sequence) gates; rougeLsum (line by line, then the union) is kept
beside it and is another figure: "c d\\na b" against "a b\\nc d" has rougeL 0.5 and rougeLsum 1.0.
No stemmer, as in LongBench. Words are those of rouge-score on ASCII text and of any script
elsewhere, so an identical text is 1 in Chinese and Arabic too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from evalgate_tasks.base import Sample, Score, Task
from evalgate_tasks.corpus import Corpus, count_words, fill_up
from evalgate_tasks.text import split_words

if TYPE_CHECKING:
    from evalgate_tasks.rouge import BitRougeScorer

_N_FINDINGS = 5
_SECTION_WORDS = 130

_TEMPLATE = """Below is a report by a public agency. Write a summary of it, about one page long.

Report:
{context}

End of the report. Now write a summary of the report, about one page long.

Summary:"""


class GovReport(Task):
    name = "gov_report"
    version = 1
    scoring = "rougeL_fmeasure_nostem"
    max_tokens = 512
    templates: ClassVar[Mapping[str, str]] = {"report": _TEMPLATE}

    def score(self, prediction: str, references: Sequence[str], kind: str | None = None) -> Score:
        self.check_references(references, kind)
        # score_multi takes each variant's best reference.
        spelled_out = any(not split_words(r) for r in references)
        scores = _load_scorer(spelled_out).score_multi(references, prediction)
        return Score(
            score=float(scores["rougeL"].fmeasure),
            extra={
                "rougeL": float(scores["rougeL"].fmeasure),
                "rougeLsum": float(scores["rougeLsum"].fmeasure),
                "use_stemmer": False,
            },
        )

    def generate(self, seed: str, kind: str, depth: float, words: int, sample_id: str) -> Sample:
        self.check_kind(kind)
        corpus = Corpus(random.Random(f"{seed}/facts"))
        agency, year = corpus.agency(), corpus.year()
        findings = [_write_finding(corpus) for _ in range(_N_FINDINGS)]
        opening = f"Report of the {agency} for the year {year}"
        summary = [f"The {agency} reports on its work in {year}."]
        summary += [short for _, short in findings]
        summary.append(f"The {agency} will report on these points again in two years.")

        n_sections = max(_N_FINDINGS, words // _SECTION_WORDS)
        where = [round(i * (n_sections - 1) / (_N_FINDINGS - 1)) for i in range(_N_FINDINGS)]
        facts = {section: long for section, (long, _) in zip(where, findings, strict=True)}
        heads = [f"{i + 1}. {facts.get(i, '')}".rstrip() for i in range(n_sections)]
        sections = fill_up(heads, words - count_words(opening), f"{seed}/filler")
        context = "\n\n".join([opening, *sections])
        return Sample("", context, [" ".join(summary)], sample_id, kind)


class _Words:
    """rouge-score's tokenizer interface over words of any script."""

    def tokenize(self, text: str) -> list[str]:
        return split_words(text)


class _Characters:
    """For a reference without a single word: its visible characters, so that equal texts agree."""

    def tokenize(self, text: str) -> list[str]:
        return [c for c in text if not c.isspace()]


@cache
def _load_scorer(spelled_out: bool) -> BitRougeScorer:
    # Imported late: rouge-score brings NLTK in, which takes longer than everything else here.
    from evalgate_tasks.rouge import BitRougeScorer

    return BitRougeScorer(_Characters() if spelled_out else _Words())


def _write_finding(corpus: Corpus) -> tuple[str, str]:
    """One finding as the report tells it, and as a summary would."""
    town, agency, goods = corpus.town(), corpus.agency(), corpus.goods()
    cost, share, year = corpus.rng.randint(12, 98), corpus.rng.randint(11, 89), corpus.year()
    return corpus.rng.choice(
        [
            (
                f"In {town} the works begun in {year} were finished at a cost of {cost} thousand "
                f"crowns, and {share} percent of the sum was paid by the {agency}.",
                f"Works in {town} cost {cost} thousand crowns, of which the {agency} paid {share} "
                "percent.",
            ),
            (
                f"An audit by the {agency} found that {share} percent of the {goods} stored at "
                f"{town} had never been weighed, and it recommended {cost} new scales.",
                f"The {agency} found {share} percent of the {goods} at {town} unweighed and "
                f"recommended {cost} new scales.",
            ),
            (
                f"Since {year} the {agency} has trained {cost} inspectors in {town}, but {share} "
                f"percent of them have left the service for the trade in {goods}.",
                f"The {agency} trained {cost} inspectors in {town}; {share} percent have left.",
            ),
            (
                f"The {agency} was asked to close the office at {town}; it declined, because "
                f"{share} percent of all permits for {goods} are issued there.",
                f"The {agency} declined to close the office at {town}, which issues {share} "
                f"percent of the permits for {goods}.",
            ),
        ]
    )


TASK = GovReport()
