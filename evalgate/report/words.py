"""How a verdict is put into words: status words and signs, numbers, rules, and clean foreign text.

Every format shares this page, so that a rule reads the same in a terminal, in a pull request and in
a browser. A status is always a word with a sign, never a colour alone. The module reads the JSON
verdict and nothing else; it knows no format and no file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evalgate.errors import EvidenceError
from evalgate.metrics import METRICS

VERDICT_SCHEMA_VERSION = 1
ARMS = ("baseline", "candidate")
ABSENT = "–"
INTERVAL_NOTE = (
    "Changes are candidate against baseline with their raw sign; an interval holds the two "
    "one-sided 95 % bounds; pt: points of 100."
)
UNIT_SIGNS = {"percent": "%", "points": "pt"}

Verdict = Mapping[str, Any]
Rule = Mapping[str, Any]


@dataclass(frozen=True)
class Status:
    """A status as shown: the word says it, the sign lets the eye find it, the meaning explains."""

    key: str
    word: str
    sign: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.sign} {self.word}"


STATUSES = {
    s.key: s
    for s in (
        Status("pass", "PASS", "✓", "every rule cleared its margin"),
        Status("fail", "FAIL", "✗", "at least one rule did not reach its margin"),
        Status("inconclusive", "INCONCLUSIVE", "?", "the evidence does not settle every rule"),
        Status("invalid", "INVALID", "!", "the evidence cannot carry a verdict"),
    )
}


@dataclass(frozen=True)
class RuleWords:
    """One rule as every format shows it.

    ``notes`` go below its name: metric, task and bucket where the name does not say as much, pairs
    that were left out, the noise floor. ``method`` says how the interval came about; ``unsettled``
    is what an open rule still needs, else None.
    """

    name: str
    status: Status
    change: str
    interval: str
    margin: str
    pairs: str
    launches: str
    notes: tuple[str, ...]
    reason: str
    method: str
    unsettled: str | None


def check_verdict(verdict: Verdict) -> None:
    """Raises EvidenceError for a verdict of another version or with an unknown status."""
    version = verdict.get("schema_version")
    if version != VERDICT_SCHEMA_VERSION:
        raise EvidenceError(
            f"verdict: schema_version is {version!r}; this evalgate renders version "
            f"{VERDICT_SCHEMA_VERSION}: judge the stored run again with `evalgate gate`"
        )
    for where, status in [("verdict", verdict["status"])] + [
        (f"rule {r['name']!r}", r["status"]) for r in verdict["rules"]
    ]:
        if status not in STATUSES:
            raise EvidenceError(
                f"{where}: status is {status!r}, not one of {', '.join(STATUSES)}: judge the "
                "stored run again with `evalgate gate`"
            )


def describe_rule(rule: Rule, overall: str) -> RuleWords:
    """Words for one rule. Under an invalid verdict a rule that passed is shown as not judged."""
    key = rule["status"]
    if overall == "invalid" and key == "pass":
        key = "invalid"
    unit = rule["unit"]
    return RuleWords(
        name=printable(rule["name"]),
        status=STATUSES[key],
        change=format_change(rule["observed"], unit),
        interval=format_interval(rule["ci_low"], rule["ci_high"]),
        margin=format_margin(rule),
        pairs=format_count(rule["n_pairs"]),
        launches=format_count(rule["n_blocks"]),
        notes=tuple(_describe_notes(rule)),
        reason=printable(rule["reason"] or ""),
        method=describe_method(rule),
        unsettled=_describe_needed(rule) if key == "inconclusive" else None,
    )


def describe_scope(rule: Rule) -> str:
    """What the rule looks at, for example ``TPOT, bucket 8K-16K`` or ``score, task retrieval``."""
    metric = METRICS.get(rule["metric"])
    parts = [metric.label if metric else printable(rule["metric"])]
    parts += [f"{k} {printable(rule[k])}" for k in ("task", "bucket") if rule[k] is not None]
    return ", ".join(parts)


def compute_threshold(rule: Rule) -> float | None:
    """Where on the axis of changes the rule's margin lies, in the rule's unit.

    A loss of ``margin`` for non-inferiority, a gain of ``margin`` for superiority; the sign of a
    loss is the metric's. None for a metric that this version does not know, or without a margin.
    """
    metric = METRICS.get(rule["metric"])
    if metric is None or rule["margin"] is None:
        return None
    gain = 1.0 if metric.higher_is_better else -1.0
    return (gain if rule["kind"] == "superiority" else -gain) * abs(rule["margin"])


def is_better_upwards(rule: Rule) -> bool | None:
    """Whether a positive change is a gain; None for an unknown metric."""
    metric = METRICS.get(rule["metric"])
    return None if metric is None else metric.higher_is_better


def format_change(value: float | None, unit: str) -> str:
    """``+0.54 %`` or ``-1.20 pt``; the dash for an absent value."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:+.2f} {UNIT_SIGNS[unit]}"


