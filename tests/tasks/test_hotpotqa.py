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
    for n in range(40):
        sample = TASK.generate(f"1/{n}", kind, (n % 5) / 4, 600, "x")
        answer = sample.answers[0]
        passages = sample.context.split("\n\n")
        names = re.findall(r"(\w+ \w+) directs", sample.input)
        agencies = re.findall(r"the (\w+ of \w+ \w+)", sample.input)
        if names:
            (about,) = [p for p in passages if p.split("\n")[1] == names[0]]
            assert set(agencies) <= {re.search(r"directs the (\w+ of \w+ \w+)", about)[1]}
            agencies = [re.search(r"directs the (\w+ of \w+ \w+)", about)[1]]
        facts = {}
        for agency in agencies:
            (about,) = [p for p in passages if p.split("\n")[1] == agency]
            year = int(re.search(r"founded in (\d+)", about)[1])
            town = re.search(r"head office of .* is in (\w+)", about)[1]
            facts[agency] = (year, town)
        if "same town" in sample.input:
            assert answer == ("yes" if len({town for _, town in facts.values()}) == 1 else "no")
        elif "founded first" in sample.input:
            assert answer == min(facts, key=lambda a: facts[a][0])
        else:
            ((year, town),) = facts.values()
            assert answer == (str(year) if "year" in sample.input else town)
