"""What a task is: a template, a budget, a post-processing rule, a score and a generator.

A task file defines one subclass and binds an instance to ``TASK``; ``registry`` finds it. Nothing
here knows a server, a tokenizer or a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from evalgate_tasks.text import strip_thinking


class ReferenceTextError(ValueError):
    """A reference that the task's rule cannot score, or a kind that it does not know."""


@dataclass(frozen=True)
class Sample:
    """One item in LongBench's shape, with its kind and the depth of its answer (0 to 1)."""

    input: str
    context: str
    answers: list[str]
    sample_id: str
    kind: str
    depth: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_longbench(self) -> dict[str, Any]:
        """The sample as a line of a LongBench file; kind and depth ride along."""
        row = {
            "input": self.input,
            "context": self.context,
            "answers": self.answers,
            "_id": self.sample_id,
            "kind": self.kind,
        }
        return row if self.depth is None else {**row, "depth": self.depth}


@dataclass(frozen=True)
class Prediction:
    """A raw output after the task's post-processing rule, and what the rule noticed."""

    text: str
    flags: list[str]


@dataclass(frozen=True)
class Score:
    """``score`` (0 to 1) is what gates; ``extra`` holds the figures shown beside it."""

    score: float
    flags: list[str] = field(default_factory=list)
    extra: Mapping[str, Any] = field(default_factory=dict)


class Task(ABC):
    """One task. ``version`` rises with any change of prompt, post-processing or score.

    ``templates`` maps each kind to a prompt with the slots {context} and {input}; the first kind
    is the default. ``max_tokens`` is the generation budget; ``truncation`` of too long prompts is
    decided by the caller, in the middle, so that both ends of a template survive.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    scoring: ClassVar[str]
    max_tokens: ClassVar[int]
    templates: ClassVar[Mapping[str, str]]
    post_processing: ClassVar[str] = "closed <think> blocks removed, outer white space stripped"

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.templates)

    def check_kind(self, kind: str | None) -> str:
        """The kind to use; None means the default. Raises ReferenceTextError for an unknown one."""
        if kind is None:
            return self.kinds[0]
        if kind not in self.templates:
            raise ReferenceTextError(
                f"kind {kind!r} is unknown to {self.name}; known: {', '.join(self.kinds)}"
            )
        return kind

    def resolve_kind(self, references: Sequence[str], kind: str | None) -> str:
        """The kind of an item that may not name one; a task may tell it from the references."""
        return self.check_kind(kind)

    def render_prompt(self, sample: Sample) -> str:
        """The text of the user's message. Braces inside the sample's own text are left alone."""
        template = self.templates[self.check_kind(sample.kind)]
        head, tail = template.split("{context}")
        return (
            head.replace("{input}", sample.input)
            + sample.context
            + tail.replace("{input}", sample.input)
        )

    def postprocess(self, output_text: str) -> Prediction:
        """The prediction in a raw output; an unclosed <think> leaves no answer and a flag."""
        text, closed = strip_thinking(output_text)
        return Prediction(text.strip(), [] if closed else ["unclosed_thinking"])

    def check_references(self, references: Sequence[str], kind: str | None = None) -> None:
        """Raises ReferenceTextError when the rule cannot score against these references."""
        self.check_kind(kind)
        if not references:
            raise ReferenceTextError("references are empty: give at least one right answer")
        for reference in references:
            if not reference.strip():
                raise ReferenceTextError("a reference is blank: give its text or leave it out")

    @abstractmethod
    def score(self, prediction: str, references: Sequence[str], kind: str | None = None) -> Score:
        """Score a post-processed prediction. Raises ReferenceTextError as check_references."""

    @abstractmethod
    def generate(self, seed: str, kind: str, depth: float, words: int, sample_id: str) -> Sample:
        """An embedded sample whose context has close to ``words`` words.

        The same arguments give the same sample. ``words`` below what the kind needs at least gives
        the smallest sample there is.
        """
