"""The page in a real browser, at desktop and phone width: nothing overflows, plots are drawn."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest
from report_cases import SECTIONS, make_rich_case

from evalgate.report import render

CHROMIUM = next(
    (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))),
    None,
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
WIDTHS = (390, 1280)
LEAST_WINDOW = 500  # a narrower window is widened: the phone's width is that of a frame

# Frames give exact widths (a window has a least one), and let the outer page measure the inner.
MEASURE = """
<body style="margin:0">%s<pre id="out"></pre><script>
addEventListener("load", () => {
  const seen = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument;
    const width = page.documentElement.clientWidth;
    const all = selector => [...page.querySelectorAll(selector)];
    const box = e => e.getBoundingClientRect();
    const free = e => !e.closest(".scroll");
    const marks = all("svg.plot text").filter(free);
    return {
      width,
      scroll: page.documentElement.scrollWidth,
      sticking: all("body *").filter(e => free(e) && !e.closest("svg") && box(e).right > width + 1)
        .map(e => e.className || e.tagName),
      clipped: marks.filter(e => box(e).right > width || box(e).left < 0).map(e => e.textContent),
      small: marks.filter(e => parseFloat(getComputedStyle(e).fontSize) < 11).length,
      flat: all("svg.plot").filter(e => box(e).width < 100).length,
      marker: box(page.querySelector("figure use.m")).height,
      headings: all("section > h2").filter(e => box(e).height > 0).map(e => e.textContent.trim()),
      empty: all("section").filter(e => box(e).height < 40).length,
    };
  });
  document.getElementById("out").textContent = JSON.stringify(seen);
});
</script>
"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH: install one to see the page as a browser does"
)


def browse(tmp_path, *arguments: str) -> str:
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_nothing_overflows_at_desktop_and_phone_width(tmp_path):
    text = render("html", *make_rich_case())
    frames = "".join(
        f'<iframe width="{w}" height="900" style="border:0" srcdoc="{html.escape(text)}"></iframe>'
        for w in WIDTHS
    )
    outer = tmp_path / "outer.html"
    outer.write_text(MEASURE % frames, encoding="utf-8")
    dom = browse(tmp_path, "--dump-dom", "--window-size=1700,1000", outer.as_uri())
    seen = json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', dom)[1]))
    assert [s["width"] for s in seen] == list(WIDTHS)
    for frame in seen:
        assert frame["scroll"] == frame["width"]
        assert frame["sticking"] == []
        assert frame["clipped"] == []
        assert (frame["small"], frame["flat"]) == (0, 0)
        assert frame["marker"] >= 5
        assert [heading for heading in frame["headings"] if heading in SECTIONS] == SECTIONS
        assert frame["empty"] == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_a_screenshot_shows_a_page_that_is_neither_empty_nor_one_colour(tmp_path, width):
    page, shot = tmp_path / "page.html", tmp_path / "page.png"
    text = html.escape(render("html", *make_rich_case()))
    frame = f'<iframe width="{width}" height="1600" style="border:0" srcdoc="{text}"></iframe>'
    page.write_text(f'<body style="margin:0">{frame}', encoding="utf-8")
    window = max(width, LEAST_WINDOW)
    browse(tmp_path, f"--screenshot={shot}", f"--window-size={window},1600", page.as_uri())
    data = shot.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == window
    # A blank page of this size packs into about 10 kB.
    assert len(data) > 60_000
