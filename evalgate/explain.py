"""Why a verdict is what it is, rule by rule, in sentences. Text only; nothing is judged here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evalgate.gate import PRECEDENCE, Verdict
from evalgate.report.words import printable
from evalgate.ruling import RuleResult


def explain(verdict: Verdict) -> str:
    """The verdict's derivation: evidence first, then each rule, then how they add up.

    What a server or a stranger's run said is made safe for a terminal.
    """
    return printable(
        "\n".join([*_explain_evidence(verdict), *_explain_rules(verdict), *_explain_sum(verdict)])
    )


def _explain_evidence(verdict: Verdict) -> Iterator[str]:
    if verdict.invalid_reasons:
        n = len(verdict.invalid_reasons)
        yield f"1. The evidence is invalid, for {n} reason{'' if n == 1 else 's'}:"
        yield from (f"   - {reason}" for reason in verdict.invalid_reasons)
    else:
        yield "1. The evidence can carry a verdict."
    if verdict.differing_fields:
        yield f"   Recorded fields that differ: {', '.join(verdict.differing_fields)}."
    yield from (f"   Note: {warning}." for warning in verdict.warnings)


def _explain_rules(verdict: Verdict) -> Iterator[str]:
    yield (
        f"2. {len(verdict.rules)} rules. One passes when its one-sided 95 % bound clears the "
        "margin, and fails when the opposite is shown at 5 % after Holm's correction."
    )
    for result in verdict.rules:
        yield f"   {result.status.upper()}  {result.rule.name}: {result.reason}."
        yield from (f"      {line}" for line in _explain_details(result, result.details))


def _explain_details(result: RuleResult, details: dict[str, Any]) -> Iterator[str]:
    unit = result.rule.definition.delta_unit
    yield (
        f"{result.rule.kind.replace('_', '-')}, margin {result.rule.margin:g} {unit}; "
        f"{result.n_pairs} pairs, {result.n_dropped} left out, {result.n_blocks} launches"
    )
    if details.get("method"):
        yield f"method: {details['method']}"
    if (looked := details.get("sequential")) is not None:
        yield (
            f"look {looked['look']}, {looked['blocks']} launches: each bound at "
            f"{looked['nominal_level']:.2%}, so that 95 % hold over all looks"
        )
    if (spread := details.get("spread")) is not None and spread["launch_share"] is not None:
        more = "launches" if spread["launch_share"] > 0.5 else "prompts or repetitions"
        yield (
            f"spread: pairs within a launch {spread['pair_sd_percent']:.2f} %, launches "
            f"{spread['launch_sd_percent']:.2f} %, so more {more} narrow the bounds most"
        )
    if details.get("p_fail") is not None:
        yield (
            f"p-value of the margin being kept: {details['p_fail']:.3g}, after Holm "
            f"{details['p_fail_holm']:.3g}"
        )
    if (least := details.get(f"mde_{unit}")) is not None:
        yield f"least true change that this design shows (95 %, power 80 %): {least:.2f} {unit}"
    floor = details.get("noise_floor")
    if floor and floor["ci_low"] is not None:
        yield (
            f"baseline against baseline: {floor['observed']:+.2f} ({floor['ci_low']:+.2f} to "
            f"{floor['ci_high']:+.2f}) {unit}"
        )


def _explain_sum(verdict: Verdict) -> Iterator[str]:
    counts = {s: sum(r.status == s for r in verdict.rules) for s in PRECEDENCE}
    shown = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
    yield (
        f"3. Invalid comes before fail, fail before inconclusive, and pass needs every rule "
        f"({shown}): {verdict.status.upper()}, exit code {verdict.exit_code}."
    )
