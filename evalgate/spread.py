"""Where the spread of a latency's change comes from: pairs within a launch, or launches.

One-way analysis of variance of the pairs' log-ratios. It says what would narrow the bounds most,
prompts or launches; it decides nothing. No metric and no policy is known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Standard deviations on the log scale, and the mean number of pairs in a launch."""

    pair_sd: float
    launch_sd: float
    pairs_per_launch: float

    @property
    def launch_share(self) -> float | None:
        """The launches' share in the variance of a launch's mean; None without any variance.

        Below a half, more prompts or repetitions narrow the bounds more than more launches do.
        """
        pairs = self.pair_sd**2 / self.pairs_per_launch
        total = pairs + self.launch_sd**2
        return self.launch_sd**2 / total if total > 0 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "pair_sd_percent": 100 * math.expm1(self.pair_sd),
            "launch_sd_percent": 100 * math.expm1(self.launch_sd),
            "launch_share": self.launch_share,
        }


def compute_spread(ratios: np.ndarray, launch: np.ndarray) -> Spread | None:
    """From the log-ratio of each pair and the launch that it belongs to.

    None with fewer than two launches, or without a launch that has two pairs. Variance components
    of the unbalanced one-way layout by the method of moments; a negative one counts as 0.
    """
    _, place = np.unique(launch, return_inverse=True)
    counts = np.bincount(place)
    n, groups = len(ratios), len(counts)
    if groups < 2 or n <= groups:
        return None
    means = np.bincount(place, ratios) / counts
    within = float(np.sum((ratios - means[place]) ** 2)) / (n - groups)
    between = float(np.sum(counts * (means - np.mean(ratios)) ** 2)) / (groups - 1)
    size = (n - float(np.sum(counts**2)) / n) / (groups - 1)
    return Spread(math.sqrt(within), math.sqrt(max(0.0, (between - within) / size)), n / groups)
