"""Prompts per bucket and the schedule of pairs."""

from __future__ import annotations

from collections import Counter

import pytest

from evalgate.errors import UsageError
from evalgate.load import (
    LoadPrompt,
    build_prompts,
    check_context,
    compute_cache_salt,
    compute_nonce,
    compute_target_slices,
    plan_pairs,
    select_warmup,
)
from evalgate.sizing import UsageTokenizer
from evalgate.spec import BucketSpec, build_spec


class ByteTokenizer:
    """A token is a byte."""

    def tokenize(self, text):
        return list(text.encode())

    def detokenize(self, ids):
        return bytes(ids).decode(errors="replace")

    def tokenize_chat(self, messages):
        return list("".join(m["content"] for m in messages).encode())


def make_spec(prompts=3):
    return build_spec(
        {
            "name": "s",
            "model": {"name": "m"},
            "arms": {"baseline": {"base_url": "http://127.0.0.1:1"}},
            "load": {
                "output_tokens": 8,
                "buckets": [
                    {"name": "a", "min_tokens": 1200, "max_tokens": 2000, "prompts": prompts},
                    {"name": "b", "min_tokens": 2000, "max_tokens": 4000, "prompts": prompts},
                ],
            },
        },
        "s",
    )


def test_many_prompts_in_a_narrow_bucket_keep_slices_that_text_can_hit():
    slices = compute_target_slices(BucketSpec(name="b", min_tokens=520, max_tokens=680, prompts=50))
    assert all(520 <= lo < hi <= 680 for lo, hi in slices)
    assert {hi - lo for lo, hi in slices} == {32}
    assert slices[0] == (520, 552)  # around 521.6, moved to the bucket's edge
    assert slices[25] == (585, 617)  # around 601.6


def test_target_slices_spread_over_the_bucket_and_stay_inside():
    bucket = BucketSpec(name="b", min_tokens=4096, max_tokens=8192, prompts=4)
    slices = compute_target_slices(bucket)
    assert [(lo + hi) // 2 for lo, hi in slices] == [4608, 5632, 6656, 7680]
    assert all(4096 <= lo < hi <= 8192 for lo, hi in slices)


def test_a_bucket_of_one_token_still_has_a_slice():
    bucket = BucketSpec(name="b", min_tokens=7, max_tokens=8, prompts=2)
    assert all(lo < hi for lo, hi in compute_target_slices(bucket))


def test_prompts_lie_in_their_buckets_and_are_the_same_each_time():
    first = build_prompts(make_spec(), ByteTokenizer(), 8192)
    again = build_prompts(make_spec(), ByteTokenizer(), 8192)
    assert [p.item.prompt_ids for p in first] == [p.item.prompt_ids for p in again]
    assert len({tuple(p.item.prompt_ids) for p in first}) == 6
    for prompt in first:
        low, high = {"a": (1200, 2000), "b": (2000, 4000)}[prompt.bucket]
        assert low <= prompt.prompt_tokens < high


def test_a_context_that_is_too_short_is_refused_with_the_sum():
    check_context("x", 4000, 96, 4096)
    with pytest.raises(UsageError, match="4097, the server's context is 4096"):
        check_context("x", 4000, 97, 4096)


def test_every_prompt_and_repetition_is_planned_once_and_each_arm_leads_half_of_them():
    prompts = build_prompts(make_spec(prompts=2), ByteTokenizer(), None)
    pairs = plan_pairs(prompts, ["x", "y"], repetitions=3, seed=1, block=0)
    assert len({(p.prompt.prompt_id, p.repetition) for p in pairs}) == len(pairs) == 12
    assert Counter(p.arms[0] for p in pairs) == {"x": 6, "y": 6}


def test_the_leading_arm_and_the_order_change_from_block_to_block():
    prompts = build_prompts(make_spec(), ByteTokenizer(), None)
    blocks = [plan_pairs(prompts, ["x", "y"], repetitions=1, seed=1, block=b) for b in (0, 1)]
    assert blocks[0][0].arms != blocks[1][0].arms
    assert [p.prompt for p in blocks[0]] != [p.prompt for p in blocks[1]]


def test_warm_up_takes_the_shortest_of_each_bucket_in_turn():
    prompts: list[LoadPrompt] = build_prompts(make_spec(), ByteTokenizer(), None)
    chosen = select_warmup(prompts, 3)
    assert [p.bucket for p in chosen] == ["a", "b", "a"]
    assert chosen[0].prompt_tokens == min(p.prompt_tokens for p in prompts)
    assert select_warmup(prompts, 0) == []


def test_salts_are_short_plain_and_all_different():
    salts = {compute_cache_salt("r", a, b, c) for a in "xy" for b in (0, 1) for c in "vw"}
    assert len(salts) == 8
    assert all(salt.isalnum() and len(salt) <= 128 for salt in salts)


def test_nonces_have_one_shape_and_differ():
    first, second = compute_nonce("a"), compute_nonce("b")
    assert first != second
    assert [len(group) for group in first.split()] == [3, 3, 3, 3]


def test_usage_counts_size_prompts_where_there_is_no_tokenize():
    asked = []

    def count(messages):
        asked.append(messages)
        return 321

    assert len(UsageTokenizer(count).tokenize_chat([{"role": "user", "content": "hello"}])) == 321
    assert len(asked) == 1


def test_an_estimate_counts_about_a_token_for_four_letters():
    ids = UsageTokenizer().tokenize_chat([{"role": "user", "content": "word " * 100}])
    assert 100 <= len(ids) <= 130


def test_pieces_put_together_are_the_text_again():
    tokenizer = UsageTokenizer()
    text = "A report, in\ntwo lines."
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
