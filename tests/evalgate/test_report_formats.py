"""The verdict as text, JSON, Markdown and JUnit: the answer first, foreign text harmless."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import factories
import pytest
from report_cases import HOSTILE, make_rich_case, make_rule, make_stats, make_verdict

from evalgate import cli
from evalgate.compare import views_of_run
from evalgate.errors import EvidenceError, UsageError
from evalgate.gate import judge
from evalgate.policy import DEFAULT
from evalgate.report import FORMATS, Context, render
from evalgate.report.markdown import escape
from evalgate.report.text import render_text
from evalgate.report.words import (
    compute_threshold,
    describe_method,
    describe_rule,
    format_change,
    format_interval,
    format_ms,
    printable,
    shorten,
)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("status", ["pass", "fail", "inconclusive", "invalid"])
def test_every_format_renders_every_status_as_a_word(format_name, status):
    text = render(format_name, make_verdict(status))
    word = {"json": f'"status": "{status}"'}.get(format_name, status.upper())
    assert word in text


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_verdict_without_rules_or_figures_renders(format_name):
    empty = make_verdict("invalid", rules=[], summary={}, invalid_reasons=["nothing in common"])
    assert "nothing in common" in render(format_name, empty)


def test_the_command_line_offers_every_format():
    assert cli.FORMATS == FORMATS  # written there again: importing the reports takes a while


def test_an_unknown_format_is_a_usage_error_that_names_the_right_ones():
    with pytest.raises(UsageError, match="'pdf' is not one of text, json, markdown, html, junit"):
        render("pdf", make_verdict())


@pytest.mark.parametrize("format_name", [f for f in FORMATS if f != "json"])
def test_a_verdict_of_another_version_is_refused_by_its_number(format_name):
    with pytest.raises(EvidenceError, match="schema_version is 7"):
        render(format_name, make_verdict(schema_version=7))


def test_an_unknown_status_of_a_rule_is_refused():
    with pytest.raises(EvidenceError, match="'tpot 8K-16K': status is 'green'"):
        render("text", make_verdict(rules=[make_rule(status="green")]))


@pytest.mark.parametrize(
    ("metric", "kind", "threshold"),
    [
        ("tpot", "non_inferiority", 1.0),  # a loss is a longer time
        ("tpot", "superiority", -1.0),
        ("output_throughput", "non_inferiority", -1.0),  # a loss is a lower rate
        ("output_throughput", "superiority", 1.0),
        ("logprob_gap", "non_inferiority", 1.0),
        ("score", "non_inferiority", -1.0),
    ],
)
def test_a_margin_lies_on_the_side_where_the_metric_loses_or_gains(metric, kind, threshold):
    assert compute_threshold(make_rule(metric=metric, kind=kind, margin=1.0)) == threshold


def test_numbers_are_shown_with_sign_and_unit_and_absence_as_a_dash():
    assert format_change(0.536, "percent") == "+0.54 %"
    assert format_change(-1.2, "points") == "-1.20 pt"
    assert format_change(None, "percent") == "–"
    assert format_change(float("nan"), "percent") == "–"
    assert format_interval(-0.4, 2.1) == "-0.40 … +2.10"
    assert format_interval(None, 2.1) == "– … +2.10"
    assert format_interval(None, None) == "–"
    assert [format_ms(s) for s in (0.0812, 0.5, 2.2, None)] == ["81.20", "500.0", "2,200", "–"]


def test_control_and_direction_characters_are_spelt_out():
    assert printable("a\x1b[31mb\u202ec\r\nd\te\x00") == "a\\u001b[31mb\\u202ec\nd\te\\u0000"
    assert shorten("abcdef", 4) == "abcd… (2 more characters)"


def test_a_rule_whose_name_does_not_say_what_it_judges_gets_a_note():
    named = describe_rule(make_rule("tpot 8K-16K"), "pass")
    other = describe_rule(make_rule("decode speed", n_dropped=3), "pass")
    assert named.notes == ()
    assert other.notes == ("TPOT, bucket 8K-16K", "3 pairs left out")


def test_a_rule_that_passed_is_not_shown_as_passed_when_the_evidence_is_invalid():
    assert describe_rule(make_rule(), "invalid").status.word == "INVALID"
    assert "PASS" not in render("text", make_verdict("invalid"))


def test_text_gives_verdict_and_reasons_before_the_rules():
    verdict, _ = make_rich_case()
    lines = render_text(verdict).splitlines()
    assert lines[0].startswith("✗ FAIL")
    assert "ttft 16K-32K: the lower 95 % bound +35.00 %" in lines[1]
    assert "What would settle the open rules" in lines
    assert "\x1b" not in render_text(verdict)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_text_keeps_to_its_width_and_shows_whole_numbers(width):
    verdict, _ = make_rich_case()
    text = render_text(verdict, width=width)
    assert max(map(len, text.splitlines())) <= width
    row = next(line for line in text.splitlines() if "+38.20 %" in line)
    for cell in ("✗ FAIL", "+35.00 … +41.00", "< +1.00 %"):
        assert cell in row
    assert "120" in row or "pairs 120" in text


def test_colour_is_added_only_when_asked_for():
    assert "\x1b[1;31m✗ FAIL" in render_text(make_verdict("fail"), colour=True)


def test_rich_markup_in_foreign_text_is_shown_not_obeyed():
    text = render_text(make_verdict(warnings=["[bold]not bold[/bold] :smile:"]))
    assert "[bold]not bold[/bold] :smile:" in text


def test_json_refuses_nan_and_keeps_the_order_of_keys():
    assert list(json.loads(render("json", make_verdict()))) == list(make_verdict())
    with pytest.raises(ValueError, match="JSON compliant"):
        render("json", make_verdict(rules=[make_rule(observed=float("nan"))]))


def test_markdown_escapes_what_would_form_markup_links_mentions_or_cells():
    assert escape("a|b `c` [d](http://e) <img> @f") == (
        "a\\|b \\`c\\` \\[d\\](http&#58;//e) &lt;img&gt; @<!-- -->f"
    )
    assert [escape(s) for s in ("# x", "- x", "1. x", "-1.00")] == [
        "\\# x",
        "\\- x",
        "1\\. x",
        "-1.00",
    ]


def test_markdown_tables_have_the_same_number_of_cells_in_every_row():
    verdict, _ = make_rich_case()
    blocks = [b for b in render("markdown", verdict).split("\n\n") if b.startswith("| ")]
    assert len(blocks) == 5
    for block in blocks:
        assert len({row.replace("\\|", "").count("|") for row in block.splitlines()}) == 1


def test_junit_has_a_case_for_each_rule_with_its_outcome():
    verdict, _ = make_rich_case()
    root = ET.fromstring(render("junit", verdict))
    suite = root.find("testsuite")
    cases = suite.findall("testcase")
    outcomes = [
        next((e.tag for e in case if e.tag in ("failure", "skipped", "error")), "passed")
        for case in cases
    ]
    assert [case.get("name") for case in cases] == [printable(r["name"]) for r in verdict["rules"]]
    assert outcomes == [
        "passed",
        "passed",
        "passed",
        "skipped",
        "failure",
        "failure",
        "passed",
        "skipped",
    ]
    for element in (root, suite):
        counts = [element.get(k) for k in ("tests", "failures", "errors", "skipped")]
        assert counts == ["8", "2", "0", "2"]


def test_junit_of_invalid_evidence_has_an_error_for_each_reason_and_no_passed_rule():
    verdict = make_verdict("invalid", invalid_reasons=[f"cache hits {HOSTILE}", "no routes"])
    suite = ET.fromstring(render("junit", verdict)).find("testsuite")
    assert len(suite.findall("testcase/error")) == 2
    assert suite.find("testcase/skipped").get("message") == ("not judged: the evidence is invalid")
    assert suite.get("errors") == "2"


def test_percentiles_of_nothing_are_shown_as_absent():
    verdict = make_verdict()
    assert make_stats([])["p99"] is None
    row = next(line for line in render_text(verdict).splitlines() if "E2EL" in line)
    assert row.split()[-6:] == ["0", "–", "–", "–", "–", "–"]


def test_the_noise_floor_and_the_method_stand_beside_the_change():
    verdict, _ = make_rich_case()
    words = describe_rule(verdict["rules"][0], "fail")
    assert words.notes[-1] == "noise -0.30 … +0.50 %, resolves 0.38 %"
    assert words.method == "Student's t over launches; smallest detectable effect 0.41 %"


def test_identical_outputs_are_shown_beside_base_against_base():
    verdict, _ = make_rich_case()
    lines = [line.split() for line in render_text(verdict).splitlines()]
    assert ["all", "requests", "50.0", "75.0"] in lines
    assert "| all requests | 50.0 | 75.0 |" in render("markdown", verdict)


def test_fidelity_is_shown_by_length_beside_the_second_pass():
    rule = make_rule(
        "top-1 agreement",
        metric="top1_agreement",
        bucket=None,
        unit="points",
        n_pairs=2,
        details={
            "yardstick_value": 1.0,
            "value": 0.9775,
            "buckets": {"4K-8K": {"n": 1, "yardstick_value": 1.0, "value": 0.965}},
        },
    )
    verdict = {**make_rich_case()[0], "rules": [rule]}
    for line in (
        "| top-1 agreement (0-1) | all | 1.0000 | 0.9775 | 2 |",
        "| top-1 agreement (0-1) | 4K-8K | 1.0000 | 0.9650 | 1 |",
    ):
        assert line in render("markdown", verdict)
    assert "0.9650" in render_text(verdict)
    assert "Token fidelity by length" in render("html", verdict)
    assert "Token fidelity" not in render("markdown", make_rich_case()[0])


def test_scores_are_shown_by_depth_of_the_answer():
    verdict = make_rich_case()[0]
    for arm, mean in (("baseline", 0.5), ("candidate", 0.25)):
        task = verdict["summary"][arm]["tasks"].setdefault("retrieval", {"n": 4, "mean": mean})
        task["depths"] = {"4K-8K": {"0": {"n": 2, "mean": 1.0}, "0.5": {"n": 2, "mean": mean}}}
    assert "| task | bucket | depth 0 | depth 0.5 |" in render("markdown", verdict)
    assert "| retrieval | 4K-8K | 100.0 / 100.0 | 50.0 / 25.0 |" in render("markdown", verdict)
    assert "50.0 / 25.0" in render_text(verdict)
    assert "Accuracy by depth" in render("html", verdict)


def test_an_open_rule_says_how_much_more_would_settle_it():
    verdict, _ = make_rich_case()
    assert "tpot 16K-32K: about 9 more launches" in render_text(verdict)


@pytest.mark.parametrize("format_name", FORMATS)
def test_what_the_gate_says_renders_in_every_format(format_name):
    changes = [1.0] * 40 + [0.0] * 4
    stored = factories.make_stored(
        factories.simulate_requests(blocks=3, prompts=2, tpot_change=0.5),
        factories.make_pair_of_samples([1.0] * 44, changes),
    )
    calibration = factories.make_stored(factories.simulate_requests(blocks=3, prompts=2, seed=5))
    verdict = judge(*views_of_run(stored), DEFAULT, calibration=calibration, apart=False)
    text = render(format_name, verdict.to_json(), Context.of_run(stored))
    assert verdict.status in text.lower()
    assert all(rule.rule.name in text for rule in verdict.rules)


def test_a_rule_of_a_run_that_stopped_by_its_results_says_which_look_it_is():
    looked = {"look": 3, "blocks": 5, "error_rate_spent": 0.4, "nominal_level": 0.9912}
    rule = {"unit": "percent", "details": {"method": "Student's t", "sequential": looked}}
    assert describe_method(rule) == (
        "Student's t; look 3, each bound at 99.1% so that 95 % hold over all looks"
    )
    assert describe_method({"unit": "percent", "details": {"method": "t"}}) == "t"
