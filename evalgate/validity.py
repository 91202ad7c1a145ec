"""Whether the evidence can carry a verdict at all: reasons as sentences with value and remedy.

Judged before accuracy and speed. Routes and pages are judged by ``proof``, output lengths by
``lengths``, recorded fields by ``differences``; what only qualifies a verdict is in ``caveats``.
Here is the rest and the sum. No statistics of speed and no verdict.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from evalgate.caveats import list_warnings
from evalgate.columns import TimeFault
from evalgate.compare import ArmView, RequestPairs, SamplePairs
from evalgate.completeness import check_recorded
from evalgate.differences import describe_difference, is_allowed, list_differences
from evalgate.lengths import check_lengths
from evalgate.policy import Validity
from evalgate.proof import check_proof
from evalgate.records import RequestRecord


@dataclass(frozen=True)
class ValidityFindings:
    """``reasons`` make the verdict invalid; ``warnings`` qualify it; ``differing_fields`` names
    every recorded field that differs, allowed or not."""

    reasons: list[str]
    warnings: list[str]
    differing_fields: list[str]


def check_validity(
    baseline: ArmView,
    candidate: ArmView,
    requests: RequestPairs,
    samples: SamplePairs,
    limits: Validity,
    *,
    apart: bool,
    allow: Sequence[str] = (),
) -> ValidityFindings:
    """All reasons and warnings. ``apart``: the arms come from two runs that did not alternate."""
    allowed = [*limits.allow_differences, *allow]
    differences = list_differences(baseline, candidate, apart=apart)
    forced = any(v.load_spec.get("ignore_eos") for v in (baseline, candidate))
    lengths = check_lengths(requests, samples, limits, forced=forced)
    proof = check_proof(baseline, candidate, limits.require_routes)
    reasons = [
        *check_complete(baseline, candidate, requests, samples),
        *check_recorded(baseline, candidate),
        *check_died(baseline, candidate),
        *check_success(requests, samples, limits.min_success, count_unpaired=not apart),
        *check_prompts(requests, samples),
        *check_in_buckets(baseline, candidate),
        *check_prefix_cache(baseline, candidate),
        *proof.reasons,
        *check_scoring(baseline, candidate),
        *check_fidelity(baseline, candidate),
        *lengths.reasons,
        *check_durations(baseline, candidate),
        *(
            describe_difference(d, baseline, candidate)
            for d in differences
            if not d.explained and not is_allowed(d.field, allowed)
        ),
    ]
    warnings = [
        *proof.warnings,
        *lengths.warnings,
        *list_warnings(baseline, candidate, requests, samples, apart=apart),
    ]
    return ValidityFindings(reasons, warnings, [d.field for d in differences])


def check_complete(
    baseline: ArmView, candidate: ArmView, requests: RequestPairs, samples: SamplePairs
) -> list[str]:
    runs = {v.run.run_id: v for v in (baseline, candidate)}
    reasons = []
    for side in runs.values():
        if side.run.status != "complete":
            failure = (side.run.extra or {}).get("failure")
            reasons.append(
                f"run {side.label} is {side.run.status!r}, not 'complete'"
                f"{f' ({failure})' if failure else ''}: resume it with --resume, or run it again"
            )
    if not len(requests) and not len(samples):
        reasons.append(
            f"{baseline.title} and {candidate.title} have nothing in common to compare: "
            f"{_describe_contents(baseline)} against {_describe_contents(candidate)}; run both on "
            "the same buckets, prompts and tasks"
        )
    return reasons


def _describe_contents(side: ArmView) -> str:
    buckets = sorted({r.bucket for r in side.measured})
    tasks = sorted({s.task for s in side.samples})
    return (
        f"{len(side.measured)} measured requests in buckets {{{', '.join(buckets)}}} and "
        f"{len(side.samples)} samples of tasks {{{', '.join(tasks)}}}"
    )


def check_died(baseline: ArmView, candidate: ArmView) -> list[str]:
    reasons = []
    for side in (baseline, candidate):
        died = [
            r
            for r in (*side.requests, *side.samples)
            if r.error is not None and r.error.category == "server_died"
        ]
        if died:
            blocks = sorted({r.block for r in died})
            reasons.append(
                f"{side.title}: the server died in block {', '.join(map(str, blocks))} "
                f"({died[0].error.message}); see its log, fix it and run again"
            )
    return reasons


def check_success(
    requests: RequestPairs, samples: SamplePairs, min_success: float, *, count_unpaired: bool
) -> list[str]:
    """Load and each task apart. ``count_unpaired``: within one run, no partner is a failure."""
    load_failed = requests.select(np.any([side.failed for side in requests.facts], axis=0))
    groups: dict[str, tuple[int, list]] = {"load": (len(requests), load_failed)}
    by_task = defaultdict(list)
    for a, b in samples.pairs:
        by_task[f"task {a.task}"].append((a, b))
    for name, pairs in by_task.items():
        failed = [(a, b) for a, b in pairs if a.error is not None or b.error is not None]
        groups[name] = (len(pairs), failed)
    reasons = []
    for name, (n_pairs, failed) in groups.items():
        unpaired = requests.unpaired if name == "load" else (0, 0)
        lost = sum(unpaired) if count_unpaired else 0
        total = n_pairs + lost
        if not total or 1 - (len(failed) + lost) / total >= min_success:
            continue
        share = 1 - (len(failed) + lost) / total
        reasons.append(
            f"{name}: {len(failed) + lost} of {total} pairs failed "
            f"({_describe_failures(failed, unpaired if count_unpaired else (0, 0))}), success "
            f"{share:.1%} is below min_success {min_success:.1%}; find the cause and run again"
        )
    if count_unpaired and (lost := sum(samples.unpaired)):
        total = len(samples) + lost
        if 1 - lost / total < min_success:
            reasons.append(
                f"tasks: {lost} of {total} samples have no partner (baseline "
                f"{samples.unpaired[0]}, candidate {samples.unpaired[1]}), below min_success "
                f"{min_success:.1%}; run again"
            )
    return reasons


def _describe_failures(failed: Iterable[tuple], unpaired: tuple[int, int]) -> str:
    parts = []
    for i, arm in enumerate(("baseline", "candidate")):
        counts = Counter(pair[i].error.category for pair in failed if pair[i].error is not None)
        shown = [f"{category} {n}" for category, n in counts.most_common()]
        if unpaired[i]:
            shown.append(f"without a partner {unpaired[i]}")
        if shown:
            parts.append(f"{arm}: {', '.join(shown)}")
    return "; ".join(parts)


def check_prompts(requests: RequestPairs, samples: SamplePairs) -> list[str]:
    """Both arms of a pair must have read the same prompt."""
    left, right = (side.prompt_tokens for side in requests.facts)
    load = requests.select((left != right) & ~np.isnan(left) & ~np.isnan(right))
    tasks = [
        (a, b)
        for a, b in samples.pairs
        if None not in (a.prompt_tokens, b.prompt_tokens) and a.prompt_tokens != b.prompt_tokens
    ]
    reasons = []
    for name, differ, total in (("load", load, len(requests)), ("tasks", tasks, len(samples))):
        if differ:
            a, b = differ[0]
            reasons.append(
                f"{name}: prompt token counts differ in {len(differ)} of {total} pairs (first "
                f"{a.key}: baseline {a.prompt_tokens}, candidate {b.prompt_tokens}); give both "
                "arms the same tokenizer, template and prompts"
            )
    changed = [(a, b) for a, b in samples.pairs if a.prompt_sha256 != b.prompt_sha256]
    if changed:
        reasons.append(
            f"tasks: the prompts differ in {len(changed)} of {len(samples)} pairs (first "
            f"{changed[0][0].key}); run both arms with the same tasks, seed and tokenizer"
        )
    return reasons


def check_in_buckets(baseline: ArmView, candidate: ArmView) -> list[str]:
    """The server's own count decides; min_tokens is inside, max_tokens is not."""
    reasons = []
    for side in (baseline, candidate):
        buckets = {b.name: b for b in side.buckets}
        places, tokens = side.key_fields["bucket"], side.facts.prompt_tokens
        leaves = np.zeros(len(tokens), dtype=bool)
        for bucket in buckets.values():  # an unknown length is on neither side of a bound
            beyond = (tokens < bucket.min_tokens) | (tokens >= bucket.max_tokens)
            leaves |= places.find(bucket.name) & beyond
        outside = np.flatnonzero(leaves)
        if len(outside):
            first = side.measured[outside[0]]
            bucket = buckets[first.bucket]
            reasons.append(
                f"{side.title}: {len(outside)} prompts leave their bucket by the server's count "
                f"(prompt {first.prompt_id}: {first.prompt_tokens} tokens, bucket {bucket.name} "
                f"holds {bucket.min_tokens} to below {bucket.max_tokens}); build the prompts "
                "again with that server's tokenizer"
            )
        strange = sorted(set(places.distinct) - buckets.keys()) if buckets else []
        if strange:
            reasons.append(
                f"{side.title}: requests in bucket {', '.join(strange)}, which the run's spec "
                f"does not have ({', '.join(buckets)}); the folder holds records of another run"
            )
    return reasons


