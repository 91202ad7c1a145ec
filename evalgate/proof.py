"""Proof that the candidate ran what it claims: routes that were taken, INT8 pages, sound answers.

A patched server that quietly serves the stock kernels, or scales its cache wrongly, gives numbers
too. The evidence is what each launch recorded of itself; the module judges it and knows no
server. A reason makes the run invalid, a warning does not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from evalgate.compare import ArmView
from evalgate.records import LaunchEvidence, is_finite
from evalgate.routes import FALLBACK, merge_forms, strip_form

PLAIN_FORM = "_torch"  # routes served by the plain form of a kernel carry this ending
INT8 = "int8"
DTYPE_FLAG = "--kv-cache-dtype"
BYTES_KEY = "bytes_per_token_per_layer"
UNIT_SCALES_KEY = "unit_scales"


@dataclass
class Findings:
    """Sentences that make evidence invalid, and sentences that only qualify it."""

    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_proof(baseline: ArmView, candidate: ArmView, required: list[str]) -> Findings:
    """Judge routes, pages, planted faults and the first answers after the start."""
    found = Findings()
    if required:
        _check_required(candidate, required, found)
        _check_untouched(baseline, required, found)
    elif candidate.patch and (count := _count_routes(candidate).get(FALLBACK)):
        found.warnings.append(f"{candidate.title}: {count} launches went to the fallback route")
    for side in (baseline, candidate):
        _check_pages(side, None if side is baseline else baseline, found)
        _check_scales(side, found)
        _check_fault(side, found)
    _check_canary(baseline, candidate, found)
    return found


def _check_required(candidate: ArmView, required: list[str], found: Findings) -> None:
    counts = _count_routes(candidate)
    remedy = "check that the patch is active in that server and that prompts reach the route"
    for route in required:
        if counts.get(route):
            continue
        if plain := counts.get(route + PLAIN_FORM):
            found.reasons.append(
                f"{candidate.title}: route {route} was served {plain} times by its plain form "
                f"({route}{PLAIN_FORM}), not by the native kernel that require_routes asks for; "
                "let the native kernel load (a C++ compiler is needed) and run again"
            )
        elif forms := [name for name in counts if counts[name] and strip_form(name) == route]:
            found.reasons.append(
                f"{candidate.title}: route {route} was served by {', '.join(forms)} alone; name "
                "that form in require_routes where it is what is measured"
            )
        else:
            found.reasons.append(
                f"{candidate.title}: route {route} is required and was never counted; {remedy}"
            )
    if count := counts.get(FALLBACK):
        found.reasons.append(
            f"{candidate.title}: {count} launches went to the fallback route, so the numbers are "
            f"partly the stock kernels'; {remedy}"
        )
    proofs = [e for e in candidate.evidence if e.routes is not None]
    if idle := [e.block for e in proofs if e.patch and e.patch.get("active") is False]:
        found.reasons.append(
            f"{candidate.title}, block {', '.join(map(str, idle))}: the patch does not serve every "
            f"attention layer, so the numbers are partly the stock kernels'; {remedy}"
        )
    if counts and not proofs:
        found.warnings.append(
            f"{candidate.title}: routes are counted, but not reconciled with layers x steps, as "
            "the run stored no evidence by launch"
        )
    if proofs and (missing := _list_blocks(candidate) - {e.block for e in proofs}):
        found.reasons.append(
            f"{candidate.title}: no route counts of block {', '.join(map(str, sorted(missing)))}; "
            "run again with the counters readable"
        )
    requests = defaultdict(int)
    for record in (*candidate.requests, *candidate.samples):
        requests[record.block] += 1
    for evidence in proofs:
        for route in required:
            if counts.get(route):
                _reconcile(candidate, evidence, route, requests[evidence.block], found)


def _reconcile(
    side: ArmView, evidence: LaunchEvidence, route: str, n_requests: int, found: Findings
) -> None:
    """Launches are layers x steps, and steps are what the requests needed.

    An asynchronous scheduler may run one step past a stop, so each request may add one. What the
    requests needed of a route its forms serve together.
    """
    where = f"{side.title}, block {evidence.block}, route {route}"
    launches = (evidence.routes or {}).get(route, 0)
    base = strip_form(route)
    expected = evidence.expected_steps.get(base, 0) if evidence.expected_steps else None
    if not launches and expected is None:
        found.reasons.append(
            f"{where}: never counted in this launch, though in others; see the server's log"
        )
        return
    if evidence.layers is None:
        found.reasons.append(
            f"{where}: {launches} launches, but the number of layers is not known, so they prove "
            "nothing; run again with a server that reports it"
        )
        return
    steps = (evidence.route_steps or {}).get(route)
    per_layer = (evidence.per_layer or {}).get(route) or []
    each = per_layer[0] if steps is None and per_layer else steps
    if uneven := [n for n in per_layer if n != each]:
        found.reasons.append(
            f"{where}: {len(uneven)} of {len(per_layer)} layers launched it otherwise than once in "
            f"each of {each} steps (from {min(uneven)} to {max(uneven)} times); some layers did "
            "not take the route, see the server's log"
        )
    elif steps is not None and launches != evidence.layers * steps:
        found.reasons.append(
            f"{where}: {launches} launches, but {evidence.layers} layers x {steps} steps are "
            f"{evidence.layers * steps}; some layers did not take the route, see the server's log"
        )
    if expected is None:
        if steps is None:
            found.reasons.append(
                f"{where}: {launches} launches, but no count of steps to hold them against; run "
                "again with a server that reports it"
            )
        return
    least, most = evidence.layers * expected, evidence.layers * (expected + n_requests)
    served = merge_forms(evidence.routes or {})[base]
    if not least <= served <= most:
        found.reasons.append(
            f"{where}: {served} launches, but the requests needed {expected} steps in "
            f"{evidence.layers} layers ({least} to {most} launches); another client used the "
            "server, or the route was not taken throughout"
        )


def _check_untouched(baseline: ArmView, required: list[str], found: Findings) -> None:
    counts = _count_routes(baseline)
    for route in required:
        for name in (route, route + PLAIN_FORM):
            if count := counts.get(name):
                found.reasons.append(
                    f"{baseline.title}: the baseline took route {name} {count} times, so it is "
                    "patched too; start it without the patch"
                )


def _check_pages(side: ArmView, baseline: ArmView | None, found: Findings) -> None:
    """INT8 that was asked for must be INT8 that is there (bytes below an unpatched baseline's)."""
    if not _asks_int8(side):
        return
    dtype = side.record.kv_cache_dtype
    pages = [e.kv_cache for e in side.evidence]
    remedy = "the server runs another cache than asked for: see its log, fix it and run again"
    if dtype is not None and not dtype.startswith(INT8):
        found.reasons.append(
            f"{side.title} asked for an INT8 KV cache and serves {dtype!r}; {remedy}"
        )
        return
    for evidence in side.evidence:
        reported = (evidence.kv_cache or {}).get("dtype")
        if reported is None or not str(reported).removeprefix("torch.").startswith(INT8):
            found.reasons.append(
                f"{side.title}, block {evidence.block}: asked for an INT8 KV cache and its worker "
                f"reports {'nothing' if reported is None else repr(reported)}; {remedy}"
            )
    if not pages:
        if dtype is None:
            found.reasons.append(
                f"{side.title} asked for an INT8 KV cache and nothing shows what it serves; "
                "run again with a server that reports it"
            )
        else:
            found.warnings.append(
                f"{side.title}: the INT8 KV cache rests on the server's word {dtype!r}; the run "
                "stored no page dtype and bytes a token of the live worker"
            )
        return
    own, theirs = _read_bytes(side), _read_bytes(baseline) if baseline else None
    if own is not None and theirs is not None and not _asks_int8(baseline) and own >= theirs:
        found.reasons.append(
            f"{side.title}: its KV cache takes {own:g} bytes a token and layer, not less than the "
            f"baseline's {theirs:g}; {remedy}"
        )


def _check_scales(side: ArmView, found: Findings) -> None:
    """With max|K| 4.5 a step of 1.0 errs by up to 0.5, where 4.5/127 = 0.0354 errs by 0.0177."""
    if any((e.kv_cache or {}).get(UNIT_SCALES_KEY) for e in side.evidence):
        found.warnings.append(
            f"{side.title}: its log says that the scales of the KV cache are 1.0, as the "
            "checkpoint has none: calibrate them, or judge accuracy as that of such a cache"
        )


def _check_fault(side: ArmView, found: Findings) -> None:
    faults = {str(e.patch["fault"]) for e in side.evidence if e.patch and e.patch.get("fault")}
    if faults:
        found.warnings.append(f"{side.title}: runs with the planted fault {', '.join(faults)}")


def _check_canary(baseline: ArmView, candidate: ArmView, found: Findings) -> None:
    """A first answer that differs from later ones is a fault unless the baseline's does too."""
    changed = [_list_changed_canaries(side) for side in (baseline, candidate)]
    if changed[1] and not changed[0]:
        cold, warm = changed[1][0]
        found.reasons.append(
            f"{candidate.title}: the first answer after the start differs from a later one "
            f"({cold[:40]!r}, then {warm[:40]!r}) and the baseline's does not; the candidate's "
            "first batches are not to be trusted, fix it and run again"
        )
    elif changed[1]:
        found.warnings.append(
            "the first answer after the start differs from a later one in both arms: a near tie, "
            "or an unsound first batch in both"
        )


def _list_changed_canaries(side: ArmView) -> list[tuple[str, str]]:
    texts = [
        ((e.canary or {}).get("cold_text"), (e.canary or {}).get("warm_text"))
        for e in side.evidence
    ]
    return [(c, w) for c, w in texts if isinstance(c, str) and isinstance(w, str) and c != w]


def _count_routes(side: ArmView) -> dict[str, int]:
    """Launches by route: of the launches that count, else what the arm as a whole recorded."""
    proofs = [e.routes for e in side.evidence if e.routes is not None]
    if not proofs:
        return side.record.routes or {}
    total: dict[str, int] = defaultdict(int)
    for routes in proofs:
        for route, count in routes.items():
            total[route] += count
    return total


def _list_blocks(side: ArmView) -> set[int]:
    return {r.block for r in (*side.measured, *side.samples)}


def _asks_int8(side: ArmView) -> bool:
    args = side.arm_spec.get("args") or []
    flags = [a.partition("=") for a in args]
    values = [v for f, _, v in flags if f == DTYPE_FLAG]
    values += [b for a, b in pairwise(args) if a == DTYPE_FLAG]
    return any(INT8 in str(v) for v in (side.patch, *values) if v)


def _read_bytes(side: ArmView) -> float | None:
    """The most bytes that a token takes in a layer; a worker lists them where layers differ."""
    values: list[Any] = []
    for evidence in side.evidence:
        value = (evidence.kv_cache or {}).get(BYTES_KEY)
        values += value if isinstance(value, list) else [value]
    return max((v for v in values if isinstance(v, int | float) and is_finite(v)), default=None)
