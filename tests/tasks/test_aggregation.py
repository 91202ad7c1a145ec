import re
from collections import Counter

import pytest
from evalgate_tasks.aggregation import TASK
from evalgate_tasks.base import ReferenceTextError


@pytest.mark.parametrize(
    ("prediction", "score"),
    [("7", 1), ("There are 7.", 1), ("7 of 12", 1 / 2), ("17", 0), ("seven", 0), ("", 0)],
)
def test_a_count_scores_right_numbers_over_numbers_listed(prediction, score):
    assert TASK.score(prediction, ["7"]).score == score
    assert TASK.score(prediction, ["7"], "count").score == score


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("oakship, Fernroad", 1),
        ("1. oakship 2. ironjar", 1 / 2),
        ("oakships", 0),
        ("", 0),
    ],
)
def test_words_score_the_share_of_references_found(prediction, score):
    assert TASK.score(prediction, ["oakship", "fernroad"]).score == score
    assert TASK.score(prediction, ["oakship", "fernroad"], "frequent_words").score == score


def test_naming_far_more_words_than_asked_is_flagged():
    result = TASK.score("oakship fernroad a b c", ["oakship", "fernroad"])
    assert (result.score, result.flags) == (1, ["over_listing"])
    assert TASK.score("1. oakship 2. fernroad", ["oakship", "fernroad"]).flags == []


def test_a_count_against_words_is_refused_not_scored_zero():
    with pytest.raises(ReferenceTextError, match="is not a number"):
        TASK.score("7", ["oakship"], "count")


@pytest.mark.parametrize("words", [120, 700, 3000])
def test_embedded_answers_are_what_a_recount_of_the_context_gives(words):
    for n in range(8):
        count = TASK.generate(f"3/{n}", "count", 0, words, "x")
        texts = [p.split(": ", 1)[1] for p in count.context.split("\n\n")]
        assert count.answers == [str(len(set(texts)))]
        assert len(set(texts)) < len(texts)

        common = TASK.generate(f"3/{n}", "common_words", 0, words, "x")
        ranked = Counter(re.findall(r"\d+\. (\w+)", common.context)).most_common()
        assert {w for w, _ in ranked[:5]} == set(common.answers)
        assert ranked[4][1] >= 2 * ranked[5][1] or words < 200

        frequent = TASK.generate(f"3/{n}", "frequent_words", 0, words, "x")
        ranked = Counter(frequent.context.split()).most_common()
        assert {w for w, _ in ranked[:3]} == set(frequent.answers)
        assert ranked[2][1] > ranked[3][1]