def check_prefix_cache(baseline: ArmView, candidate: ArmView) -> list[str]:
    """A measured prompt must be computed, not found: hits by usage and by the server's counters."""
    remedy = "send a cache salt, or a nonce at the front of each prompt, or turn the cache off"
    reasons = []
    for side in (baseline, candidate):
        hits = int(np.sum(side.facts.cached_tokens > 0))
        if hits:
            cached = int(np.nansum(side.facts.cached_tokens))
            total = int(np.nansum(side.facts.prompt_tokens))
            share = f" ({cached / total:.1%} of all prompt tokens)" if total else ""
            reasons.append(
                f"{side.title}: {hits} of {len(side.measured)} measured requests found "
                f"{cached} tokens in the prefix cache{share}; {remedy}"
            )
        for evidence in side.evidence:
            counts = evidence.prefix_cache or {}
            hits, queries = counts.get("hits"), counts.get("queries")
            if hits:
                share = f": {hits / queries:.1%}" if queries else ""
                reasons.append(
                    f"{side.title}, block {evidence.block}: the prefix cache had {hits:g} hits in "
                    f"{queries or 0:g} queries during the measured load{share}; {remedy}"
                )
    return reasons


def check_scoring(baseline: ArmView, candidate: ArmView) -> list[str]:
    """One task version and one scoring variant for each task, the same in both arms."""
    found: dict[str, list[dict[str, set]]] = defaultdict(
        lambda: [defaultdict(set), defaultdict(set)]
    )
    for i, side in enumerate((baseline, candidate)):
        for sample in side.samples:
            found[sample.task][i]["task_version"].add(sample.task_version)
            found[sample.task][i]["scoring"].add((sample.extra or {}).get("scoring"))
    reasons = []
    for task, (a, b) in sorted(found.items()):
        for key in ("task_version", "scoring"):
            if a[key] and b[key] and (a[key] != b[key] or len(a[key]) > 1):
                reasons.append(
                    f"task {task}: {baseline.title} has {key} {_join(a[key])}, {candidate.title} "
                    f"has {_join(b[key])}, and scores of different rules cannot be compared: score "
                    "or run both arms again with one evalgate"
                )
    return reasons


