"""Error rates, power and cost of a run that stops by its results, by simulation.

    python benchmarks/sequential_stopping.py [--trials N]

Each trial draws the change of one speed metric launch by launch (Student's t needs nothing else: a
launch's value is the difference of two launches with a sd of 0.4 %, and of the means of 20 requests
with a sd of 1 %) and stops at the first look that passes or fails the rule, or at the last planned
launch. The rule is non-inferiority by 1 %. At a true loss of just 1 % passing is wrong, and failing
is as wrong as a hair's breadth below: each may happen in 5 % of runs at most. Beside it stand
looking just as often at ordinary bounds, and all planned launches with one look. Prints a table,
then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy
from scipy import stats as sps

from evalgate.looks import Look, compute_spent
from evalgate.sequential import RATES, compute_nominal
from evalgate.stats import ALPHA

SEED = 20261129
LAUNCH_SD, REQUEST_SD, PROMPTS = 0.004, 0.01, 20
VALUE_SD = (2 * LAUNCH_SD**2 + 2 * REQUEST_SD**2 / PROMPTS) ** 0.5
MARGIN = 0.01
LOSSES = (0.01, 0.005, 0.0, -0.01)
GROSS_LOSS = 0.025


@dataclass(frozen=True)
class Design:
    first: int
    planned: int

    @property
    def looks(self) -> tuple[Look, ...]:
        return tuple(
            Look(n, compute_spent(n, self.planned)) for n in range(self.first, self.planned + 1)
        )


DESIGNS = (Design(2, 8), Design(3, 8), Design(3, 12), Design(6, 20))


def compute_sequential_levels(design: Design) -> list[tuple[int, float]]:
    """(launches, level of each bound) at each look, as the gate has them."""
    looks = design.looks
    return [
        (look.blocks, float(np.interp(ALPHA, RATES, compute_nominal(looks[: i + 1]))))
        for i, look in enumerate(looks)
    ]


def compute_naive_levels(design: Design) -> list[tuple[int, float]]:
    return [(look.blocks, ALPHA) for look in design.looks]


def compute_fixed_levels(design: Design) -> list[tuple[int, float]]:
    return [(design.planned, ALPHA)]


METHODS: dict[str, Callable[[Design], list[tuple[int, float]]]] = {
    "evalgate --until-decided": compute_sequential_levels,
    "ordinary bounds at every look": compute_naive_levels,
    "all launches, one look": compute_fixed_levels,
}


def simulate(
    levels: list[tuple[int, float]], loss: float, trials: int, seed: int
) -> dict[str, float]:
    """Shares of runs that pass and that fail, and the mean number of launches."""
    most = levels[-1][0]
    values = np.random.default_rng(seed).normal(loss, VALUE_SD, (trials, most))
    passed, failed = np.zeros(trials, dtype=bool), np.zeros(trials, dtype=bool)
    launches = np.full(trials, most)
    for n, level in levels:
        seen = values[:, :n]
        error = seen.std(axis=1, ddof=1) / np.sqrt(n)
        t = (seen.mean(axis=1) - MARGIN) / error
        edge = sps.t.isf(level, n - 1)
        running = ~(passed | failed)
        passed |= running & (t < -edge)
        failed |= running & (t > edge)
        launches[running & (passed | failed)] = n
    return {
        "pass": float(passed.mean()),
        "fail": float(failed.mean()),
        "launches": float(launches.mean()),
    }


def describe(found: dict[str, float]) -> str:
    return f"{found['pass']:.1%} / {found['fail']:.1%} / {found['launches']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40_000)
    trials = parser.parse_args().trials
    started = time.perf_counter()
    results = []
    print(
        f"non-inferior by {MARGIN:.0%}; a launch's value varies by {VALUE_SD:.2%}; pass / fail / n"
    )
    print(f"{'at a true loss of':44}" + "".join(f"{x:>21.1%}" for x in (*LOSSES, GROSS_LOSS)))
    for design in DESIGNS:
        for name, compute_levels in METHODS.items():
            levels = compute_levels(design)
            row = [
                simulate(levels, loss, trials, SEED + i)
                for i, loss in enumerate((*LOSSES, GROSS_LOSS))
            ]
            results.append({"first": design.first, "planned": design.planned, name: row})
            cells = "".join(f"{describe(found):>21}" for found in row)
            print(f"{design.first:2} to {design.planned:2}: {name:34}{cells}")
    print(
        json.dumps(
            {
                "benchmark": "sequential_stopping",
                "command": " ".join(["python", *sys.argv]),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "numpy": np.__version__,
                "scipy": scipy.__version__,
                "trials": trials,
                "seconds": round(time.perf_counter() - started, 1),
                "losses": [*LOSSES, GROSS_LOSS],
                "results": results,
            },
            separators=(",", ":"),
        )
    )


if __name__ == "__main__":
    main()
