import gzip
import json
import textwrap
from pathlib import Path

import evalgate_tasks
import pytest

from evalgate.errors import TaskDataError, UsageError
from evalgate.records import SampleRecord, parse_record
from evalgate.spec import TaskSpec
from evalgate.task_prompts import find_size, tokenize_prompt, truncate_ids, truncate_prompt
from evalgate.tasks import (
    build_items,
    export_task,
    find_task,
    list_tasks,
    score_file,
    score_item,
    show_task,
)

SHARED = Path(__file__).parents[3] / "shared" / "data"
TEMPLATE_TOKENS = 7


class WordTokenizer:
    """Four characters a token at most, words apart; counts its calls, as each is a request."""

    def __init__(self):
        self.pieces, self.calls = [], 0

    def tokenize(self, text):
        self.calls += 1
        pieces = [
            piece
            for word in text.replace("\n", " \n ").split(" ")
            for piece in [word[i : i + 4] for i in range(0, len(word), 4)]
        ]
        start = len(self.pieces)
        self.pieces += pieces
        return list(range(start, len(self.pieces)))

    def detokenize(self, ids):
        self.calls += 1
        return " ".join(self.pieces[i] for i in ids)

    def tokenize_chat(self, messages):
        (message,) = messages
        assert message["role"] == "user"
        return [1] * TEMPLATE_TOKENS + self.tokenize(message["content"])


def build(name, lengths, *, limit=6, max_model_len=None, seed=0, **spec):
    tokenizer = WordTokenizer()
    items = build_items(
        name,
        TaskSpec(limit=limit, **spec),
        tokenizer,
        lengths=lengths,
        max_model_len=max_model_len,
        seed=seed,
    )
    return items, tokenizer


