import pytest
from evalgate_tasks.flags import find_flags, has_repetition, has_script_change

LOOP = "the river runs to the sea and back again to the hills "
PROSE = (
    "The council met in March and agreed to mend the road along the river. Most families kept a "
    "garden and sold barley on market days. In 1913 a hard winter closed the pass for 26 days, "
    "and the ferry was late. A letter praises the bread of the town and complains of its bells."
)


@pytest.mark.parametrize(
    "text",
    [
        "Paris " * 32,
        LOOP * 5,
        PROSE + " " + LOOP * 12,
        "!" * 200,
        "ab" * 60,
        "北京" * 20,
        "\n".join(f"{i}. The answer is the river and nothing else" for i in range(40)),
    ],
)
def test_a_loop_is_flagged(text):
    assert has_repetition(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris",
        "no, no, no, no",
        PROSE,
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |",
        "\n".join(f"{i}. town number {i * 7}" for i in range(10)),
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14",
        "Paragraph 1, Paragraph 2, Paragraph 3, Paragraph 4, Paragraph 5, Paragraph 6",
    ],
)
def test_prose_tables_and_lists_are_no_loop(text):
    assert not has_repetition(text)


def test_a_loop_of_two_repeats_is_not_enough():
    assert not has_repetition(LOOP * 2)
    assert has_repetition(LOOP * 3)


@pytest.mark.parametrize(
    ("text", "references", "changed"),
    [
        ("Paris", ["Paris"], False),
        ("это не ответ", ["Paris"], True),
        ("Paris 北", ["Paris"], False),
        ("Paris 北京上海广州深", ["Paris"], True),
        ("ひらがな カタカナ", ["東京"], False),
        ("Tokyo is it", ["東京"], True),
        ("12345 67890", ["東京"], False),
        ("Париж", ["Paris", "Париж"], False),
        ("anything", ["1234"], False),  # no letters to compare with
    ],
)
def test_an_output_in_a_script_of_no_reference_is_flagged(text, references, changed):
    assert has_script_change(text, references) is changed


def test_a_finish_by_length_is_truncated():
    assert find_flags("Par", ["Paris"], "length") == ["truncated"]
    assert find_flags("Paris", ["Paris"], "stop") == []
    assert find_flags("Paris", ["Paris"], None) == []
