import json
import random
import re
import string
from collections import Counter
from pathlib import Path

import pytest
from evalgate_tasks.base import ReferenceTextError
from evalgate_tasks.hotpotqa import TASK

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("prediction", "references", "f1"),
    [
        ("Bono", ["Bob Dylan"], 0),
        ("Paris", ["City of Light", "Paris"], 1),
        ("It was 3.14.", ["3.14"], 0.5),
        ("314", ["3.14"], 1),
        ("1,000", ["1000"], 1),
        ("10\n\nPassage: The 2011 census", ["10"], 0.4),
        ("Paris Paris Paris Paris Paris", ["Paris"], 1 / 3),
        ("The The", ["The The"], 1),
        ("the the!", ["The The"], 1),
        ("The", ["A"], 0),
        ("", ["The The"], 0),
        ("", ["Paris"], 0),
        ("...", ["Paris"], 0),
        ("Yes, both are American", ["yes"], 0.4),
        ("the city of light", ["City of Light", "Paris"], 1),
        ("green light", ["City of Light"], 0.4),  # 1 of 2, 1 of 3
    ],
)
def test_token_f1_is_longbenchs(prediction, references, f1):
    assert TASK.score(prediction, references).score == pytest.approx(f1)


@pytest.mark.parametrize(
    ("prediction", "reference", "exact", "f1"),
    [
        ("314", "3.14", 0, 1),
        ("3.14", "3.14", 1, 1),
        ("1,000", "1000", 1, 1),
        ("Yes, both are American", "yes", 0, 0),
        ("yes.", "Yes", 1, 1),
        ("no", "yes", 0, 0),
        ("yes", "yes it is", 0, 0),
        ("The The", "The The", 1, 1),
        ("Bob Dylan sang", "Bob Dylan", 0, 0.8),
    ],
)
def test_exact_match_and_hotpotqas_own_rule_stand_beside(prediction, reference, exact, f1):
    extra = TASK.score(prediction, [reference]).extra
    assert extra["exact_match"] == exact
    assert extra["hotpotqa_f1"] == pytest.approx(f1)


def test_thinking_is_no_part_of_the_answer():
    assert TASK.postprocess("<think>Maybe Paris? no</think>\nRome").text == "Rome"
    unclosed = TASK.postprocess("<think>Maybe Rome")
    assert (unclosed.text, unclosed.flags) == ("", ["unclosed_thinking"])


@pytest.mark.parametrize("references", [[], [""], ["Paris", " "]])
def test_a_missing_reference_is_refused(references):
    with pytest.raises(ReferenceTextError, match="reference"):
        TASK.score("Paris", references)


def own_f1(prediction, truth):
    """LongBench's definition, written from its description: tokens after normalisation."""

    def tokens(text):
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return [w for w in re.split(r"\s+", text) if w and w not in ("a", "an", "the")]

    got, want = tokens(prediction), tokens(truth)
    left, same = list(want), 0
    for token in got:
        if token in left:
            left.remove(token)
            same += 1
    return 0.0 if same == 0 else 2 * same / (len(got) + len(want))


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data beside the checkout")
def test_scores_agree_with_an_independent_f1_on_real_questions():
    items = json.loads((SHARED / "hotpotqa_100.json").read_text(encoding="utf-8"))
    rng = random.Random(7)
    seen = Counter()
    for item in items:
        answer = item["answer"]
        passage = "".join(rng.choice(item["context"])[1]).split()
        start = rng.randrange(len(passage))
        near = " ".join([*passage[start : start + 3], *answer.split()])
        other = rng.choice(items)["answer"]
        for prediction in (answer, answer.upper() + ".", near, other, " ".join(passage[:20])):
            expected = max(own_f1(prediction, r) for r in (answer, other))
            score = TASK.score(prediction, [answer, other]).score
            assert score == pytest.approx(expected)
            seen[0 < score < 1] += 1
    assert seen[True] > 100  # not only zeros and ones were compared


@pytest.mark.parametrize("kind", TASK.kinds)
def test_the_passages_of_an_embedded_item_hold_the_way_to_its_answer(kind):
    seen = Counter()
    for n in range(60):
        sample = TASK.generate(f"1/{n}", kind, (n % 5) / 4, 600, "x")
        question, passages = sample.input, sample.context.split("\n\n")
        facts, directors = read_agencies(passages), read_directors(passages)
        named = [agency for agency in facts if agency in question]
        if kind == "comparison":
            first, second = named
            if "founded first" in question:
                right = min(named, key=lambda agency: facts[agency][0])
            else:
                right = "yes" if facts[first][1] == facts[second][1] else "no"
        elif question.startswith("Which agency"):
            # Each condition of the question holds for the answer alone.
            (right,) = [
                agency
                for agency, (year, town) in facts.items()
                if f"founded in {year}," in question or f"head office in {town} " in question
            ]
            person, job = directors[right]
            assert f"the {job} {person} direct?" in question or f"by a {job}?" in question
        else:
            (agency,) = [a for a, (person, _) in directors.items() if person in question]
            assert named in ([], [agency])
            right = str(facts[agency][0]) if "year" in question else facts[agency][1]
        assert sample.answers == [right]
        seen[question.split()[0] + question.split()[1]] += 1
    assert len(seen) > 1  # not all questions are of one form


def read_agencies(passages):
    """Agency to (year, town), from the passages that have an agency as their title."""
    facts = {}
    for passage in passages:
        title, text = passage.split("\n")[1:]
        if founded := re.search(r"was founded in (\d+)", text):
            town = re.search(r"head office of .* is in (\w+)", text)[1]
            facts[title] = (int(founded[1]), town)
    return facts


def read_directors(passages):
    """Agency to (person, job), from the passages that have a person as their title."""
    directors = {}
    for passage in passages:
        title, text = passage.split("\n")[1:]
        if agency := re.search(r"directs the (\w+ of \w+ \w+)", text):
            directors[agency[1]] = (title, re.search(r" is a (\S+) who", text)[1])
    return directors


def test_the_gold_passages_lie_half_a_context_apart_and_move_with_the_depth():
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        sample = TASK.generate("2/0", "comparison", depth, 2000, "x")
        passages = sample.context.split("\n\n")
        where = [i for i, p in enumerate(passages) if p.split("\n")[1] in sample.input]
        assert len(where) == 2
        assert abs(where[1] - where[0]) == pytest.approx(len(passages) / 2, abs=1.5)
        last = len(passages) - 1
        assert min(abs(i / last - depth) for i in where) == pytest.approx(0, abs=0.05)


def test_a_longer_context_holds_more_passages_in_the_words_of_the_gold_ones():
    counts = [
        sum("directs the" in p for p in sample.context.split("\n\n"))
        for sample in (TASK.generate("3/0", "comparison", 0.5, w, "x") for w in (600, 2400, 9000))
    ]
    assert counts[0] < counts[1] < counts[2]