def write_lines(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def longbench_row(number, words=50, **other):
    context = " ".join(f"w{number}x{i}" for i in range(words))
    return {"input": "q?", "context": context, "answers": ["a"], "_id": f"r{number}", **other}


TASKS = ["aggregation", "gov_report", "hotpotqa", "retrieval"]


@pytest.mark.parametrize("name", TASKS)
def test_embedded_prompts_hit_their_ranges_in_turn(name):
    lengths = [(700, 732), (1024, 2048), (2048, 4096)]
    items, tokenizer = build(name, lengths, limit=12)
    assert len(items) == 12
    for i, item in enumerate(items):
        low, high = lengths[i % 3]
        assert low <= item.prompt_tokens < high
        assert item.meta["kind"] in find_task(name).kinds
    assert tokenizer.calls < 5 * len(items)
    assert len({item.sample_id for item in items}) == 12


@pytest.mark.parametrize("name", TASKS)
def test_embedded_prompts_reach_32k_tokens_and_start_at_512(name):
    items, _ = build(name, [(512, 544), (32_000, 32_768)], limit=4)
    assert [item.prompt_tokens // 1000 for item in items] == [0, 32, 0, 32]


def test_the_same_seed_gives_the_same_items_and_another_seed_others():
    first, _ = build("retrieval", [(600, 900)], seed=5)
    again, _ = build("retrieval", [(600, 900)], seed=5)
    other, _ = build("retrieval", [(600, 900)], seed=6)
    assert first == again
    assert {item.user_text for item in first}.isdisjoint(item.user_text for item in other)


def test_kinds_and_depths_are_crossed_with_lengths():
    items, _ = build("retrieval", [(600, 800), (800, 1000)], limit=40)
    for kind in find_task("retrieval").kinds:
        for parity in (0, 1):
            group = [item for item in items[parity::2] if item.meta["kind"] == kind]
            assert sorted(item.meta["depth"] for item in group) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_chat_template_is_applied_once_to_the_stored_text():
    items, _ = build("hotpotqa", [(600, 900)], limit=1)
    assert items[0].prompt_ids[:TEMPLATE_TOKENS] == [1] * TEMPLATE_TOKENS
    assert "\\n" not in items[0].user_text
    assert "\n" in items[0].user_text
    assert items[0].prompt_tokens == len(WordTokenizer().tokenize(items[0].user_text)) + 7


def test_prompt_and_answer_must_fit_the_servers_context():
    items, _ = build("gov_report", [(600, 2000)], max_model_len=1212, limit=4)
    assert all(item.prompt_tokens + 512 <= 1212 for item in items)
    with pytest.raises(UsageError, match=r"from 701 tokens and an answer of 512 make 1213.*1212"):
        build("gov_report", [(701, 2000)], max_model_len=1212)


def test_the_specs_own_lengths_and_budget_win():
    items, _ = build(
        "retrieval", [(100, 200)], limit=4, min_tokens=900, max_prompt_tokens=950, max_tokens=5
    )
    assert all(900 <= item.prompt_tokens <= 950 and item.max_tokens == 5 for item in items)
    with pytest.raises(UsageError, match="no prompt has 900 tokens or more and fewer than 801"):
        build("retrieval", [(100, 200)], min_tokens=900, max_prompt_tokens=800)


def test_a_length_that_no_prompt_can_have_is_refused_with_the_nearest():
    with pytest.raises(TaskDataError, match=r"hotpotqa.*10 to 19 tokens.*the nearest has \d+"):
        build("hotpotqa", [(10, 20)])


@pytest.mark.parametrize(
    ("length", "left"),
    [
        (6, [0, 1, 2, 7, 8, 9]),
        (7, [0, 1, 2, 3, 7, 8, 9]),
        (1, [0]),
        (0, []),
        (10, list(range(10))),
        (12, list(range(10))),
    ],
)
def test_truncation_cuts_the_middle_out(length, left):
    assert truncate_ids(range(10), length) == left


def test_a_truncated_prompt_keeps_both_ends_and_stays_within_its_limit():
    tokenizer = WordTokenizer()
    text = " ".join(f"n{i}" for i in range(500))
    cut = truncate_prompt(tokenizer, tokenize_prompt(tokenizer, text), 107)
    assert len(cut.ids) == 107
    assert cut.text.split()[:50] == [f"n{i}" for i in range(50)]
    assert cut.text.split()[50:] == [f"n{i}" for i in range(450, 500)]
    with pytest.raises(TaskDataError, match="cannot be cut to 7"):
        truncate_prompt(tokenizer, tokenize_prompt(tokenizer, text), TEMPLATE_TOKENS)


def test_find_size_needs_few_steps_when_tokens_jump_and_words_are_dear():
    asked = []

    def build_of(words):
        asked.append(words)
        return words, 40 + 19 * (words // 7)

    built, words = find_size(build_of, low=1000, high=1020, target=1010, guess_words=900)
    assert 1000 <= 40 + 19 * (words // 7) < 1020
    assert built == words
    assert len(asked) <= 6


def test_rows_of_a_file_keep_their_order_and_long_ones_are_cut(tmp_path):
    rows = [longbench_row(i, words) for i, words in enumerate([60, 900, 500])]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    items, _ = build("hotpotqa", [(100, 400)], data=data)
    assert [item.sample_id for item in items] == ["r0", "r1", "r2"]
    assert items[0].meta["truncation"] is None
    assert items[1].prompt_tokens == 399
    truncation = items[1].meta["truncation"]
    assert (truncation["policy"], truncation["kept_tokens"]) == ("middle", 399)
    assert truncation["original_tokens"] > 900
    assert items[1].user_text.endswith("Answ er:")
    assert items[1].references == ["a"]


def test_a_range_takes_the_first_row_that_is_long_enough(tmp_path):
    rows = [longbench_row(i, words) for i, words in enumerate([60, 60, 900])]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    items, _ = build("hotpotqa", [(500, 800), (100, 300)], data=data)
    assert [item.sample_id for item in items] == ["r2", "r0", "r1"]


def test_braces_in_a_context_are_left_alone(tmp_path):
    row = longbench_row(0, context='{"input": {x}} {input} {context}')
    items, _ = build("hotpotqa", [(1, 300)], data=write_lines(tmp_path / "r.jsonl", [row]))
    assert '{"input": {x}} {input} {context}' in items[0].user_text


def test_hotpotqas_own_json_is_read(tmp_path):
    item = {
        "_id": "h1",
        "question": "Where?",
        "answer": "Rome",
        "type": "comparison",
        "context": [["T1", ["A. ", "B."]], ["T2", ["C."]]],
    }
    path = tmp_path / "h.json"
    path.write_text(json.dumps([item]), encoding="utf-8")
    (built,), _ = build("hotpotqa", [(1, 300)], data=str(path))
    assert "Passage 1:\nT1\nA. B.\n\nPassage 2:\nT2\nC." in built.user_text
    assert (built.references, built.meta["kind"]) == (["Rome"], "comparison")


def test_gzipped_key_value_records_are_read(tmp_path):
    row = {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]], "key": "k2"}
    path = tmp_path / "kv.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps({**row, "value": "v2"}) + "\n").encode()))
    (item,), _ = build("retrieval", [(1, 300)], data=str(path))
    assert '{"k1": "v1",\n "k2": "v2",\n "k3": "v3"}' in item.user_text
    assert (item.references, item.meta["kind"], item.meta["depth"]) == (["v2"], "kv", 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no item"),
        ('{"input": "q"', r"line 1: not JSON"),
        ("\n7\n", r"line 2: a int, not a JSON object"),
        (json.dumps({"input": "q", "context": "c", "answers": ["a"]}), r"line 1: '_id' is missing"),
        (json.dumps(longbench_row(0, answers=[])), r"line 1: answers is \[\]: a reference is miss"),
        (json.dumps(longbench_row(0, answers="a")), r"line 1: answers is 'a': give a list"),
        (json.dumps(longbench_row(0, answers=["a", " "])), r"a reference is missing or blank"),
        (json.dumps(longbench_row(0, kind="bridg")), r"line 1: kind 'bridg' is unknown"),
        (json.dumps(longbench_row(0, depth="x")), r"line 1: depth is 'x'"),
        ("\n".join([json.dumps(longbench_row(4))] * 2), r"line 2: id 'r4' stands already at .*1"),
        ('{"ordered_kv_records": [], "key": "k", "value": "v"}', r"only be used by .* retrieval"),
        ('[{"_id": "x", "question": "q", "answer": "a"}]', r"item 1: context is None"),
        ("[1]", r"item 1: a int"),
        ("[", r"not JSON"),
    ],
)
def test_bad_data_is_refused_naming_file_and_line(tmp_path, text, message):
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TaskDataError, match=message) as caught:
        build("hotpotqa", [(1, 300)], data=str(path))
    assert "data.jsonl" in str(caught.value)


