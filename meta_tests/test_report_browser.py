"""report.html in a real browser: what each kind of reader, and each kind of output, makes of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import browser
import pytest
import report_runs

from sm121.report import page, stored

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
]
REAL = Path(__file__).parent.parent / "conformance-report" / "verdict.json"
KINDS = ("pass", "fail", "invalid", "inconclusive", "crash", "hostile")


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as started:
        yield started


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A report of each kind."""
    folder = tmp_path_factory.mktemp("reports")
    return {kind: page.write(stored.read(report_runs.write(kind, folder / kind))) for kind in KINDS}


@pytest.fixture(scope="module")
def loaded():
    """Reports that are open already: loading one takes longer than looking at it."""
    return {}


@pytest.fixture
def opened(chromium, reports, loaded):
    """Opens a report at a width; whatever it complains of fails the test."""
    used = []

    def open_(kind, width=1440, **options):
        key = (kind, *sorted(options.items()))
        if key not in loaded:
            loaded[key] = browser.open_report(chromium, reports[kind], width, **options)
        used.append(loaded[key])
        shown = loaded[key].page
        shown.set_viewport_size({"width": width, "height": browser.WIDTHS[width]})
        shown.emulate_media(media="screen", color_scheme="light")
        return shown

    yield open_
    for found in used:
        assert found.complaints == []
        others = [url for url in found.requests if not url.startswith(("file:", "data:"))]
        assert others == [], "the report asks the network for something"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_wider_than_the_screen(opened, kind):
    _fits(opened(kind, min(browser.WIDTHS)))


def _fits(shown):
    drawn = "[...document.querySelectorAll('[data-chart]')].every(c => c.querySelector('svg'))"
    assert shown.evaluate(drawn), "a chart was not drawn"
    for width, height in browser.WIDTHS.items():
        shown.set_viewport_size({"width": width, "height": height})
        shown.wait_for_timeout(150)  # plotly follows the window with a delay
        needed, there = shown.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert needed <= there, f"at {width} pixels"


@pytest.mark.skipif(not REAL.is_file(), reason=f"no {REAL}: `make conformance` writes it")
def test_the_report_of_the_real_run(opened, reports, tmp_path):
    """Not made by hand: what a vLLM answered and logged, on the page as it is now."""
    reports["real"] = tmp_path / "report.html"
    found = stored.read(REAL.parent)
    reports["real"].write_text(page.html(found), "utf-8")
    assert reports["real"].stat().st_size < 3_000_000
    shown = opened("real", min(browser.WIDTHS))
    assert shown.locator("#verdict").inner_text() == found.run.verdict.value
    _fits(shown)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hostile"])
def test_verdict_and_reason_are_on_the_first_screen(opened, kind):
    shown = opened(kind)
    word = shown.locator("#verdict")
    expected = "FAIL" if kind == "crash" else kind.upper()
    assert word.inner_text() == expected
    for selector in ("#verdict", ".why", ".strip"):
        box = shown.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= browser.WIDTHS[1440], f"{selector} is below the fold"


def test_hostile_output_is_text(opened):
    shown = opened("hostile")
    assert shown.evaluate("window.owned") is None
    assert shown.evaluate("document.images.length") == 0
    assert shown.evaluate("[...document.querySelectorAll('b')].length") == 0
    shown.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    text = shown.inner_text("body")
    assert text.count("<script>window.owned=1</script>") > 10, "it is shown, as it was written"
    assert "\x1b" not in text and "\u202e" not in text and "\\u202e" in text
    assert shown.evaluate("document.scripts.length") == 3
    links = shown.evaluate("[...document.links].map(a => a.protocol)")
    assert set(links) == {"file:"}


def test_the_policy_stops_what_escaping_would_not(opened, reports, tmp_path, chromium):
    """Even a script that got into the page could neither run nor send anything."""
    text = reports["pass"].read_text("utf-8")
    file = tmp_path / "report.html"
    bad = "<script>window.owned=1</script><img src='http://127.0.0.1:9/x' onerror='owned=2'>"
    file.write_text(text.replace("<main", f"{bad}<main", 1))
    found = browser.open_report(chromium, file, 1440)
    assert found.page.evaluate("window.owned") is None
    assert any("Content Security Policy" in line for line in found.complaints)
    found.page.close()


