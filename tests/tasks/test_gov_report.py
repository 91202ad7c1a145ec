import re

import pytest
from evalgate_tasks.gov_report import TASK


def test_rouge_l_gates_and_rouge_lsum_is_another_figure():
    result = TASK.score("c d\na b", ["a b\nc d"])
    assert result.score == 0.5
    assert result.extra == {"rougeL": 0.5, "rougeLsum": 1.0, "use_stemmer": False}
    assert "rougeL_" in TASK.scoring
    assert "nostem" in TASK.scoring


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("a b c", ["a b c"], 1),
        ("a b", ["a b c d"], 2 / 3),  # precision 1, recall 1/2
        ("a b c d", ["b d"], 2 / 3),
        ("x", ["a", "x y"], 2 / 3),  # the better of two references
        ("tests", ["test"], 0),  # no stemmer
        ("x", ["a"], 0),
        ("", ["a"], 0),
    ],
)
def test_rouge_l_by_hand(prediction, references, score):
    assert TASK.score(prediction, references).score == pytest.approx(score)


@pytest.mark.parametrize(
    "text",
    [
        "报告称该机构完成了工作。",
        "أنهت الوكالة العمل",
        "रिपोर्ट पूरी",
        "รายงานเสร็จ",
        "Ünïcödé",
        "!?!",
        "🙂",
    ],
)
def test_an_identical_text_of_any_script_is_one(text):
    result = TASK.score(text, [text])
    assert result.score == 1
    assert result.extra["rougeLsum"] == 1


def test_different_chinese_texts_are_compared_by_character():
    # 2 of 4 characters in order: precision and recall 1/2.
    assert TASK.score("北京很大", ["北京下雨"]).score == pytest.approx(0.5)


def test_the_facts_of_an_embedded_summary_stand_in_its_report():
    for n in range(10):
        sample = TASK.generate(f"1/{n}", "report", 0, 900, "x")
        names = set(re.findall(r"\d+|[A-Z][a-z]+ of [A-Z][a-z]+ [A-Z][a-z]+", sample.answers[0]))
        assert len(names) > 8
        assert all(name in sample.context for name in names)
        assert TASK.score(sample.context, sample.answers).score < 0.5
