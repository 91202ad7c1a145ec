"""What each metric is (one table) and how it is computed from raw times (one place).

Raw times are nanoseconds since the request was sent; everything computed is in seconds, tokens a
second, or a plain ratio. The module knows no record, no file and no statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

NS_PER_S = 1e9
PERCENTILE_METHOD = "linear"  # NumPy's default; named in every output

Unit = Literal["percent", "points"]


@dataclass(frozen=True)
class Metric:
    """A gateable quantity: how it is called, which way is better, and what a delta is given in.

    ``delta_unit`` "percent": candidate/baseline - 1; "points": (candidate - baseline) x 100, for
    values between 0 and 1; a ``logprob_gap`` is a mean gap in nats, its delta in hundredths of one.
    """

    name: str
    label: str
    unit: str
    higher_is_better: bool
    delta_unit: Unit
    source: Literal["requests", "samples", "fidelity"]
    weighted: bool = False
    is_throughput: bool = False


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("ttft", "TTFT", "s", False, "percent", "requests"),
        Metric("tpot", "TPOT", "s", False, "percent", "requests"),
        Metric("e2el", "E2EL", "s", False, "percent", "requests"),
        Metric(
            "output_throughput",
            "output throughput",
            "tokens/s",
            True,
            "percent",
            "requests",
            is_throughput=True,
        ),
        Metric(
            "normalised_output_throughput",
            "length-normalised output throughput",
            "tokens/s",
            True,
            "percent",
            "requests",
            is_throughput=True,
        ),
        Metric(
            "weighted_output_throughput",
            "weighted output throughput",
            "tokens/s",
            True,
            "percent",
            "requests",
            weighted=True,
            is_throughput=True,
        ),
        Metric(
            "weighted_normalised_output_throughput",
            "weighted length-normalised output throughput",
            "tokens/s",
            True,
            "percent",
            "requests",
            weighted=True,
            is_throughput=True,
        ),
        Metric("score", "score", "0-1", True, "points", "samples"),
        Metric("top1_agreement", "top-1 agreement", "0-1", True, "points", "fidelity"),
        Metric("logprob_gap", "log-probability gap", "nats", False, "points", "fidelity"),
    )
}


def compute_ttft_s(chunk_ns: Sequence[int]) -> float | None:
    """Seconds from sending to the first chunk that carried a token; None without one."""
    return chunk_ns[0] / NS_PER_S if chunk_ns else None


def compute_e2el_s(chunk_ns: Sequence[int]) -> float | None:
    """Seconds from sending to the last chunk that carried a token; None without one."""
    return chunk_ns[-1] / NS_PER_S if chunk_ns else None


def compute_tpot_s(chunk_ns: Sequence[int], output_tokens: int | None) -> float | None:
    """Mean seconds for each output token after the first.

    None when the token count is unknown or below 2, as nothing was measured then.
    """
    if not chunk_ns or output_tokens is None or output_tokens < 2:
        return None
    return (chunk_ns[-1] - chunk_ns[0]) / NS_PER_S / (output_tokens - 1)


def compute_latencies_s(
    first_ns: np.ndarray, last_ns: np.ndarray, output_tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """TTFT, TPOT and E2EL of many requests at once, by the same formulas; NaN is absent.

    A duration that is not positive has no logarithm and counts as absent here; where it is a fault,
    validity says so. (Several tokens in a single chunk have no time between them either.)
    """
    steps = np.where(output_tokens >= 2, output_tokens - 1, np.nan)
    found = (first_ns / NS_PER_S, (last_ns - first_ns) / NS_PER_S / steps, last_ns / NS_PER_S)
    ttft_s, tpot_s, e2el_s = (np.where(values > 0, values, np.nan) for values in found)
    return ttft_s, tpot_s, e2el_s


def compute_normalised_s(
    ttft_s: np.ndarray, tpot_s: np.ndarray, output_tokens: np.ndarray
) -> np.ndarray:
    """Seconds that an arm would need for ``output_tokens`` tokens: ttft + tpot * (n - 1).

    A single token takes no time after the first, so its TPOT need not exist.
    """
    steps = output_tokens - 1
    return ttft_s + np.where(steps == 0, 0.0, tpot_s * steps)


def compute_throughput(tokens: np.ndarray, seconds: np.ndarray) -> float | None:
    """Output tokens a second under serial load: sum over sum, of what has both (NaN is absent).

    None when no time was spent.
    """
    known = np.isfinite(tokens) & np.isfinite(seconds)
    total_s = float(np.sum(seconds[known]))
    return float(np.sum(tokens[known])) / total_s if total_s > 0 else None


def compute_weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Arithmetic mean of the buckets' values with the spec's weights; None if any is absent."""
    if not values or any(v is None for v in values):
        return None
    return float(np.average(np.asarray(values, dtype=float), weights=np.asarray(weights)))


def compute_percentiles(
    values: Sequence[float] | np.ndarray, percents: Sequence[float]
) -> list[float | None]:
    """Percentiles with linear interpolation (``PERCENTILE_METHOD``); None of nothing."""
    if not len(values):
        return [None] * len(percents)
    found = np.percentile(np.asarray(values, dtype=float), percents, method=PERCENTILE_METHOD)
    return found.tolist()