def format_interval(low: float | None, high: float | None) -> str:
    """``+0.12 … +0.95``, in the rule's unit; a missing side is the dash, two are one dash."""
    if low is None and high is None:
        return ABSENT
    return " … ".join(ABSENT if v is None else f"{v:+.2f}" for v in (low, high))


def format_margin(rule: Rule) -> str:
    """The margin as what must be cleared: ``> -1.00 %``, ``< +2.00 %``."""
    threshold = compute_threshold(rule)
    if threshold is None:
        return ABSENT
    side = ">" if is_better_upwards(rule) else "<"
    return f"{side} {format_change(threshold + 0.0, rule['unit'])}"


def format_count(n: int | None) -> str:
    return ABSENT if n is None else f"{n:,}"


def describe_noise_floor(rule: Rule) -> str | None:
    """What base against base showed for the same rule, and the smallest effect that it resolves.

    None without a calibration.
    """
    floor = (rule["details"] or {}).get("noise_floor")
    if not floor:
        return None
    if floor.get("ci_low") is None:
        text = f"noise {format_change(floor.get('observed'), rule['unit'])}"
    else:
        interval = format_interval(floor["ci_low"], floor.get("ci_high"))
        text = f"noise {interval} {UNIT_SIGNS[rule['unit']]}"
    if floor.get("smallest_effect") is not None:
        text += f", resolves {format_size(floor['smallest_effect'], rule['unit'])}"
    return text


def describe_method(rule: Rule) -> str:
    """Method, look, smallest detectable effect and McNemar's p, as far as the details hold them."""
    details = rule["details"] or {}
    parts = [printable(details["method"])] if details.get("method") else []
    if (looked := details.get("sequential")) is not None:
        parts.append(
            f"look {looked['look']}, each bound at {looked['nominal_level']:.1%} so that 95 % hold "
            "over all looks"
        )
    smallest = details.get(f"mde_{rule['unit']}")
    if smallest is not None:
        parts.append(f"smallest detectable effect {format_size(smallest, rule['unit'])}")
    if details.get("mcnemar_p") is not None:
        parts.append(f"exact McNemar p {details['mcnemar_p']:.3g}")
    return "; ".join(parts)


def format_size(value: float, unit: str) -> str:
    """A magnitude: ``0.40 %``."""
    return f"{abs(value):.2f} {UNIT_SIGNS[unit]}"


def format_ms(seconds: float | None) -> str:
    """Milliseconds with about four digits; thousands are grouped."""
    if seconds is None:
        return ABSENT
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 100 else f"{ms:.2f}"


def format_number(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def format_score(value: float | None) -> str:
    """A 0-to-1 score in points of 100, as the field's tables give it."""
    return ABSENT if value is None else f"{value * 100:.2f}"


# C0 and C1 controls but tab and line feed: a terminal obeys some, XML 1.0 forbids most.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# Marks that turn the direction of writing, with which foreign text can hide what it says.
_DIRECTION = re.compile(r"[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """Foreign text made safe to show: control and direction characters become ``\\uXXXX``."""

    def spell(match: re.Match[str]) -> str:
        return f"\\u{ord(match.group()):04x}"

    plain = str(text).replace("\r\n", "\n")
    return _DIRECTION.sub(spell, _CONTROLS.sub(spell, plain))


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters, with the number of those left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def _describe_notes(rule: Rule) -> Iterator[str]:
    if not _names_its_scope(rule):
        yield describe_scope(rule)
    if rule["n_dropped"]:
        yield f"{rule['n_dropped']:,} pairs left out"
    floor = describe_noise_floor(rule)
    if floor:
        yield floor


def _describe_needed(rule: Rule) -> str:
    needed = (rule["details"] or {}).get("needed_more")
    if not needed:
        return printable(rule["reason"] or "")
    return printable(f"about {needed['more']:,} more {needed['unit']}")


def _names_its_scope(rule: Rule) -> bool:
    """Whether the free name already holds metric, task and bucket; a task implies its score."""
    metric = METRICS.get(rule["metric"])
    name = rule["name"].casefold()
    wanted = [rule[k] for k in ("task", "bucket") if rule[k] is not None]
    if rule["metric"] != "score" or rule["task"] is None:
        wanted.append(metric.label if metric else rule["metric"])
    return all(w.casefold() in name for w in wanted)
