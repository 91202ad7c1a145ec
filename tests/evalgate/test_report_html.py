"""The HTML page: whole, self-contained, and deaf to what foreign text says."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import factories
import pytest
from msgspec.structs import replace
from report_cases import HOSTILE, SECTIONS, make_rich_case, make_rule, make_verdict

from evalgate.report import Context, render
from evalgate.report.evidence import (
    MAX_DIFFERENCES,
    MAX_FAILURES,
    MAX_POINTS,
    collect_evidence,
)


class Page(HTMLParser):
    """Tags, attributes and running text of a page, as a browser would see them."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.stack: list[str] = []
        self.feed(text)
        assert self.stack == [], f"not closed: {self.stack}"

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render("html", *make_rich_case()))


def test_the_page_holds_every_section(page):
    for heading in SECTIONS:
        assert heading in page.text


def test_verdict_and_reasons_come_before_everything_else(page):
    order = [page.text.index(s) for s in ("✗ FAIL", "+35.00 % is above", "Warnings", "Rules")]
    assert order == sorted(order)


def test_foreign_text_forms_no_tag_and_no_attribute(page):
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count('<script>alert("x")</script>') > 10
    assert "\x1b" not in page.text


def test_the_page_loads_nothing_and_forbids_scripts(page):
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    links = [v for name, v in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(link.startswith("#m-") for link in links)
    policy = next(v for name, v in page.attributes if v and v.startswith("default-src"))
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")


def test_styles_load_nothing_either():
    style = re.search(r"<style>(.*?)</style>", render("html", make_verdict()), re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_every_marker_that_is_drawn_is_defined(page):
    used = {v.removeprefix("#") for name, v in page.attributes if name == "href"}
    defined = {v for name, v in page.attributes if name == "id"}
    assert used <= defined
    assert {"m-baseline", "m-candidate", "m-failed", "m-same"} <= used


def test_a_status_is_a_word_and_a_sign_wherever_it_is_a_colour():
    text = render("html", *make_rich_case())
    for key, content in re.findall(r'class="status (\w+)">([^<]*)<', text):
        assert (
            content
            == {
                "pass": "✓ PASS",
                "fail": "✗ FAIL",
                "inconclusive": "? INCONCLUSIVE",
                "invalid": "! INVALID",
            }[key]
        )


def test_a_verdict_alone_makes_a_page_without_what_needs_records():
    page = Page(render("html", make_verdict()))
    assert "Changes against margins" in page.text
    assert "Latency distributions" not in page.text


def test_a_run_without_a_single_success_makes_a_page():
    stored = factories.make_stored(
        [factories.make_request(arm, error="connect") for arm in ("baseline", "candidate")]
    )
    verdict = make_verdict("invalid", rules=[], summary={}, invalid_reasons=["all failed"])
    page = Page(render("html", verdict, Context.of_run(stored)))
    assert "planted connect" in page.text
    assert "Latency distributions" not in page.text


def test_outputs_are_compared_pair_by_pair_and_parted_where_they_differ():
    requests = [
        factories.make_request("baseline", prompt_id="p0", output_text="Rome is old"),
        factories.make_request("candidate", prompt_id="p0", output_text="Rome is new"),
        factories.make_request("baseline", prompt_id="p1", output_text="same"),
        factories.make_request("candidate", prompt_id="p1", output_text="same"),
        factories.make_request("candidate", prompt_id="only here", output_text="x"),
    ]
    evidence = collect_evidence(Context.of_run(factories.make_stored(requests)))
    ((name, outputs),) = evidence.outputs
    (difference,) = outputs.differing.shown
    assert (name, outputs.n_pairs, outputs.differing.total) == ("Load", 2, 1)
    assert (difference.n_shared, difference.shared) == (8, "Rome is ")
    assert (difference.baseline, difference.candidate) == ("old", "new")


def test_an_output_that_is_the_beginning_of_the_other_ends_there():
    requests = [
        factories.make_request("baseline", output_text="Rome"),
        factories.make_request("candidate", output_text="Rome, Italy"),
    ]
    page = Page(render("html", make_verdict(), Context.of_run(factories.make_stored(requests))))
    assert "same for 4 characters" in page.text
    assert "(ends here)" in page.text


def test_long_lists_are_cut_and_say_of_how_many():
    requests = [
        factories.make_request(arm, prompt_id=f"p{i}", output_text=f"{arm} {i}")
        for arm in ("baseline", "candidate")
        for i in range(MAX_DIFFERENCES + 3)
    ]
    requests += [
        factories.make_request(prompt_id=f"f{i}", error="timeout") for i in range(MAX_FAILURES + 7)
    ]
    context = Context.of_run(factories.make_stored(requests))
    evidence = collect_evidence(context)
    assert (len(evidence.failures.shown), evidence.failures.total) == (200, 207)
    page = Page(render("html", make_verdict(), context))
    assert "207 failed, the first 200 are shown" in page.text
    assert "Load: 15 of 15 pairs The first 12 are shown." in page.text


def test_a_large_run_makes_a_page_of_bounded_size():
    few = factories.simulate_requests(blocks=2, prompts=2)
    requests = [
        replace(r, prompt_id=f"{r.prompt_id}/{i}", chunk_ns=[10**8 + i, 10**9 + i])
        for r in few
        for i in range(300)
    ]
    text = render("html", make_verdict(), Context.of_run(factories.make_stored(requests)))
    assert "an even choice of the points is drawn" in text.lower()
    assert text.count("<use") < 3 * 2 * 2 * MAX_POINTS + 2 * 2 * MAX_POINTS + 1000
    assert len(text) < 3_000_000


def test_warm_ups_are_in_the_order_of_execution_but_not_in_the_distributions():
    requests = [
        factories.make_request(phase="warmup", prompt_id="w", started_at="2026-11-29T02:00:01Z"),
        factories.make_request(prompt_id="p", started_at="2026-11-29T02:00:02Z"),
        factories.make_request("candidate", prompt_id="p", started_at="2026-11-29T02:00:03Z"),
    ]
    evidence = collect_evidence(Context.of_run(factories.make_stored(reversed(requests))))
    assert [(s.order, s.arm, s.is_warmup) for s in evidence.steps] == [
        (1, "baseline", True),
        (2, "baseline", False),
        (3, "candidate", False),
    ]
    assert len(evidence.latencies["8K-16K"]["ttft"]["baseline"]) == 1


def test_the_environment_lists_what_differs_first_and_counts_equal_packages():
    arms = {
        "baseline": factories.make_arm(),
        "candidate": factories.make_arm(kv_cache_dtype="int8"),
    }
    evidence = collect_evidence(Context.of_run(factories.make_stored(arms=arms)))
    first, *rest = evidence.environment
    assert (first.field, first.baseline, first.candidate) == ("KV-cache dtype", "auto", "int8")
    assert not any(fact.differs for fact in rest)
    assert rest[-1].field == "2 equal packages"
    assert rest[-1].baseline == "torch 2.13.0, vllm 0.32.0"


def test_routes_that_nobody_counted_are_absent_and_not_zero():
    arms = {
        "baseline": factories.make_arm(),
        "candidate": factories.make_arm(routes={"decode": 46080, "fallback": 0}),
    }
    evidence = collect_evidence(Context.of_run(factories.make_stored(arms=arms)))
    assert [(f.field, f.baseline, f.candidate) for f in evidence.routes] == [
        ("decode", None, "46,080"),
        ("fallback", None, "0"),
    ]


def test_the_forest_shows_each_rule_that_has_a_unit_with_figures():
    rules = [
        make_rule(),
        make_rule(
            "r",
            metric="score",
            unit="points",
            observed=None,
            ci_low=None,
            ci_high=None,
            status="inconclusive",
        ),
    ]
    page = Page(render("html", make_verdict("inconclusive", rules=rules)))
    assert "In percent" in page.text
    assert "In points" not in page.text


def test_hostile_text_survives_readably(page):
    assert HOSTILE.replace("\x1b", "\\u001b") in page.text
