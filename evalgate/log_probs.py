"""How far two arms' log-probabilities of one text lie apart: numbers in, numbers out.

Knows no server and no record. All log-probabilities are natural logarithms (nats).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evalgate.errors import EvidenceError

BUCKET_STARTS = (0, 16, 64, 256, 1024)  # of output indices, for a loss that grows with length


@dataclass(frozen=True)
class Trace:
    """What one arm said at the positions of a forced text; columns of equal length.

    ``indices``    which token of the output, counted from 0
    ``log_probs``  of the forced token
    ``top1``       the most likely token's id; the lower one of two that are equal
    ``margins``    log-probability of the most likely token minus that of the second
    """

    indices: Sequence[int]
    log_probs: Sequence[float]
    top1: Sequence[int]
    margins: Sequence[float]


@dataclass(frozen=True)
class Fidelity:
    """An arm against the baseline over some positions.

    ``mean_gap``, ``p99_gap``, ``worst_gap`` are of |log p(arm) - log p(baseline)|, the percentile
    by linear interpolation; ``mean_change`` keeps the sign (below 0: the arm finds the text less
    likely). ``worst_margin`` is the largest of the baseline's margins where the arm's most likely
    token is another one: large means that more than near ties flipped.
    """

    positions: int
    mean_gap: float
    p99_gap: float
    worst_gap: float
    mean_change: float
    top1_agreement: float
    first_divergence: int | None
    margin_at_divergence: float | None
    worst_margin: float | None


def build_trace(
    indices: Sequence[int], forced: Sequence[int], top: Sequence[Mapping[int, float]]
) -> Trace:
    """A trace from each position's {token: log-probability}, which holds the forced token and at
    least the two most likely ones.

    Raises EvidenceError for a position without the forced token, with one token only, or with a
    value that is no number: nothing that a broken kernel says may pass as agreement.
    """
    log_probs, top1, margins = [], [], []
    for index, token, options in zip(indices, forced, top, strict=True):
        if token not in options or len(options) < 2:
            raise EvidenceError(
                f"output position {index}: log-probabilities of tokens "
                f"{sorted(options)} came, those of token {token} and of the two best are needed"
            )
        bad = [value for value in options.values() if not np.isfinite(value)]
        if bad:
            raise EvidenceError(f"output position {index}: a log-probability is {bad[0]}")
        (first, best), (_, second), *_ = sorted(options.items(), key=lambda o: (-o[1], o[0]))
        log_probs.append(options[token])
        top1.append(first)
        margins.append(best - second)
    return Trace(list(indices), log_probs, top1, margins)


def compute_fidelity(baseline: Trace, arm: Trace) -> Fidelity:
    """Compare the arm with the baseline over all their positions.

    Raises EvidenceError when there is none, or when the two do not hold the same ones.
    """
    if list(baseline.indices) != list(arm.indices) or not baseline.indices:
        raise EvidenceError(
            f"the arms hold {len(arm.indices)} and {len(baseline.indices)} positions of the text, "
            "or different ones: replay the same text in both"
        )
    changes = np.asarray(arm.log_probs) - np.asarray(baseline.log_probs)
    gaps = np.abs(changes)
    flips = np.flatnonzero(np.asarray(baseline.top1) != np.asarray(arm.top1))
    margins = np.asarray(baseline.margins)[flips]
    return Fidelity(
        positions=len(gaps),
        mean_gap=float(gaps.mean()),
        p99_gap=float(np.percentile(gaps, 99)),
        worst_gap=float(gaps.max()),
        mean_change=float(changes.mean()),
        top1_agreement=1 - len(flips) / len(gaps),
        first_divergence=int(baseline.indices[flips[0]]) if len(flips) else None,
        margin_at_divergence=float(margins[0]) if len(flips) else None,
        worst_margin=float(margins.max()) if len(flips) else None,
    )


def split_by_position(trace: Trace) -> dict[str, Trace]:
    """The trace in pieces, named "FIRST-LAST" of the output indices that each may hold."""
    indices = np.asarray(trace.indices)
    pieces = {}
    for start, stop in zip(BUCKET_STARTS, (*BUCKET_STARTS[1:], None), strict=True):
        inside = (indices >= start) & (indices < (np.inf if stop is None else stop))
        where = np.flatnonzero(inside)
        if len(where):
            name = f"{start}-" if stop is None else f"{start}-{stop - 1}"
            pieces[name] = Trace(
                *(
                    [column[i] for i in where]
                    for column in (trace.indices, trace.log_probs, trace.top1, trace.margins)
                )
            )
    return pieces
