import json
import random
import re
from pathlib import Path

import pytest
from evalgate_tasks.gov_report import TASK
from evalgate_tasks.rouge import BitRougeScorer, count_lcs, count_summary_hits
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("wanted", "got", "length"),
    [
        ("abcd", "bd", 2),
        ("abcbdab", "bdcaba", 4),
        ("aaa", "aa", 2),
        ("abc", "xyz", 0),
        ("", "a", 0),
    ],
)
def test_the_longest_common_subsequence_is_counted(wanted, got, length):
    assert count_lcs(list(wanted), list(got)) == length


def test_the_papers_example_of_a_union_of_subsequences():
    # ROUGE (Lin, 2004), 3.2: w1 w2 of the one and w1 w3 w5 of the other make w1 w2 w3 w5.
    wanted = [["w1", "w2", "w3", "w4", "w5"]]
    got = [["w1", "w2", "w6", "w7", "w8"], ["w1", "w3", "w8", "w9", "w5"]]
    assert count_summary_hits(wanted, got) == 4


@pytest.mark.parametrize("seed", range(30))
def test_figures_equal_those_of_the_package_on_random_lines(seed):
    rng = random.Random(seed)

    def text():
        lines = [" ".join(rng.choices("abcdefgh", k=rng.randint(0, 9))) for _ in range(5)]
        return "\n".join(lines[: rng.randint(1, 5)])

    package = RougeScorer(["rougeL", "rougeLsum"], use_stemmer=False)
    ours = BitRougeScorer(DefaultTokenizer(use_stemmer=False))
    for _ in range(20):
        target, prediction = text(), text()
        assert ours.score(target, prediction) == package.score(target, prediction)


def own_rouge_l(prediction, reference):
    """F-measure of the longest common subsequence of [a-z0-9]+ words."""
    got, want = (re.findall("[a-z0-9]+", t.lower()) for t in (prediction, reference))
    lengths = [0] * (len(want) + 1)
    for word in got:
        diagonal = 0
        for j, other in enumerate(want, 1):
            above = lengths[j]
            lengths[j] = diagonal + 1 if word == other else max(above, lengths[j - 1])
            diagonal = above
    common = lengths[-1]
    return 2 * common / (len(got) + len(want)) if common else 0.0


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data beside the checkout")
def test_scores_agree_with_an_independent_rouge_on_real_reports():
    package = RougeScorer(["rougeLsum"], use_stemmer=False)
    lines = (SHARED / "longbench_gov_report_sample.jsonl").read_text(encoding="utf-8").splitlines()
    rng = random.Random(3)
    for row in map(json.loads, lines):
        reference = row["answers"][0]
        sentences = reference.encode("ascii", "ignore").decode().split(". ")[:8]
        plain = "\n".join(sentences)
        for prediction in (row["prompt"][:800], "\n".join(rng.sample(sentences, len(sentences)))):
            prediction = prediction.encode("ascii", "ignore").decode()
            result = TASK.score(prediction, [plain])
            assert result.score == pytest.approx(own_rouge_l(prediction, plain))
            assert result.extra["rougeLsum"] == pytest.approx(
                package.score(plain, prediction)["rougeLsum"].fmeasure
            )
            assert 0.05 < result.score < 0.95
        assert TASK.score(reference, [reference]).score == 1