def test_an_unreadable_file_is_refused(tmp_path):
    with pytest.raises(TaskDataError, match="no such file"):
        build("hotpotqa", [(1, 300)], data=str(tmp_path / "none.jsonl"))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskDataError, match="not UTF-8"):
        build("hotpotqa", [(1, 300)], data=str(tmp_path / "b.jsonl"))
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(TaskDataError, match="cannot be read"):
        build("hotpotqa", [(1, 300)], data=str(tmp_path / "z.jsonl.gz"))


def test_the_public_sets_without_the_library_name_the_extra_and_the_file(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(TaskDataError, match=r"evalgate\[hub\].*passage_retrieval_en\.jsonl"):
        build("retrieval", [(1, 300)], data="hub")


def test_the_public_sets_without_a_network_name_the_file_to_put_in_place(monkeypatch):
    class Offline:
        @staticmethod
        def load_dataset(*args, **kwargs):
            raise ConnectionError("no route\nto host")

    monkeypatch.setitem(__import__("sys").modules, "datasets", Offline)
    with pytest.raises(TaskDataError, match=r"cannot be reached \(no route\).*gov_report\.jsonl"):
        build("gov_report", [(1, 300)], data="hub")


def test_the_public_sets_are_read_as_longbench_rows(monkeypatch):
    class Hub:
        @staticmethod
        def load_dataset(kind, data_files, split):
            assert kind == "json"
            assert "passage_count.jsonl" in data_files[split]
            return [longbench_row(1, answers=["7"])]

    monkeypatch.setitem(__import__("sys").modules, "datasets", Hub)
    (item,), _ = build("aggregation", [(1, 300)], data="hub")
    assert (item.references, item.meta["kind"], item.meta["source"]) == (["7"], "count", "hub")


def test_an_unknown_task_is_refused_with_the_nearest_name():
    with pytest.raises(TaskDataError, match="'retrival' is unknown, did you mean 'retrieval'"):
        find_task("retrival")


def answer_one(output, finish_reason="stop", name="hotpotqa", references=None):
    (item,), _ = build(name, [(600, 900)], limit=1)
    item = item if references is None else type(item)(**{**vars(item), "references": references})
    return item, score_item(item, output, finish_reason)


def test_an_answer_is_scored_with_its_flags_and_figures():
    _, scored = answer_one("<think>so</think>\nRome ", "length", references=["Rome"])
    assert (scored.prediction, scored.score, scored.error) == ("Rome", 1.0, None)
    assert scored.flags == ["truncated"]
    assert scored.extra == {"exact_match": 1.0, "hotpotqa_f1": 1.0}


@pytest.mark.parametrize(
    ("output", "flags"),
    [("", ["empty"]), (" \n", ["empty"]), ("<think>Maybe Rome", ["empty", "unclosed_thinking"])],
)
@pytest.mark.parametrize("name", TASKS)
def test_no_answer_is_zero_and_flagged(name, output, flags):
    _, scored = answer_one(output, name=name)
    assert (scored.prediction, scored.score, scored.flags) == ("", 0.0, flags)


def test_a_failure_of_ours_is_an_error_and_no_zero():
    _, scored = answer_one("Rome", references=[])
    assert scored.score is None
    assert scored.error.category == "scoring"
    assert "references are empty" in scored.error.message


def test_a_scored_item_makes_a_record_that_can_be_stored():
    item, scored = answer_one("Rome")
    record = {
        "arm": "baseline",
        "block": 0,
        "task": item.task,
        "task_version": item.task_version,
        "sample_id": item.sample_id,
        "prompt_sha256": item.prompt_sha256,
        "prompt_tokens": item.prompt_tokens,
        "output_text": "Rome",
        "output_tokens": 1,
        "finish_reason": "stop",
        "prediction": scored.prediction,
        "references": item.references,
        "score": scored.score,
        "flags": scored.flags,
        "error": scored.error,
        "extra": {"scoring": item.scoring, **item.meta, **scored.extra},
    }
    json.dumps(record, allow_nan=False)
    assert parse_record(SampleRecord, record, "samples.jsonl").task == "hotpotqa"


def test_a_file_of_predictions_is_scored_in_the_fixed_shape(tmp_path):
    path = tmp_path / "p.jsonl"
    write_lines(
        path,
        [
            {"id": "a", "prediction": "Paragraph 19", "references": ["Paragraph 19"]},
            {"id": "b", "prediction": "48213", "references": ["48213", "1"], "kind": "needle"},
            {"id": 3, "prediction": "", "references": ["v"], "kind": "kv"},
        ],
    )
    assert score_file("retrieval", path) == {
        "task": "retrieval",
        "task_version": 1,
        "scoring": find_task("retrieval").scoring,
        "n": 3,
        "mean": 0.5,
        "items": [
            {"id": "a", "score": 1.0, "flags": []},
            {"id": "b", "score": 0.5, "flags": []},
            {"id": 3, "score": 0.0, "flags": ["empty"]},
        ],
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "a", "prediction": "x", "references": ["r"], "knd": "kv"}, "'knd', did you mean"),
        ({"id": "a", "prediction": "x", "refs": ["r"]}, "unknown key 'refs'"),
        ({"id": "a", "prediction": "x"}, "key 'references' is missing"),
        ({"id": "a", "prediction": None, "references": ["r"]}, "prediction is None"),
        ({"id": "a", "prediction": "x", "references": "r"}, "references is 'r': give a list"),
        ({"id": "a", "prediction": "x", "references": []}, "a reference is missing"),
        ({"id": True, "prediction": "x", "references": ["r"]}, "id is True"),
        ({"id": "a", "prediction": "x", "references": ["r"], "kind": 3}, "kind is 3"),
        ({"id": "a", "prediction": "x", "references": ["r"], "kind": "kw"}, "'kw' is unknown"),
        ({"id": "a", "prediction": "x", "references": ["r"]}, "names no paragraph"),
    ],
)
def test_a_bad_line_of_predictions_is_refused_naming_file_and_line(tmp_path, row, message):
    good = {"id": "g", "prediction": "1", "references": ["1"]}
    path = tmp_path / "p.jsonl"
    write_lines(path, [good, row])
    with pytest.raises(TaskDataError, match=message) as caught:
        score_file("retrieval", path)
    assert "p.jsonl, line 2" in str(caught.value)


