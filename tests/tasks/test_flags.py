import pytest
from evalgate_tasks.flags import find_flags, find_language, has_repetition, has_script_change

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


PROSES = {
    "English": PROSE,
    "French": (
        "Le conseil s'est réuni en mars et a décidé de réparer la route qui longe la rivière. La "
        "plupart des familles avaient un petit jardin, et les paysans vendaient de l'orge dans "
        "les rues de la ville pour une somme modeste."
    ),
    "German": (
        "Der Rat trat im März zusammen und beschloss, die Straße am Fluss auszubessern. Die "
        "meisten Familien hatten einen Garten und verkauften Gerste auf dem Markt, und das war "
        "nicht wenig."
    ),
    "Spanish": (
        "El consejo se reunió en marzo y decidió reparar el camino que sigue el río. La mayoría "
        "de las familias tenía un huerto y vendía cebada los días de mercado por una suma "
        "modesta."
    ),
    "Italian": (
        "Il consiglio si riunì in marzo e decise di riparare la strada che segue il fiume. Le "
        "famiglie della valle avevano un orto e non vendevano che orzo nei giorni di mercato, per "
        "una somma modesta."
    ),
    "Portuguese": (
        "O conselho reuniu-se em março e decidiu reparar a estrada que segue o rio. Os moradores "
        "da vila tinham uma horta e vendiam cevada em dias de feira, o que não era pouco para o "
        "povo do vale."
    ),
    "Dutch": (
        "De raad kwam in maart bijeen en besloot de weg langs de rivier te herstellen. De meeste "
        "gezinnen hadden een tuin en verkochten gerst op de markt, en dat was niet weinig voor "
        "een dorp."
    ),
}


@pytest.mark.parametrize("language", PROSES)
def test_prose_in_another_language_than_the_references_is_flagged(language):
    text = PROSES[language]
    assert find_language(text) == language
    expected = [] if language == "English" else ["language_change"]
    assert find_flags(text, [PROSE], "stop") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "La mairie de Paris",  # too short to tell
        "Arden Belford Calderbrook Dunmere Elderfell " * 5,  # names
        "12 of 40 " * 10,
    ],
)
def test_what_has_no_language_is_not_flagged(text):
    assert find_language(text) is None
    assert "language_change" not in find_flags(text, [PROSE], "stop")


def test_an_answer_in_prose_to_a_reference_of_one_word_is_not_flagged():
    assert find_flags(PROSES["French"], ["Paris"], "stop") == []


def test_another_script_is_a_script_change_alone():
    russian = "Совет собрался в марте и решил починить дорогу вдоль реки. " * 2
    assert find_flags(russian, [PROSE], "stop") == ["script_change"]


def test_a_finish_by_length_is_truncated():
    assert find_flags("Par", ["Paris"], "length") == ["truncated"]
    assert find_flags("Paris", ["Paris"], "stop") == []
    assert find_flags("Paris", ["Paris"], None) == []
