import json
import re
from pathlib import Path

import pytest
from evalgate_tasks.base import ReferenceTextError
from evalgate_tasks.retrieval import TASK

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("Paragraph 19", "Paragraph 19", 1),
        ("19", "Paragraph 19", 1),
        ("Paragraph 1", "Paragraph 19", 0),
        ("Paragraph 19 or Paragraph 2", "Paragraph 19", 1 / 2),
        ("Paragraph 19, that is, 19", "Paragraph 19", 1),
        ("1, 2, 3, 4", "Paragraph 3", 1 / 4),
        ("the nineteenth", "Paragraph 19", 0),
        ("", "Paragraph 19", 0),
        ("119", "Paragraph 19", 0),
        ("7", "7", 1),
    ],
)
def test_a_passage_scores_right_numbers_over_numbers_listed(prediction, reference, score):
    assert TASK.score(prediction, [reference]).score == pytest.approx(score)


def test_a_listing_of_every_paragraph_is_flagged():
    everything = ", ".join(f"Paragraph {i}" for i in range(1, 31))
    result = TASK.score(everything, ["Paragraph 19"])
    assert result.score == pytest.approx(1 / 30)
    assert result.flags == ["over_listing"]
    assert TASK.score("Paragraph 19", ["Paragraph 19"]).flags == []


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("The code is 48213.", ["48213"], 1),
        ("482130", ["48213"], 0),
        ("48213 and 99999", ["48213", "10000"], 1 / 2),
        ("none", ["48213"], 0),
    ],
)
def test_a_needle_scores_the_share_of_references_found(prediction, references, score):
    assert TASK.score(prediction, references, "needle").score == score
    assert TASK.score(prediction, references, "needle_multikey").score == score


def test_a_needle_found_by_listing_every_number_is_flagged():
    result = TASK.score("11111 22222 33333 48213", ["48213"], "needle")
    assert (result.score, result.flags) == (1, ["over_listing"])


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("703a7ce5-f17f", 1),
        ('The value is "703A7CE5-F17F".', 1),
        ("703a7ce5", 0),
        ("703a7ce5f17f", 0),
        ("I do not know.\n703a7ce5-f17f", 0),  # copying the context is no answer
    ],
)
def test_a_value_must_stand_in_the_first_line(prediction, score):
    assert TASK.score(prediction, ["703a7ce5-f17f"], "kv").score == score


def test_a_reference_that_names_no_paragraph_is_refused_not_scored_zero():
    with pytest.raises(ReferenceTextError, match="names no paragraph"):
        TASK.score("Paragraph 1", ["48213-abc"])


def test_an_unknown_kind_is_refused_with_those_known():
    with pytest.raises(ReferenceTextError, match=r"'needel' is unknown.*needle"):
        TASK.score("1", ["1"], "needel")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data beside the checkout")
def test_scores_agree_with_an_independent_rule_on_real_references():
    path = SHARED / "longbench_passage_retrieval_en_sample.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answers"] for line in lines]
    for wanted in answers:
        number = wanted[0].split()[-1]
        for text in ("Paragraph 19", "22", f"It is {number}; not 19 and not 22", "none"):
            numbers = re.split(r"[^0-9]+", text)
            numbers = [n for n in numbers if n]
            expected = numbers.count(number) / len(numbers) if numbers else 0
            assert TASK.score(text, wanted).score == pytest.approx(expected)


@pytest.mark.parametrize("kind", TASK.kinds)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_an_embedded_item_hides_its_answer_once_and_at_its_depth(kind, depth):
    for n in range(10):
        sample = TASK.generate(f"2/{n}", kind, depth, 700, "x")
        (answer,) = sample.answers
        if kind == "passage":
            paragraphs = sample.context.split("\n\n")
            year, person = re.search(r"named (\w+ \w+) .* since (\d+)", sample.input).groups()
            holds = [p for p in paragraphs if person in p and year in p]
            assert [p.split(":")[0] for p in holds] == [answer]
            position = paragraphs.index(holds[0]) / (len(paragraphs) - 1)
        else:
            assert sample.context.count(answer) == 1
            position = sample.context.index(answer) / (len(sample.context) - len(answer))
        assert position == pytest.approx(depth, abs=0.12)
        assert TASK.score(answer, sample.answers, kind).score == 1


def test_a_multikey_needle_has_other_codes_around_it():
    sample = TASK.generate("0/0", "needle_multikey", 0.5, 500, "x")
    assert len(set(re.findall(r"The access code of \w+ is (\d{5})\.", sample.context))) == 4
    assert re.search(r"code of (\w+)\?", sample.input)[1] + " is " + sample.answers[0] in (
        sample.context
    )


def test_an_embedded_object_is_json_with_the_key():
    sample = TASK.generate("0/0", "kv", 0.5, 500, "x")
    assert json.loads(sample.context)[sample.input] == sample.answers[0]
