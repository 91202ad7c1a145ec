"""The two shipped specs of task scores: what they would send, and that their policies can judge."""

import gzip
import importlib.resources
import json
from collections import Counter

import pytest

from evalgate.policy import parse_policy
from evalgate.spec import parse_spec
from evalgate.tasks import build_items

CONTEXT = 8192


class PieceTokenizer:
    """Tokens of up to five characters, whose ids say nothing: only lengths matter here."""

    def tokenize(self, text):
        return [0] * sum(-(-len(word) // 5) for word in text.split())

    def detokenize(self, ids):
        raise AssertionError("no prompt of these specs is cut")

    def tokenize_chat(self, messages):
        return [0] * 30 + self.tokenize(messages[0]["content"])


def load(name):
    text = importlib.resources.files("evalgate_specs").joinpath(name).read_text(encoding="utf-8")
    return parse_spec(text, name)


def build(spec, task):
    return build_items(
        task,
        spec.tasks[task],
        PieceTokenizer(),
        lengths=[(b.min_tokens, b.max_tokens) for b in spec.load.buckets],
        max_model_len=CONTEXT,
        seed=spec.schedule.seed,
    )


@pytest.mark.parametrize("name", ["cpu_task_table.toml", "cpu_task_files.toml"])
def test_the_arms_differ_by_the_patch_alone(name):
    spec = load(name)
    baseline, candidate = spec.arms["baseline"], spec.arms["candidate"]
    assert candidate.model_copy(update={"patch": None}) == baseline
    assert candidate.patch == "int8_kv"
    assert baseline.args[baseline.args.index("--max-model-len") + 1] == str(CONTEXT)
    policy = parse_policy(spec.policy, name)
    assert {rule.metric for rule in policy.rules} >= {"score", "top1_agreement"}


@pytest.mark.parametrize(
    ("task", "each", "max_tokens"),
    [("hotpotqa", 5, 32), ("retrieval", 5, 64), ("aggregation", 3, 64), ("gov_report", 2, 64)],
)
def test_the_table_has_as_many_samples_of_each_length(task, each, max_tokens):
    spec = load("cpu_task_table.toml")
    items = build(spec, task)
    lengths = Counter(b.name for i in items for b in spec.load.buckets if b.holds(i.prompt_tokens))
    assert lengths == {"1K": each, "2K": each, "4K": each}
    assert {item.max_tokens for item in items} == {max_tokens}


def test_fidelity_of_the_table_takes_load_prompts_of_every_length():
    spec = load("cpu_task_table.toml")
    assert spec.fidelity.samples == sum(bucket.prompts for bucket in spec.load.buckets)


def test_files_are_looked_for_where_evalgate_is_started(tmp_path, monkeypatch):
    spec = load("cpu_task_files.toml")
    words = " ".join(f"w{i}" for i in range(600))
    question = {"_id": "h", "question": "Where?", "answer": "Rome", "context": [["T", [words]]]}
    pairs = [[f"{i:036d}", f"{i + 900:036d}"] for i in range(300)]
    record = {"ordered_kv_records": pairs, "key": pairs[7][0], "value": pairs[7][1]}
    (tmp_path / spec.tasks["hotpotqa"].data).write_text(json.dumps([question]), encoding="utf-8")
    packed = gzip.compress(json.dumps(record).encode())
    (tmp_path / spec.tasks["retrieval"].data).write_bytes(packed)
    monkeypatch.chdir(tmp_path)
    (asked,) = build(spec, "hotpotqa")
    (looked_up,) = build(spec, "retrieval")
    assert (asked.references, looked_up.references) == (["Rome"], [pairs[7][1]])
    assert asked.meta["truncation"] is None
    assert looked_up.meta["kind"] == "kv"
