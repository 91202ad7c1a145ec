"""Task data from outside: a file, or the public sets through the ``datasets`` library.

Shapes that are read: LongBench's {"input", "context", "answers", "_id"} as JSON lines, HotpotQA's
own JSON array, key-value JSON lines {"ordered_kv_records", "key", "value"}, and stored predictions
{"id", "prediction", "references", optional "kind"}; each may be gzipped. Knows no task's prompt or
score and no tokenizer.
"""

from __future__ import annotations

import difflib
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalgate.errors import TaskDataError
from evalgate.validation import show_value

HUB = "hub"
# LongBench is published as one archive of JSON lines; loading scripts are no longer run by
# ``datasets``, so the member is named directly.
HUB_FILE = "zip://data/{subset}.jsonl::hf://datasets/THUDM/LongBench/data.zip"
HUB_SUBSETS = {
    "hotpotqa": "hotpotqa",
    "gov_report": "gov_report",
    "retrieval": "passage_retrieval_en",
    "aggregation": "passage_count",
}
KV_TASK = "retrieval"
HOTPOTQA_TASK = "hotpotqa"
PREDICTION_KEYS = ("id", "prediction", "references", "kind")
SHAPES = 'LongBench {"input", "context", "answers", "_id"}'


@dataclass(frozen=True)
class Row:
    """One outside item. ``where`` names file and line for messages; no ``kind`` is the default."""

    where: str
    sample_id: str
    input: str
    context: str
    answers: list[str]
    kind: str | None = None
    depth: float | None = None


@dataclass(frozen=True)
class StoredPrediction:
    """One line to score."""

    where: str
    prediction_id: str | int
    prediction: str
    references: list[str]
    kind: str | None


def load_rows(task_name: str, data: str) -> list[Row]:
    """Rows of ``data``: a file's name, or ``hub``.

    Raises TaskDataError naming file and line: unreadable file, malformed line, unknown shape,
    missing or blank reference, duplicate id.
    """
    rows = list(_load_hub(task_name) if data == HUB else _load_file(task_name, Path(data)))
    if not rows:
        raise TaskDataError(f"{data}: holds no item: give it at least one line")
    _check_unique((row.sample_id, row.where) for row in rows)
    return rows


def load_predictions(path: Path) -> list[StoredPrediction]:
    """Lines to score. Raises TaskDataError naming file and line, as load_rows and for keys."""
    lines = [_parse_prediction(data, where) for where, data in _read_json_lines(path)]
    if not lines:
        raise TaskDataError(f"{path}: holds no prediction: give it at least one line")
    _check_unique((line.prediction_id, line.where) for line in lines)
    return lines


