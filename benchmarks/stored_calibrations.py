"""False alarms of the speed verdict and of three rivals on stored runs of base against base.

    python benchmarks/stored_calibrations.py DIR...

Each DIR is a run made with ``evalgate run SPEC --calibrate``: the same build on both sides, so
whatever is found is a false alarm. Asked of every run's TTFT and TPOT in both directions: is the
second arm slower, is it faster, each at 5 % (a change of more than 5 % for the fixed threshold).
Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from false_alarms import judge_fixed_threshold, judge_mann_whitney, judge_ours, judge_welch

from evalgate.compare import RequestPairs, pair_requests, views_of_run
from evalgate.store import load_run
from evalgate.verdicts import choose_policy, is_calibration, judge_run, list_false_alarms

METRICS = ("ttft", "tpot")
METHODS: dict[str, Callable[[np.ndarray], bool]] = {
    "evalgate": judge_ours,
    "difference of means, fixed 5 %": judge_fixed_threshold,
    "Welch's t over all requests": judge_welch,
    "Mann-Whitney over all requests": judge_mann_whitney,
}


def tabulate(pairs: RequestPairs, metric: str) -> np.ndarray:
    """Seconds [arm, launch, prompt] of a run whose launches hold the same prompts."""
    launches, prompts = len(np.unique(pairs.block)), len(np.unique(pairs.prompt))
    order = np.lexsort((pairs.prompt, pairs.block))
    columns = [getattr(side, f"{metric}_s")[order] for side in (pairs.baseline, pairs.candidate)]
    return np.array(columns).reshape(2, launches, prompts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    runs = [load_run(path) for path in parser.parse_args().runs]
    if strangers := [stored.run.run_id for stored in runs if not is_calibration(stored.run)]:
        parser.error(f"not made with --calibrate: {', '.join(strangers)}")
    alarms = dict.fromkeys(METHODS, 0)
    asked = rules = found = 0
    for stored in runs:
        verdict = judge_run(stored, choose_policy(None, stored.run, "run"), None).to_json()
        rules, found = rules + len(verdict["rules"]), found + len(list_false_alarms(verdict))
        pairs = pair_requests(*views_of_run(stored))
        for metric in METRICS:
            table = tabulate(pairs, metric)
            for both in (table, table[::-1]):
                asked += 1
                for name, judge in METHODS.items():
                    alarms[name] += judge(both)
    print(f"{len(runs)} runs, {asked} questions; the runs' own policies: {found} of {rules} rules")
    print("| method | false alarms | share |\n|---|--:|--:|")
    for name, n in alarms.items():
        print(f"| {name} | {n} | {n / asked:.1%} |")
    print(json.dumps({"runs": len(runs), "asked": asked, "alarms": alarms, "by_policy": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
