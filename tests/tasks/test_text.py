import pytest
from evalgate_tasks.text import (
    contains_whole,
    normalize_answer,
    normalize_exact,
    split_words,
    strip_thinking,
)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  City of Light.", "city of light"),
        ("An apple, a day", "apple day"),
        ("1,000", "1000"),
        ("3.14", "314"),
        ("The The", ""),
        ("theatre", "theatre"),
        ("«naïve» — ok", "«naïve» — ok"),  # only ASCII punctuation goes
    ],
)
def test_an_answer_is_normalised_as_longbench_does(text, normal):
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("3.14", "3.14"),
        ("1,000.", "1000"),
        ("10:30 a.m.", "10:30 am"),
        ("-5 degrees", "-5 degrees"),
        ("well-known", "wellknown"),
        ("U.S.", "us"),
    ],
)
def test_marks_that_make_another_number_survive_the_exact_form(text, normal):
    assert normalize_exact(text) == normal


@pytest.mark.parametrize(
    ("text", "left", "closed"),
    [
        ("<think>Maybe Paris? no</think>\nRome", "\nRome", True),
        ("<think>Maybe Rome", "", False),
        ("Rome <think>or", "", False),
        ("It is Paris</think>\nRome", "\nRome", True),  # the template opened the block
        ("<think>a</think>b<think>c</think>d", "bd", True),
        ("<think>a<think>b</think>c</think>Rome", "Rome", True),
        ("<THINK>x</Think>Rome", "Rome", True),
        ("<think></think>", "", True),
        ("I think so", "I think so", True),
    ],
)
def test_thinking_is_stripped_and_an_unclosed_block_leaves_nothing(text, left, closed):
    assert strip_thinking(text) == (left, closed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop_now: 3.14!", ["don", "t", "stop", "now", "3", "14"]),
        ("Café crème", ["café", "crème"]),
        ("cafe\u0301", ["café"]),  # composed and decomposed are one
        ("東京は2020年", ["東", "京", "は", "2020", "年"]),
        ("تقرير الوكالة، 2020", ["تقرير", "الوكالة", "2020"]),
        ("किताब की", ["किताब", "की"]),  # marks stay with their letters
        ("กิน", ["กิ", "น"]),
        ("— !!", []),
    ],
)
def test_words_of_any_script_are_found(text, words):
    assert split_words(text) == words


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [
        ("The code is 1234.", "1234", True),
        ("12345", "1234", False),
        ("ID: AB-CD", "ab-cd", True),
        ("答案是北京市", "北京", True),
        ("price 5+", "5+", True),
    ],
)
def test_a_reference_must_stand_whole(text, wanted, found):
    assert contains_whole(text, wanted) is found
