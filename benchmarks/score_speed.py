"""How long it takes to score 10,000 samples of each task (the aim: under a minute each).

Predictions are as long as a task's budget allows and made of the sample's own context, so that
scores, loops and subsequences are real work. Prints a table, then one line of JSON.

    python benchmarks/score_speed.py [--samples 10000]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import evalgate
from evalgate.tasks import export_task, list_tasks, score_file

WORDS_PER_TOKEN = 0.75
BUDGET_TOKENS = {"gov_report": 512, "hotpotqa": 32, "retrieval": 64, "aggregation": 64}
DISTINCT = 200  # samples that are written out; the rest repeat them under other ids


def write_predictions(path: Path, task: str, samples: int, rng: random.Random) -> int:
    """Write ``samples`` lines to score; returns the mean prediction length in words."""
    rows = [json.loads(line) for line in export_task(task, DISTINCT, 0)]
    wanted = int(BUDGET_TOKENS.get(task, 64) * WORDS_PER_TOKEN)
    words = 0
    with path.open("w", encoding="utf-8") as file:
        for i in range(samples):
            row = rows[i % len(rows)]
            context = row["context"].split(" ")
            start = rng.randrange(max(1, len(context) - wanted))
            prediction = " ".join(context[start : start + wanted])
            words += len(prediction.split())
            line = {"id": i, "prediction": prediction, "references": row["answers"]}
            file.write(json.dumps({**line, "kind": row["kind"]}) + "\n")
    return round(words / samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    samples = parser.parse_args().samples
    table = Table("task", "words", "wall s", "CPU s", "samples/s", "mean score")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for task in (line.split()[0] for line in list_tasks()):
            path = Path(folder) / f"{task}.jsonl"
            words = write_predictions(path, task, samples, random.Random(0))
            wall, cpu = time.perf_counter(), time.process_time()
            mean = score_file(task, path)["mean"]
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            results[task] = {"words": words, "wall_s": round(wall, 2), "cpu_s": round(cpu, 2)}
            table.add_row(
                task,
                str(words),
                f"{wall:.1f}",
                f"{cpu:.1f}",
                f"{samples / wall:.0f}",
                f"{mean:.3f}",
            )
    Console().print(table)
    about = {
        "samples": samples,
        "command": " ".join(sys.argv),
        "machine": platform.machine(),
        "processor": platform.processor() or None,
        "python": platform.python_version(),
        "evalgate": evalgate.__version__,
    }
    print(json.dumps({**about, "tasks": results}, separators=(",", ":")))


if __name__ == "__main__":
    main()