def check_fidelity(baseline: ArmView, candidate: ArmView) -> list[str]:
    """A replay that failed, or whose counters do not fit, is no agreement."""
    reasons = []
    for side in (baseline, candidate):
        failed = [r for r in side.fidelity if r.error is not None]
        if failed:
            reasons.append(
                f"{side.title}: {len(failed)} of {len(side.fidelity)} fidelity replays failed "
                f"(first {failed[0].sample_id}, route {failed[0].route}: "
                f"{failed[0].error.message}); find the cause and run again"
            )
    return reasons


def _join(values: set) -> str:
    return " and ".join(sorted(map(str, values)))


def check_durations(baseline: ArmView, candidate: ArmView) -> list[str]:
    reasons = []
    for side in (baseline, candidate):
        faults = np.flatnonzero(side.facts.time_fault)
        if len(faults):
            record = side.measured[faults[0]]
            fault = describe_time_fault(record, TimeFault(side.facts.time_fault[faults[0]]))
            reasons.append(
                f"{side.title}: the times of {len(faults)} requests cannot be right (first "
                f"{record.key}: {fault}); such a client clock cannot be trusted, run again"
            )
    return reasons


def describe_time_fault(record: RequestRecord, fault: TimeFault) -> str:
    """Several tokens in one chunk leave TPOT without a value, which is no fault; several chunks at
    one moment are."""
    chunks = record.chunk_ns
    match fault:
        case TimeFault.NO_CHUNK:
            return f"{record.output_tokens} output tokens, no chunk"
        case TimeFault.NOT_AFTER_SENDING:
            return f"first chunk {chunks[0]} ns after sending"
        case TimeFault.BACKWARDS:
            return "chunk times run backwards"
        case TimeFault.NO_TIME:
            return f"{len(chunks)} chunks in no time"
        case _:
            return f"stream ended at {record.end_ns} ns, before its last chunk at {chunks[-1]} ns"