def test_exported_samples_can_be_read_back(tmp_path):
    for name in TASKS:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(export_task(name, 6, 3)), encoding="utf-8")
        items, _ = build(name, [(1, 20_000)], data=str(path))
        assert len(items) == 6
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [item.references for item in items] == [row["answers"] for row in rows]
        assert [item.meta["kind"] for item in items] == [row["kind"] for row in rows]
    assert export_task("retrieval", 2, 3) == export_task("retrieval", 2, 3)


def test_every_task_is_listed_and_shown():
    lines = list_tasks()
    assert [line.split()[0] for line in lines] == TASKS
    for name in TASKS:
        text = show_task(name)
        assert find_task(name).scoring in text
        assert "references: [" in text


def test_adding_a_task_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "shout_task.py").write_text(
        textwrap.dedent('''
            """shout: repeat a word in capitals."""
            from evalgate_tasks.base import Sample, Score, Task
            from evalgate_tasks.corpus import Corpus
            import random

            class Shout(Task):
                """A task that a test adds."""

                name, version, scoring, max_tokens = "shout", 1, "same_capitals", 8
                templates = {"word": "{context}\\nShout the word {input}:"}

                def score(self, prediction, references, kind=None):
                    self.check_references(references, kind)
                    return Score(float(prediction in references))

                def generate(self, seed, kind, depth, words, sample_id):
                    corpus = Corpus(random.Random(seed))
                    town = corpus.town()
                    return Sample(town, corpus.prose(words), [town.upper()], sample_id, kind)

            TASK = Shout()
            '''),
        encoding="utf-8",
    )
    monkeypatch.setattr(evalgate_tasks, "__path__", [*evalgate_tasks.__path__, str(tmp_path)])
    items, _ = build("shout", [(300, 400)], limit=3)
    scored = [score_item(item, item.references[0], "stop").score for item in items]
    assert scored == [1, 1, 1]
    assert any(line.startswith("shout ") for line in list_tasks())
    with pytest.raises(TaskDataError, match="shout has no public set"):
        build("shout", [(300, 400)], data="hub")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data beside the checkout")
def test_real_files_of_both_foreign_shapes_are_read():
    items, _ = build("hotpotqa", [(1, 4000)], limit=100, data=str(SHARED / "hotpotqa_100.json"))
    assert len({item.sample_id for item in items}) == 100
    path = str(SHARED / "kv_retrieval_75_keys.jsonl.gz")
    items, _ = build("retrieval", [(1, 20_000)], limit=20, data=path)
    for item in items:
        assert item.references[0] in item.user_text
        assert score_item(item, item.references[0], "stop").score == 1