def _read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) for each non-blank line. Raises TaskDataError naming file and line."""
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            data = json.loads(line)
        except ValueError as exc:
            raise TaskDataError(f"{where}: not JSON ({exc}): one JSON object a line") from None
        if not isinstance(data, dict):
            raise TaskDataError(f"{where}: a {type(data).__name__}, not a JSON object")
        yield where, data


def _check_unique(ids: Iterable[tuple[Any, str]]) -> None:
    """Raise TaskDataError at the second place where an id stands."""
    seen: dict[Any, str] = {}
    for item_id, where in ids:
        if item_id in seen:
            raise TaskDataError(f"{where}: id {item_id!r} stands already at {seen[item_id]}")
        seen[item_id] = where


def _check_texts(value: Any, where: str, key: str) -> list[str]:
    """``value`` as a non-empty list of non-blank texts. Raises TaskDataError."""
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise TaskDataError(f"{where}: {key} is {show_value(value)}: give a list of texts")
    if not value or not all(v.strip() for v in value):
        raise TaskDataError(
            f"{where}: {key} is {show_value(value)}: a reference is missing or blank"
        )
    return value


def _load_file(task_name: str, path: Path) -> Iterator[Row]:
    text = _read_text(path)
    if text.lstrip().startswith("["):
        yield from _parse_hotpotqa(task_name, path, text)
        return
    for where, data in _read_json_lines(path):
        if "ordered_kv_records" in data:
            yield _parse_key_value(task_name, data, where)
        else:
            yield _parse_longbench(data, where)


def _load_hub(task_name: str) -> Iterator[Row]:
    subset = HUB_SUBSETS.get(task_name)
    if subset is None:
        raise TaskDataError(
            f'task {task_name} has no public set (data = "hub" knows {", ".join(HUB_SUBSETS)}): '
            "give a file, or leave data out for the embedded samples"
        )
    remedy = f"or save LongBench's {subset}.jsonl and set data to that file"
    try:
        import datasets
    except ImportError:
        raise TaskDataError(
            f'data = "hub" needs the datasets library: pip install "evalgate[hub]", {remedy}'
        ) from None
    url = HUB_FILE.format(subset=subset)
    try:
        table = datasets.load_dataset("json", data_files={"test": url}, split="test")
    except Exception as exc:  # whatever the network stack below throws means the same here
        first_line = (str(exc) or type(exc).__name__).splitlines()[0]
        raise TaskDataError(
            f"{url} cannot be reached ({first_line}): connect this machine to the network, {remedy}"
        ) from exc
    for number, data in enumerate(table, 1):
        yield _parse_longbench(data, f"{url}, line {number}")


def _parse_prediction(data: dict[str, Any], where: str) -> StoredPrediction:
    for key in data:
        if key not in PREDICTION_KEYS:
            near = difflib.get_close_matches(key, PREDICTION_KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(PREDICTION_KEYS)}"
            raise TaskDataError(f"{where}: unknown key {key!r}, {hint}")
    for key in ("id", "prediction", "references"):
        if key not in data:
            raise TaskDataError(f"{where}: key {key!r} is missing")
    line_id, prediction, kind = data["id"], data["prediction"], data.get("kind")
    if isinstance(line_id, bool) or not isinstance(line_id, str | int):
        raise TaskDataError(f"{where}: id is {show_value(line_id)}: give a text or a whole number")
    if not isinstance(prediction, str):
        raise TaskDataError(f"{where}: prediction is {show_value(prediction)}: give a text")
    references = _check_texts(data["references"], where, "references")
    return StoredPrediction(where, line_id, prediction, references, _check_kind(kind, where))


def _check_kind(kind: Any, where: str) -> str | None:
    if kind is not None and not isinstance(kind, str):
        raise TaskDataError(f"{where}: kind is {show_value(kind)}: give a text, or leave it out")
    return kind


def _parse_longbench(data: dict[str, Any], where: str) -> Row:
    for key in ("input", "context", "_id"):
        _require(data, key, str, where)
    kind, depth = _check_kind(data.get("kind"), where), data.get("depth")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int | float)):
        raise TaskDataError(
            f"{where}: depth is {show_value(depth)}: give a number, or leave it out"
        )
    answers = _check_texts(data.get("answers"), where, "answers")
    return Row(where, data["_id"], data["input"], data["context"], answers, kind, depth)


def _parse_hotpotqa(task_name: str, path: Path, text: str) -> Iterator[Row]:
    _refuse_other_task(task_name, HOTPOTQA_TASK, "HotpotQA's JSON array", str(path))
    try:
        items = json.loads(text)
    except ValueError as exc:
        raise TaskDataError(f"{path}: not JSON ({exc})") from None
    for number, data in enumerate(items, 1):
        where = f"{path}, item {number}"
        if not isinstance(data, dict):
            raise TaskDataError(f"{where}: a {type(data).__name__}, not a JSON object")
        for key in ("_id", "question", "answer"):
            _require(data, key, str, where)
        try:
            passages = [(str(title), "".join(sentences)) for title, sentences in data["context"]]
        except (KeyError, TypeError, ValueError):
            raise TaskDataError(
                f"{where}: context is {show_value(data.get('context'))}: give a list of "
                "[title, [sentence, ...]]"
            ) from None
        context = "\n\n".join(
            f"Passage {i}:\n{title}\n{text.strip()}" for i, (title, text) in enumerate(passages, 1)
        )
        answers = _check_texts([data["answer"]], where, "answer")
        kind = data["type"] if data.get("type") in ("bridge", "comparison") else None
        yield Row(where, data["_id"], data["question"], context, answers, kind)


def _parse_key_value(task_name: str, data: dict[str, Any], where: str) -> Row:
    _refuse_other_task(task_name, KV_TASK, "key-value records", where)
    for key in ("key", "value"):
        _require(data, key, str, where)
    records = data["ordered_kv_records"]
    try:
        pairs = [(str(k), str(v)) for k, v in records]
    except (TypeError, ValueError):
        raise TaskDataError(
            f"{where}: ordered_kv_records is {show_value(records)}: give a list of [key, value]"
        ) from None
    wanted = (data["key"], data["value"])
    if wanted not in pairs:
        raise TaskDataError(f"{where}: the pair {wanted!r} is not among ordered_kv_records")
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in pairs)
    depth = pairs.index(wanted) / max(1, len(pairs) - 1)
    sample_id = f"kv-{data['key']}"
    return Row(where, sample_id, data["key"], "{" + lines[1:] + "}", [data["value"]], "kv", depth)


def _refuse_other_task(task_name: str, wanted: str, shape: str, where: str) -> None:
    if task_name != wanted:
        raise TaskDataError(
            f"{where}: {shape} can only be used by the task {wanted}; {task_name} reads {SHAPES}"
        )


def _require(data: dict[str, Any], key: str, kind: type, where: str) -> None:
    if key not in data:
        raise TaskDataError(
            f"{where}: {key!r} is missing (keys here: {', '.join(sorted(data)) or 'none'}); "
            f"the shape is {SHAPES}"
        )
    if not isinstance(data[key], kind):
        raise TaskDataError(f"{where}: {key} is {show_value(data[key])}: give a text")


def _read_text(path: Path) -> str:
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline=None) as file:
            return file.read()
    except FileNotFoundError:
        raise TaskDataError(f"{path}: no such file: check the path of data") from None
    except UnicodeDecodeError as exc:
        raise TaskDataError(f"{path}: not UTF-8 text ({exc.reason} at byte {exc.start})") from None
    except (OSError, EOFError, zlib.error) as exc:
        raise TaskDataError(f"{path}: cannot be read ({exc})") from None
