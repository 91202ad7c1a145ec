"""Finds the tasks: every module of this package that binds ``TASK``. Adding a file adds a task."""

from __future__ import annotations

import importlib
import pkgutil

import evalgate_tasks
from evalgate_tasks.base import Task


def load_tasks() -> dict[str, Task]:
    """All tasks by name. Raises ValueError when two files claim the same name."""
    tasks: dict[str, Task] = {}
    for info in pkgutil.iter_modules(evalgate_tasks.__path__):
        module = importlib.import_module(f"evalgate_tasks.{info.name}")
        task = getattr(module, "TASK", None)
        if task is None:
            continue
        if task.name in tasks:
            raise ValueError(f"two task files bind the name {task.name!r}: rename one of them")
        tasks[task.name] = task
    return tasks
