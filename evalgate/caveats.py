"""What a reader must know beside a verdict that stands, as sentences that decide nothing.

Launches that were not sampled, records left out, a cache that nothing tells of, a machine that was
busy or throttled.
"""

from __future__ import annotations

import numpy as np

from evalgate.compare import ArmView, RequestPairs, SamplePairs
from evalgate.looks import describe_looks, read_looks

BUSY_CORES = 0.2  # taken by other processes on average: more is worth a warning


def list_warnings(
    baseline: ArmView,
    candidate: ArmView,
    requests: RequestPairs,
    samples: SamplePairs,
    *,
    apart: bool,
) -> list[str]:
    """All warnings. ``apart``: the arms come from two runs that did not alternate."""
    warnings = []
    if any(v.record.attached for v in (baseline, candidate)):
        warnings.append(
            "launches were not sampled: an arm was attached to, and its blocks are passes over "
            "the prompts of one running server"
        )
    elif len(requests) and len(requests.blocks) == 1:
        warnings.append(
            "one launch of each arm: launches were not sampled, so the intervals of speed hold "
            "for these two launches only; two or more blocks show how launches vary"
        )
    if requests.dropped_blocks:
        shown = ", ".join(map(str, requests.dropped_blocks))
        warnings.append(f"blocks of one arm only were dropped: {shown}")
    if apart:
        warnings.append(
            "the arms were measured apart, so a drift of the machine between them counts as a "
            "change"
            + (
                "; it was taken out by the baseline arm that both runs hold"
                if requests.references
                else "; a baseline arm in both runs would take it out"
            )
        )
        if lost := sum(requests.unpaired) + sum(samples.unpaired):
            warnings.append(f"{lost} records have no partner in the other run and were left out")
    unknown = int(np.sum(np.any([np.isnan(f.prompt_tokens) for f in requests.facts], axis=0)))
    if unknown:
        warnings.append(f"{unknown} load pairs have no prompt token count from the server")
    warnings += [
        f"{side.title}: nothing shows whether the prefix cache was hit, as the server tells "
        "neither cached tokens nor counters; only what stands in front of each prompt speaks for it"
        for side in (baseline, candidate)
        if side.measured
        and not any(e.prefix_cache for e in side.evidence)
        and bool(np.all(np.isnan(side.facts.cached_tokens)))
    ]
    for side in {v.run.run_id: v for v in (baseline, candidate)}.values():
        warnings += _warn_machine(side)
        warnings += _warn_looks(side, apart=apart)
        notes = (side.run.extra or {}).get("notes")
        warnings += [str(note) for note in notes] if isinstance(notes, list) else []
    return warnings


def _warn_looks(side: ArmView, *, apart: bool) -> list[str]:
    looks = read_looks(side.run)
    if not looks:
        return []
    start = (
        f"run {side.label} added launches until its rules were decided or its minutes were spent, "
        f"with looks after {describe_looks(looks)} launches: "
    )
    if apart:
        return [start + "the bounds here take no account of that, and may be too narrow"]
    return [start + "the bounds of speed are widened to hold over all looks"]


def _warn_machine(side: ArmView) -> list[str]:
    machine = (side.run.extra or {}).get("machine")
    if not isinstance(machine, dict):
        return []
    warnings = []
    cores = machine.get("other_cpu_cores_mean")
    if isinstance(cores, int | float) and cores > BUSY_CORES:
        warnings.append(
            f"run {side.label}: other processes used {cores:.1f} processor cores on average while "
            "it was measured, which widens every interval; run on a quiet machine"
        )
    slowdowns = machine.get("slowdowns")
    held = slowdowns.items() if isinstance(slowdowns, dict) else ()
    held = [(name, share) for name, share in held if isinstance(share, int | float)]
    if held:
        shown = ", ".join(f"{name} in {share:.0%} of samples" for name, share in held)
        warnings.append(
            f"run {side.label}: clocks were held down while it was measured ({shown}), so an arm "
            "may have run at another clock than its partner; cool the GPU, or fix its clocks"
        )
    return warnings
