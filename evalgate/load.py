"""What is sent, and in which order: load prompts for each bucket and the schedule of pairs.

Prompts are real task text (reports to summarise), so that answers have natural ends; sizes are the
server's own count. Knows neither how a request is sent nor how it is judged.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from evalgate.errors import UsageError
from evalgate.spec import BucketSpec, Spec, TaskSpec
from evalgate.tasks import Item, Tokenizer, build_items

LOAD_TASK = "gov_report"
MIN_SLICE_TOKENS = 32  # a prompt is aimed at a slice this wide, or wider in wide buckets
WARMUP_SALT = "warmup"


@dataclass(frozen=True)
class LoadPrompt:
    prompt_id: str
    bucket: str
    item: Item

    @property
    def prompt_tokens(self) -> int:
        return self.item.prompt_tokens


@dataclass(frozen=True)
class PlannedPair:
    """One (prompt, repetition) and the order in which the arms are asked."""

    prompt: LoadPrompt
    repetition: int
    arms: tuple[str, ...]


def compute_target_slices(bucket: BucketSpec) -> list[tuple[int, int]]:
    """[min, max) token ranges inside the bucket, one for each prompt, evenly spread.

    Each lies in the middle of its share of the bucket, so that a few prompts still cover it; many
    prompts in a narrow bucket have slices that overlap, as text grows by whole sentences.
    """
    share = (bucket.max_tokens - bucket.min_tokens) / bucket.prompts
    width = int(min(max(MIN_SLICE_TOKENS, share / 8), bucket.max_tokens - bucket.min_tokens))
    slices = []
    for i in range(bucket.prompts):
        middle = bucket.min_tokens + share * (i + 0.5)
        low = max(bucket.min_tokens, min(int(middle - width / 2), bucket.max_tokens - width))
        slices.append((low, low + width))
    return slices


def build_prompts(spec: Spec, tokenizer: Tokenizer, max_model_len: int | None) -> list[LoadPrompt]:
    """Prompts of every bucket, in the spec's order; the same spec gives the same prompts.

    Raises UsageError when prompt and answer would not fit the server's context.
    """
    prompts: list[LoadPrompt] = []
    source = spec.tasks.get(LOAD_TASK)
    for number, bucket in enumerate(spec.load.buckets):
        check_context(bucket.name, bucket.max_tokens - 1, spec.load.output_tokens, max_model_len)
        items = build_items(
            LOAD_TASK,
            TaskSpec(
                limit=bucket.prompts,
                max_tokens=spec.load.output_tokens,
                data=source.data if source else None,
            ),
            tokenizer,
            lengths=compute_target_slices(bucket),
            max_model_len=max_model_len,
            seed=spec.schedule.seed * 1000 + number + 1,
        )
        prompts += [
            LoadPrompt(prompt_id=f"{bucket.name}/{i}", bucket=bucket.name, item=item)
            for i, item in enumerate(items)
        ]
    return prompts


def check_context(
    what: str, prompt_tokens: int, output_tokens: int, max_model_len: int | None
) -> None:
    """Raise UsageError when a prompt of this size plus its answer overruns the server's context."""
    if max_model_len is not None and prompt_tokens + output_tokens > max_model_len:
        raise UsageError(
            f"{what}: {prompt_tokens} prompt tokens and {output_tokens} output tokens make "
            f"{prompt_tokens + output_tokens}, the server's context is {max_model_len}: lower "
            "max_tokens or output_tokens, or serve with a larger --max-model-len"
        )


def plan_pairs(
    prompts: Sequence[LoadPrompt], arms: Sequence[str], *, repetitions: int, seed: int, block: int
) -> list[PlannedPair]:
    """Every (prompt, repetition) once, shuffled by seed and block, arms in ABBA order.

    The first arm changes from pair to pair and from block to block, so that neither a slow drift
    nor the first place favours an arm.
    """
    todo = [(prompt, repetition) for prompt in prompts for repetition in range(repetitions)]
    random.Random(f"{seed}/{block}").shuffle(todo)
    forward, backward = tuple(arms), tuple(reversed(arms))
    return [
        PlannedPair(prompt, repetition, forward if (i + block) % 2 == 0 else backward)
        for i, (prompt, repetition) in enumerate(todo)
    ]


def select_warmup(prompts: Sequence[LoadPrompt], count: int) -> list[LoadPrompt]:
    """Warm-up prompts: the shortest of each bucket in turn, shortest bucket first."""
    shortest: dict[str, LoadPrompt] = {}
    for prompt in sorted(prompts, key=lambda p: p.prompt_tokens):
        shortest.setdefault(prompt.bucket, prompt)
    cycle = list(shortest.values())
    return [cycle[i % len(cycle)] for i in range(count)]


def compute_cache_salt(run_id: str, arm: str, block: int, what: str) -> str:
    """A salt of its own for each arm, block and request, so that nothing is served from cache.

    Not even the instruction that all prompts begin with. A digest, as vLLM takes no separators and
    no long names.
    """
    return hashlib.sha256(f"{run_id}/{arm}/{block}/{what}".encode()).hexdigest()[:32]


def compute_nonce(salt: str) -> str:
    """Digits for the front of a prompt, where a server takes no salt: always twelve in groups of
    three, so that every arm's prompt has the same number of tokens."""
    digits = f"{int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8]) % 10**12:012d}"
    return " ".join(digits[i : i + 3] for i in range(0, 12, 3))
