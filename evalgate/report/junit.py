"""The verdict as JUnit XML, for CI systems that show test cases.

One test case a rule: fail is a failure, inconclusive is skipped with its reason. Validity is a test
case for each reason, as an error; when the evidence is invalid, no rule shows as passed.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from evalgate.report.words import (
    STATUSES,
    RuleWords,
    Verdict,
    check_verdict,
    describe_rule,
    printable,
)


def render_junit(verdict: Verdict) -> str:
    """A ``testsuites`` document with one suite, in the shape that Jenkins' reader takes."""
    check_verdict(verdict)
    suite = ET.Element("testsuite", name="evalgate")
    for i, reason in enumerate(verdict["invalid_reasons"], start=1):
        case = ET.SubElement(suite, "testcase", classname="evalgate.validity", name=f"reason {i}")
        sentence = printable(reason)
        ET.SubElement(case, "error", message=sentence, type="invalid").text = sentence
    for rule in verdict["rules"]:
        words = describe_rule(rule, verdict["status"])
        classname = f"evalgate.{printable(rule['metric'])}"
        case = ET.SubElement(suite, "testcase", classname=classname, name=words.name)
        _add_outcome(case, words)
        ET.SubElement(case, "system-out").text = _describe(words)
    if verdict["warnings"]:
        warnings = "\n".join(printable(w) for w in verdict["warnings"])
        ET.SubElement(suite, "system-err").text = warnings
    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    root = ET.Element("testsuites", name=f"evalgate: {STATUSES[verdict['status']].word}")
    root.append(suite)
    for element in (root, suite):
        for key, count in counts.items():
            element.set(key, str(count))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _add_outcome(case: ET.Element, words: RuleWords) -> None:
    if words.status.key == "fail":
        ET.SubElement(case, "failure", message=words.reason, type="fail").text = words.reason
    elif words.status.key == "inconclusive":
        ET.SubElement(case, "skipped", message=words.reason)
    elif words.status.key == "invalid":
        ET.SubElement(case, "skipped", message="not judged: the evidence is invalid")


def _describe(words: RuleWords) -> str:
    parts = [
        f"change {words.change}, one-sided 95 % bounds {words.interval}, must be {words.margin}",
        f"pairs {words.pairs}, launches {words.launches}",
        *words.notes,
        *([words.method] if words.method else []),
    ]
    return "; ".join(parts)
