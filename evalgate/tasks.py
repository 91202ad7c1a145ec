"""Task items to send and their scores: the only module that knows ``evalgate_tasks``.

Items come from an embedded generator, a file or the public sets, with prompts as the server's own
token ids. What is sent to whom, and where records go, is not known here.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalgate_tasks.base import ReferenceTextError, Sample, Task
from evalgate_tasks.flags import find_flags
from evalgate_tasks.registry import load_tasks

from evalgate.errors import EvalgateError, TaskDataError, UsageError
from evalgate.records import TaskError, compute_canonical_json
from evalgate.spec import TaskSpec
from evalgate.task_data import HUB, HUB_SUBSETS, Row, load_predictions, load_rows
from evalgate.task_prompts import (
    TOKENS_PER_WORD,
    TRUNCATION_POLICY,
    Prompt,
    Tokenizer,
    find_size,
    tokenize_prompt,
    truncate_prompt,
)

DEPTHS = (0.0, 0.5, 1.0, 0.25, 0.75)
EXPORT_WORDS = 800
SHOW_WORDS = 120

__all__ = [
    "Item",
    "Scored",
    "Tokenizer",
    "build_items",
    "check_task",
    "export_task",
    "find_task",
    "list_tasks",
    "score_file",
    "score_item",
    "show_task",
]


@dataclass(frozen=True)
class Item:
    """One sample ready to be sent.

    ``prompt_ids`` have the chat template applied once; ``user_text`` is the message they were made
    of. ``meta`` is stored with the sample: kind, depth, source, truncation, post-processing.
    """

    task: str
    task_version: int
    scoring: str
    sample_id: str
    prompt_ids: list[int]
    prompt_sha256: str
    max_tokens: int
    references: list[str]
    meta: dict[str, Any]
    user_text: str

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


@dataclass(frozen=True)
class Scored:
    """An answer's score, None with ``error`` when scoring itself failed."""

    prediction: str | None
    score: float | None
    flags: list[str]
    error: TaskError | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def find_task(name: str) -> Task:
    """The task called ``name``. Raises TaskDataError with the nearest name."""
    tasks = load_tasks()
    if name in tasks:
        return tasks[name]
    near = difflib.get_close_matches(name, tasks, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise TaskDataError(f"task {name!r} is unknown{hint} (known: {', '.join(tasks)})")


def build_items(
    task_name: str,
    spec: TaskSpec,
    tokenizer: Tokenizer,
    *,
    lengths: Sequence[tuple[int, int]],
    max_model_len: int | None,
    seed: int,
) -> list[Item]:
    """``spec.limit`` items whose prompts lie in the token ranges [low, high), taken in turn.

    The spec's own min_tokens and max_prompt_tokens (inclusive) replace ``lengths``. Embedded
    prompts hit their range; rows of a file or a public set are taken in their order, for each
    range the first that is long enough (else the next), with the middle cut out of too long ones.
    The same arguments and tokenizer give the same items. Raises UsageError when prompt and answer
    cannot fit ``max_model_len``, TaskDataError for data.
    """
    task = find_task(task_name)
    max_tokens = spec.max_tokens or task.max_tokens
    ranges = _resolve_ranges(task_name, spec, lengths, max_tokens, max_model_len)
    if spec.data is None:
        return _build_embedded(task, spec.limit, tokenizer, ranges, max_tokens, seed)
    rows = load_rows(task_name, spec.data)
    return _build_from_rows(task, rows, spec.limit, tokenizer, ranges, max_tokens, spec.data)


def check_task(
    task_name: str, spec: TaskSpec, lengths: Sequence[tuple[int, int]], max_model_len: int | None
) -> None:
    """Raise what ``build_items`` would, as far as it can be known without a tokenizer.

    A public set is not fetched for it.
    """
    task = find_task(task_name)
    max_tokens = spec.max_tokens or task.max_tokens
    _resolve_ranges(task_name, spec, lengths, max_tokens, max_model_len)
    if spec.data is not None and spec.data != HUB:
        load_rows(task_name, spec.data)


def score_item(item: Item, output_text: str, finish_reason: str | None) -> Scored:
    """Score a raw output. A failure of ours is an error of category ``scoring``, never a 0."""
    try:
        return _score_text(
            find_task(item.task), output_text, item.references, item.meta["kind"], finish_reason
        )
    except Exception as exc:  # a score that cannot be computed must not end the run
        error = TaskError(category="scoring", message=f"{type(exc).__name__}: {exc}")
        return Scored(None, None, [], error)


def score_file(task_name: str, path: str | Path) -> dict[str, Any]:
    """Score stored predictions: the object that ``evalgate score`` prints.

    Lines are {"id", "prediction", "references", optional "kind"}. Raises TaskDataError naming file
    and line for a malformed line, an unknown or missing key, a missing reference, a duplicate id.
    """
    task = find_task(task_name)
    items: list[dict[str, Any]] = []
    for line in load_predictions(Path(path)):
        try:
            scored = _score_text(task, line.prediction, line.references, line.kind, None)
        except ReferenceTextError as exc:
            raise TaskDataError(f"{line.where}: {exc}") from None
        except Exception as exc:
            raise EvalgateError(f"{line.where}: scoring failed: {exc!r}") from exc
        items.append({"id": line.prediction_id, "score": scored.score, "flags": scored.flags})
    return {
        "task": task.name,
        "task_version": task.version,
        "scoring": task.scoring,
        "n": len(items),
        "mean": sum(item["score"] for item in items) / len(items),
        "items": items,
    }


def list_tasks() -> list[str]:
    """One line for each task: name, version, scoring rule, kinds."""
    tasks = load_tasks().values()
    width = max(len(task.name) for task in tasks)
    return [
        f"{task.name:<{width}}  version {task.version}  {task.scoring}  "
        f"(kinds: {', '.join(task.kinds)})"
        for task in tasks
    ]


def show_task(name: str) -> str:
    """What a task asks and how it scores, and one short embedded sample of its first kind."""
    task = find_task(name)
    sample = task.generate("0/0", task.kinds[0], 0.5, SHOW_WORDS, "sample")
    about = (type(task).__doc__ or "").strip()
    lines = [
        f"task             {task.name}",
        f"version          {task.version}",
        f"scoring          {task.scoring}",
        f"kinds            {', '.join(task.kinds)} (the first is the default)",
        f"max_tokens       {task.max_tokens}",
        f"post-processing  {task.post_processing}",
        f"public set       {HUB_SUBSETS.get(task.name, 'none')}",
        *([about] if about else []),
        "",
        "prompt of a short embedded sample:",
        task.render_prompt(sample),
        "",
        f"references: {json.dumps(sample.answers, ensure_ascii=False)}",
    ]
    return "\n".join(lines)


def export_task(name: str, samples: int, seed: int, words: int = EXPORT_WORDS) -> list[str]:
    """Embedded samples as JSON lines in LongBench's shape; contexts have about ``words`` words."""
    task = find_task(name)
    lines = []
    for i in range(samples):
        kind, depth = _plan_item(i, 1, task.kinds)
        sample = task.generate(f"{seed}/{i}", kind, depth, words, f"{name}-{seed}-{i}")
        lines.append(json.dumps(sample.to_longbench(), ensure_ascii=False))
    return lines


def _resolve_ranges(
    task_name: str,
    spec: TaskSpec,
    lengths: Sequence[tuple[int, int]],
    max_tokens: int,
    max_model_len: int | None,
) -> list[tuple[int, int]]:
    """The [low, high) ranges in use, each cut to what the server's context leaves for a prompt."""
    if spec.min_tokens is not None or spec.max_prompt_tokens is not None:
        low = spec.min_tokens or min((low for low, _ in lengths), default=1)
        high = spec.max_prompt_tokens or max((high for _, high in lengths), default=low) - 1
        lengths = [(low, high + 1)]
    if not lengths:
        raise UsageError(f"task {task_name}: no length range: give min_tokens, max_prompt_tokens")
    ranges = []
    for low, high in lengths:
        if low >= high:
            raise UsageError(
                f"task {task_name}: no prompt has {low} tokens or more and fewer than {high}: "
                "raise max_prompt_tokens or lower min_tokens"
            )
        limit = high if max_model_len is None else min(high, max_model_len - max_tokens + 1)
        if low >= limit:
            raise UsageError(
                f"task {task_name}: prompts from {low} tokens and an answer of {max_tokens} make "
                f"{low + max_tokens}, the server's context is {max_model_len}: lower max_tokens or "
                "min_tokens, or serve with a larger --max-model-len"
            )
        ranges.append((low, limit))
    return ranges


def _plan_item(index: int, n_ranges: int, kinds: Sequence[str]) -> tuple[str, float]:
    """Kind and depth of an item, so that ranges, kinds and depths are crossed, not aligned."""
    turn, place = divmod(index, n_ranges)
    return kinds[(turn + place) % len(kinds)], DEPTHS[(2 * turn + place) % len(DEPTHS)]


def _build_embedded(
    task: Task,
    limit: int,
    tokenizer: Tokenizer,
    ranges: list[tuple[int, int]],
    max_tokens: int,
    seed: int,
) -> list[Item]:
    tokens_per_word: dict[str, float] = {}
    items = []
    for i in range(limit):
        low, high = ranges[i % len(ranges)]
        kind, depth = _plan_item(i, len(ranges), task.kinds)
        sample_id = f"{task.name}-{seed}-{i}"

        def build(words: int) -> tuple[tuple[Sample, Prompt], int]:
            sample = task.generate(f"{seed}/{i}", kind, depth, words, sample_id)  # noqa: B023
            prompt = tokenize_prompt(tokenizer, task.render_prompt(sample))
            return (sample, prompt), len(prompt.ids)

        share = random.Random(f"{seed}/{task.name}/{i}").uniform(0.15, 0.85)
        target = low + int((high - low) * share)
        guess = int(target / tokens_per_word.get(kind, TOKENS_PER_WORD))
        try:
            (sample, prompt), words = find_size(
                build, low=low, high=high, target=target, guess_words=guess
            )
        except TaskDataError as exc:
            raise TaskDataError(f"task {task.name}, kind {kind}: {exc}") from None
        tokens_per_word[kind] = len(prompt.ids) / words
        items.append(_make_item(task, sample, prompt, max_tokens, "embedded", None))
    return items


def _build_from_rows(
    task: Task,
    rows: list[Row],
    limit: int,
    tokenizer: Tokenizer,
    ranges: list[tuple[int, int]],
    max_tokens: int,
    source: str,
) -> list[Item]:
    samples = [_check_row(task, row) for row in rows]
    prompts: dict[int, Prompt] = {}

    def measure(number: int) -> Prompt:
        if number not in prompts:
            prompts[number] = tokenize_prompt(tokenizer, task.render_prompt(samples[number]))
        return prompts[number]

    unused = list(range(len(samples)))
    items = []
    for i in range(min(limit, len(samples))):
        low, high = ranges[i % len(ranges)]
        number = next((n for n in unused if len(measure(n).ids) >= low), unused[0])
        unused.remove(number)
        prompt, truncation = measure(number), None
        if len(prompt.ids) >= high:
            whole = len(prompt.ids)
            prompt = truncate_prompt(tokenizer, prompt, high - 1)
            truncation = {
                "policy": TRUNCATION_POLICY,
                "original_tokens": whole,
                "kept_tokens": len(prompt.ids),
            }
        items.append(_make_item(task, samples[number], prompt, max_tokens, source, truncation))
    return items


def _check_row(task: Task, row: Row) -> Sample:
    try:
        kind = task.resolve_kind(row.answers, row.kind)
        task.check_references(row.answers, kind)
    except ReferenceTextError as exc:
        raise TaskDataError(f"{row.where}: {exc}") from None
    return Sample(row.input, row.context, row.answers, row.sample_id, kind, row.depth)


def _make_item(
    task: Task,
    sample: Sample,
    prompt: Prompt,
    max_tokens: int,
    source: str,
    truncation: dict[str, Any] | None,
) -> Item:
    return Item(
        task=task.name,
        task_version=task.version,
        scoring=task.scoring,
        sample_id=sample.sample_id,
        prompt_ids=prompt.ids,
        prompt_sha256=hashlib.sha256(compute_canonical_json(prompt.ids).encode()).hexdigest(),
        max_tokens=max_tokens,
        references=list(sample.answers),
        meta={
            "kind": sample.kind,
            "depth": sample.depth,
            "source": source,
            "truncation": truncation,
            "post_processing": task.post_processing,
        },
        user_text=prompt.text,
    )


def _score_text(
    task: Task,
    output_text: str,
    references: Sequence[str],
    kind: str | None,
    finish_reason: str | None,
) -> Scored:
    prediction = task.postprocess(output_text)
    result = task.score(prediction.text, references, kind)
    flags = [
        *([] if prediction.text else ["empty"]),
        *prediction.flags,
        *find_flags(output_text, references, finish_reason),
        *result.flags,
    ]
    if not 0 <= result.score <= 1:  # also catches NaN
        raise ValueError(f"task {task.name} gave the score {result.score!r}, not 0 to 1")
    # No answer is worth nothing, whatever the rule makes of an empty text.
    score = float(result.score) if prediction.text else 0.0
    return Scored(prediction.text, score, flags, None, dict(result.extra))
