"""False alarms and power of the speed verdict, beside three rivals, by simulation.

    python benchmarks/false_alarms.py [--trials N]

Each trial simulates the TPOT of two arms: launches vary (each arm's each launch has its own level),
requests vary, prompts may differ in length. Asked is "the candidate is faster" (superiority by
0 %), so at a true change of 0 the share of passes is the rate of false alarms, at most 5 % being
promised, and at a true gain it is the power. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy
import statsmodels
from scipy import stats as sps
from statsmodels.regression.mixed_linear_model import MixedLM

from evalgate.columns import Columns
from evalgate.compare import RequestPairs
from evalgate.speed import estimate_speed

SEED = 20261129
LAUNCH_SD, REQUEST_SD = 0.004, 0.01
GAINS = (0.0, 0.005, 0.01, 0.02)
FIXED_THRESHOLD = 0.05
ALPHA = 0.05


@dataclass(frozen=True)
class Design:
    name: str
    launches: int
    prompts: int
    prompt_sd: float


DESIGNS = (
    Design("5 launches x 20 equal prompts", 5, 20, 0.0),
    Design("5 launches x 20 prompts that differ by 30 %", 5, 20, 0.30),
    Design("1 launch x 100 equal prompts", 1, 100, 0.0),
)


def simulate(design: Design, gain: float, rng: np.random.Generator) -> np.ndarray:
    """TPOT in seconds [arm, launch, prompt]; the candidate's is shorter by ``gain``."""
    shape = (2, design.launches, design.prompts)
    launch = rng.normal(0, LAUNCH_SD, (2, design.launches, 1))
    prompt = rng.normal(0, design.prompt_sd, (1, 1, design.prompts))
    tpot_s = 0.02 * np.exp(launch + prompt + rng.normal(0, REQUEST_SD, shape))
    tpot_s[1] *= 1 - gain
    return tpot_s


def judge_ours(tpot_s: np.ndarray) -> bool:
    """The gate's own estimate: pass when the upper bound of the change lies below 0."""
    _, launches, prompts = tpot_s.shape
    n = launches * prompts
    columns = [
        Columns(values, values, values, np.full(n, 100.0)) for values in tpot_s.reshape(2, n)
    ]
    pairs = RequestPairs(
        sides=(None, None),  # type: ignore[arg-type]  # estimates read columns only
        rows=(np.arange(n), np.arange(n)),
        block=np.repeat(np.arange(launches), prompts),
        bucket=np.zeros(n, dtype=int),
        prompt=np.tile(np.arange(prompts), launches),
        bucket_names=["all"],
        baseline=columns[0],
        candidate=columns[1],
        references=None,
        unpaired=(0, 0),
        dropped_blocks=(),
    )
    estimate = estimate_speed(pairs, "tpot", []).estimate
    return estimate is not None and estimate.bounds()[1] < 0


def judge_fixed_threshold(tpot_s: np.ndarray) -> bool:
    baseline, candidate = tpot_s.reshape(2, -1).mean(axis=1)
    return bool(candidate / baseline - 1 < -FIXED_THRESHOLD)


def judge_welch(tpot_s: np.ndarray) -> bool:
    baseline, candidate = tpot_s.reshape(2, -1)
    test = sps.ttest_ind(candidate, baseline, equal_var=False, alternative="less")
    return bool(test.pvalue < ALPHA)


def judge_mann_whitney(tpot_s: np.ndarray) -> bool:
    baseline, candidate = tpot_s.reshape(2, -1)
    return bool(sps.mannwhitneyu(candidate, baseline, alternative="less").pvalue < ALPHA)


def judge_mixed_model(tpot_s: np.ndarray) -> bool:
    """Check: pairs' log-ratios with a random level for each launch (REML, Wald)."""
    ratios = np.log(tpot_s[1] / tpot_s[0])
    frame = pd.DataFrame(
        {
            "ratio": 100 * ratios.ravel(),
            "launch": np.repeat(np.arange(len(ratios)), ratios.shape[1]),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a launch variance of zero is on the boundary, and fine
        fit = MixedLM(frame["ratio"], np.ones(len(frame)), groups=frame["launch"]).fit()
    return bool(sps.norm.cdf(fit.fe_params.iloc[0] / fit.bse.iloc[0]) < ALPHA)


METHODS: dict[str, tuple[Callable[[np.ndarray], bool], float]] = {
    "evalgate": (judge_ours, 1.0),
    "difference of means, fixed 5 %": (judge_fixed_threshold, 1.0),
    "Welch's t over all requests": (judge_welch, 1.0),
    "Mann-Whitney over all requests": (judge_mann_whitney, 1.0),
    "mixed model (check)": (judge_mixed_model, 0.1),  # slow: a tenth of the trials
}


def measure(design: Design, trials: int) -> dict[str, list[float | None]]:
    """Share of passes of each method at each gain; the same data for every method."""
    shares: dict[str, list[float | None]] = {name: [] for name in METHODS}
    for i, gain in enumerate(GAINS):
        rng = np.random.default_rng([SEED, i])
        data = [simulate(design, gain, rng) for _ in range(trials)]
        for name, (judge, part) in METHODS.items():
            if design.launches == 1 and judge is judge_mixed_model:
                shares[name].append(None)
                continue
            used = data[: max(1, int(trials * part))]
            shares[name].append(sum(map(judge, used)) / len(used))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    trials = parser.parse_args().trials
    started = time.perf_counter()
    results = {design.name: measure(design, trials) for design in DESIGNS}
    for name, shares in results.items():
        print(f"\n{name}; launch sd {LAUNCH_SD:.1%}, request sd {REQUEST_SD:.1%}")
        print(f"{'claims a gain at a true gain of':34}" + "".join(f"{g:>9.1%}" for g in GAINS))
        for method, values in shares.items():
            cells = "".join(f"{'-' if v is None else f'{v:.1%}':>9}" for v in values)
            print(f"{method:34}{cells}")
    print(
        json.dumps(
            {
                "benchmark": "false_alarms",
                "command": " ".join(["python", *sys.argv]),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "numpy": np.__version__,
                "scipy": scipy.__version__,
                "statsmodels": statsmodels.__version__,
                "trials": trials,
                "seconds": round(time.perf_counter() - started, 1),
                "gains": GAINS,
                "results": results,
            },
            separators=(",", ":"),
        )
    )


if __name__ == "__main__":
    main()