def test_charts_take_the_colours_of_the_dark(opened):
    colour = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    shown = opened("pass")
    light = shown.evaluate(colour)
    shown.emulate_media(color_scheme="dark")
    shown.wait_for_timeout(300)
    assert shown.evaluate(colour) != light


def test_contrast_is_enough_in_both(opened):
    """WCAG AA: 4.5 to 1 for text on what it stands on."""
    script = """() => {
      const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
      const lum = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255;
        return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const back = (e) => { for (; e; e = e.parentElement) {
        const c = rgb(getComputedStyle(e).backgroundColor);
        if (c.length < 4 || c[3] > 0) return c; }
        return [255, 255, 255]; };
      const what = 'p, a, td, th, dt, dd, .chip, h1, h2, h3, caption, .name';
      return [...document.querySelectorAll(what)]
        .filter((e) => e.innerText && e.offsetParent && !e.closest('svg')).map((e) => {
        const [a, b] = [lum(rgb(getComputedStyle(e).color)), lum(back(e))].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), e.innerText.slice(0, 40), e.className]; })
        .filter(([ratio]) => ratio < 4.5); }"""
    for kind in ("fail", "invalid", "inconclusive"):
        shown = opened(kind)
        assert shown.evaluate(script) == []
        shown.emulate_media(color_scheme="dark")
        assert shown.evaluate(script) == []


def test_a_keyboard_reaches_everything(opened):
    shown = opened("fail")
    shown.reload()
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.className") == "skip"
    assert shown.locator(".skip").bounding_box()["x"] >= 0, "the skip link shows when it has focus"
    seen = set()
    for _ in range(80):
        shown.keyboard.press("Tab")
        tag, outline = shown.evaluate(
            "(e => [e.tagName, getComputedStyle(e).outlineStyle])(document.activeElement)"
        )
        seen.add(tag)
        assert tag == "BODY" or outline != "none", f"{tag} does not show that it has the focus"
    assert {"A", "SUMMARY", "PRE", "DIV"} <= seen


def test_a_screen_reader_finds_its_way(opened):
    shown = opened("fail")
    count = "s => document.querySelectorAll(s).length"
    assert shown.evaluate(count, "html[lang=en]") == 1
    for landmark in ("header", "nav[aria-label]", "main", "footer", "h1"):
        assert shown.evaluate(count, f"body {landmark}") == 1, landmark
    assert shown.evaluate(count, "table:not(:has(caption))") == 0
    assert shown.evaluate(count, "thead th:not([scope=col])") == 0
    assert shown.evaluate(count, "section:not([aria-labelledby])") == 0
    assert shown.evaluate(count, "figure:not(:has(figcaption)), figure:not(:has(table))") == 0
    assert shown.evaluate(count, ".chart:not([role=img][aria-label])") == 0
    levels = shown.evaluate(
        "[...document.querySelectorAll('h1,h2,h3')].map(h => Number(h.tagName[1]))"
    )
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), "no level left out"
    ids = shown.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    own = [name for name in ids if not name.startswith(("clip", "legend", "topdefs", "defs"))]
    assert len(own) == len(set(own)), "ids are unique"
    targets = shown.evaluate("[...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.hash)")
    assert {name.removeprefix("#") for name in targets} <= set(ids)


def test_without_scripts_every_number_is_there(opened):
    shown = opened("pass", java_script_enabled=False)
    assert "tg32@d0" in shown.content() and shown.locator(".chart").first.is_visible()


def test_it_can_be_printed(opened):
    shown = opened("fail")
    shown.emulate_media(media="print", color_scheme="dark")
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not shown.locator("nav.parts").is_visible()
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.locator("#matrix table caption").last.is_visible()
    assert len(shown.pdf()) > 20_000
