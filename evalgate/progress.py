"""How a run in progress looks in a terminal: what runs now and how long it will still take.

Everything goes to stderr, so that stdout holds the answer alone. Knows work units, not requests.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 15.0  # a log without a terminal gets a line this often


class RunProgress:
    """Rich bar on a terminal, plain lines elsewhere. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            speed_estimate_period=600.0,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._last_line_s: float | None = None

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, total_work: float) -> None:
        self._bar.reset(self._task, total=total_work)

    def extend(self, work: float) -> None:
        """More is to be done than was known."""
        total = self._bar.tasks[0].total
        self._bar.update(self._task, total=work if total is None else total + work)

    def say(self, text: str) -> None:
        """A step that happens once: always its own line."""
        self._bar.update(self._task, description=text)
        self._console.print(f"evalgate: {text}", highlight=False, markup=False)

    def advance(self, work: float, text: str) -> None:
        """``work`` is done; ``text`` names it."""
        self._bar.update(self._task, advance=work, description=text)
        if not self._console.is_terminal:
            self._print_line(text)

    def _print_line(self, text: str) -> None:
        task = self._bar.tasks[0]
        now_s = self._bar.get_time()
        due = self._last_line_s is None or now_s - self._last_line_s >= LINE_EVERY_S
        if not (due or task.finished) or task.elapsed is None:
            return
        self._last_line_s = now_s
        left = task.elapsed * (100 / task.percentage - 1) if task.percentage else None
        shown = f", about {left:.0f} s left" if left is not None and task.total else ""
        self._console.print(
            f"evalgate: {task.percentage:3.0f} % after {task.elapsed:.0f} s{shown} ({text})",
            highlight=False,
            markup=False,
        )
