"""report.html in a real browser: what each kind of reader, and each kind of output, makes of it."""

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
#: What axe-core looks at in `make test`; each kind in each look: `make catalogues`.
LOOKS = (("hostile", 390, "light"),)


def _seldom(kinds):
    slow = pytest.mark.slow("further kinds")
    return [k if k in ("crash", "hostile") else pytest.param(k, marks=slow) for k in kinds]


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
        found.is_quiet()


def _anew(shown):
    """The page as it is opened, without what an earlier test unfolded or followed."""
    shown.goto(shown.url.partition("#")[0])
    shown.wait_for_selector("html[data-ready=yes]", state="attached")


@pytest.mark.parametrize("kind", _seldom(KINDS))
def test_nothing_is_wider_than_the_screen(opened, kind):
    _fits(opened(kind, min(browser.WIDTHS)))


#: What of a chart's axes is cut off at the edge of the drawing. Margins are fixed: plotly's own
#: (`automargin`) have no end for some data and some widths.
CUT = """[...document.querySelectorAll('[data-chart]')].filter(c => c.offsetParent).flatMap(c => {
  const s = c.querySelector('svg').getBoundingClientRect();
  const texts = '.xtick text, .ytick text, .y2tick text, .xtitle, .ytitle, .y2title';
  return [...c.querySelectorAll(texts)].filter(t => {
    const b = t.getBoundingClientRect();  // plotly hides a number that has no room: no width
    return b.width && (b.left < s.left - 1 || b.right > s.right + 1 || b.bottom > s.bottom + 1);
  }).map(t => `${c.dataset.chart}: ${t.textContent}`);
})"""


def _fits(shown):
    drawn = "[...document.querySelectorAll('[data-chart]')].every(c => c.querySelector('svg'))"
    assert shown.evaluate(drawn), "a chart was not drawn"
    for width, height in (browser.WIDTHS | browser.NARROWEST).items():
        shown.set_viewport_size({"width": width, "height": height})
        shown.wait_for_timeout(300)  # plotly follows the window with a delay
        assert browser.fits(shown), f"at {width} pixels"
        assert shown.evaluate(CUT) == [], f"at {width} pixels"


def test_a_number_at_either_end_of_an_axis_is_not_cut_off(opened):
    shown = opened("pass", min(browser.WIDTHS))
    ends = "{'xaxis.range': [0, 1200.5], 'xaxis.tickvals': [0, 1200.5]}"
    shown.evaluate(f"Plotly.relayout(document.querySelector('[data-chart=latency-1]'), {ends})")
    assert "1200.5" in shown.inner_text("[data-chart=latency-1]")
    assert shown.evaluate(CUT) == []
    _anew(shown)


@pytest.mark.skipif(not REAL.is_file(), reason=f"no {REAL}: `make conformance` writes it")
def test_the_report_of_the_real_run(opened, reports, tmp_path):
    """Not made by hand: what a vLLM answered and logged, on the page as it is now."""
    reports["real"] = tmp_path / "report.html"
    found = stored.read(REAL.parent)
    reports["real"].write_text(page.html(found), "utf-8")
    assert reports["real"].stat().st_size < 2_000_000
    shown = opened("real", min(browser.WIDTHS))
    assert shown.locator("#verdict").inner_text() == found.run.verdict.value
    _fits(shown)


@pytest.mark.parametrize("kind", _seldom(kind for kind in KINDS if kind != "hostile"))
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
    shown.evaluate(browser.UNFOLD)
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


@pytest.mark.parametrize(
    ("kind", "width", "scheme"),
    [
        pytest.param(*look, marks=[pytest.mark.slow] * (look not in LOOKS))
        for look in itertools.product(KINDS, browser.WIDTHS, ("light", "dark"))
    ],
)
def test_axe_finds_nothing(opened, kind, width, scheme):
    """Contrast, names, roles and order by axe-core, with everything unfolded."""
    shown = opened(kind, width)
    shown.evaluate(browser.UNFOLD)
    shown.emulate_media(color_scheme=scheme)
    shown.wait_for_timeout(200)
    assert browser.accessibility(shown) == []


def test_axe_would_find_something(chromium, reports, tmp_path):
    file = tmp_path / "report.html"
    text = reports["pass"].read_text("utf-8")
    file.write_text(
        text.replace("<main", "<p style='color: #bbb; background: #fff'>hard to read</p><main", 1)
    )
    found = browser.open_report(chromium, file, 1440)
    assert [line.partition(":")[0] for line in browser.accessibility(found.page)] == [
        "color-contrast", "region"
    ]  # fmt: skip
    found.page.close()


@pytest.mark.slow("one width after the other")
def test_tiles_do_not_overlap(opened):
    """Every width between a telephone and a wall; a rate of six digits."""
    shown = opened("fail")
    shown.evaluate("document.querySelectorAll('.tile .value')[1].firstChild.data = '112920 '")
    script = """() => {
      const tiles = [...document.querySelectorAll('.tile')];
      const boxes = tiles.map((tile) => tile.getBoundingClientRect());
      const beside = (a, b) => a.right <= b.left || b.right <= a.left;
      const apart = (a, b) => beside(a, b) || a.bottom <= b.top || b.bottom <= a.top;
      return tiles.length > 2 && tiles.every((tile) => tile.scrollWidth <= tile.clientWidth)
        && boxes.every((a, i) => boxes.every((b, j) => i === j || apart(a, b))); }"""
    for width in range(360, 1921, 60):
        shown.set_viewport_size({"width": width, "height": 900})
        assert shown.evaluate(script), f"at {width} pixels"


def test_tests_are_filtered_linked_and_copied(opened):
    shown = opened("fail")
    _anew(shown)
    shown.evaluate(
        "Object.defineProperty(navigator, 'clipboard', "
        "{ value: { writeText: async (text) => { window.copied = text; } } })"
    )
    shown.locator("#tests summary").first.click()
    rows = shown.locator("#every-test tbody tr:visible")
    every = rows.count()
    shown.locator("[data-filter=level]").select_option("performance")
    assert rows.count() == 3 and shown.locator("#shown").inner_text() == f"3 of {every} tests"
    shown.locator("[data-filter=verdict]").select_option("FAIL")
    assert rows.count() == 1
    rows.get_by_role("button", name="copy id").click()
    shown.wait_for_function(
        "window.copied === 'tests/test_performance.py::test_decode_rate[tg32-d0]'"
    )
    rows.get_by_role("button", name="copy command").click()
    shown.wait_for_function("window.copied.startsWith('python -m pytest')")
    shown.locator("#unfilter").click()
    assert rows.count() == every
    shown.locator("[data-filter=text]").fill("decode")
    assert 0 < rows.count() < every
    shown.locator("[data-filter=severity]").select_option("blocker")
    # A link opens what hides its line, and marks it.
    anchor = "test-stress-test-many-sequential-requests"
    shown.evaluate("document.querySelector('#tests details').open = false")
    shown.evaluate(f"location.hash = '{anchor}'")
    line = shown.locator(f"#{anchor}")
    line.wait_for(state="visible")
    marked, usual = (
        shown.locator(f"{row} > td").first.evaluate("e => getComputedStyle(e).backgroundColor")
        for row in (f"#{anchor}", "#every-test tbody tr:not(:target)")
    )
    assert marked != usual
    assert line.locator(".here").get_attribute("href") == f"#{anchor}"
    # A level's name shows its tests.
    shown.locator("#levels a", has_text="smoke").click()
    assert rows.count() == 3
    shown.locator("#unfilter").click()


def test_the_filter_is_used_with_a_keyboard_alone(opened):
    shown = opened("fail")
    _anew(shown)
    shown.evaluate("document.querySelector('#tests details').open = true")
    shown.locator("#tests summary").first.focus()
    shown.keyboard.press("Tab")
    shown.keyboard.press("p")  # performance
    assert shown.locator("#every-test tbody tr:visible").count() == 3
    for _ in range(4):
        shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.id") == "unfilter"
    shown.keyboard.press("Enter")
    for _ in range(2):
        shown.keyboard.press("Tab")  # the scrolling table, the first test
    assert shown.evaluate("document.activeElement.className") == "here"
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.querySelector('tr:target') !== null")


@pytest.mark.slow("one more look")
def test_a_theme_is_chosen_and_kept(chromium, reports):
    found = browser.open_report(chromium, reports["pass"], 1440, color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    axis = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    light = [found.page.evaluate(paper), found.page.evaluate(axis)]
    found.page.locator("#theme").select_option("dark")
    dark = [found.page.evaluate(paper), found.page.evaluate(axis)]
    assert light[0] != dark[0] and light[1] != dark[1]
    found.page.reload()
    found.page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert [found.page.evaluate(paper), found.page.evaluate(axis)] == dark
    found.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert found.page.evaluate(axis) == light[1], "paper is light"
    found.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert found.page.evaluate(axis) == dark[1]
    assert found.complaints == []
    found.page.close()


@pytest.mark.slow("a browser with a broken store")
def test_a_browser_that_keeps_nothing_is_not_complained_of(chromium, reports):
    page = chromium.new_page(viewport={"width": 1440, "height": 900})
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no'); } })"
    )
    page.goto(reports["pass"].as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    page.locator("#theme").select_option("dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert complaints == []
    page.close()


@pytest.mark.slow("one more look")
def test_the_verdict_of_a_cell_is_on_the_screen(opened):
    shown = opened("invalid")
    names = shown.locator("#matrix details table thead th").all_inner_texts()
    assert names[:2] == ["cell", "verdict"]


@pytest.mark.slow("one more look")
def test_the_path_of_a_request_is_drawn(opened):
    shown = opened("pass")
    lines = shown.locator("#requests svg")
    assert lines.count() == 4, "the median and the slowest of two cells"
    slow = lines.nth(1)
    assert "slowest request: first chunk after" in slow.get_attribute("aria-label")
    boxes = [slow.locator(part).bounding_box() for part in (".wait", ".gap >> nth=0", ".end")]
    assert all(a["x"] < b["x"] for a, b in itertools.pairwise(boxes))
    assert all(box["height"] > 20 for box in boxes)


def test_a_keyboard_reaches_everything(opened):
    shown = opened("fail")
    _anew(shown)
    assert browser.reached_by_tab(shown, 0) == set()
    assert shown.locator(".skip").bounding_box()["x"] >= 0, "the skip link shows when it has focus"
    _anew(shown)
    assert {"A", "SUMMARY", "PRE", "DIV"} <= browser.reached_by_tab(shown, 80)


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
    assert shown.locator("#every-test tbody tr").count() == 17
    assert shown.locator("#requests svg").first.is_visible()
    for useless in (".filter", ".theme"):
        assert not shown.locator(useless).is_visible()


@pytest.mark.slow("one more look")
def test_it_can_be_printed(opened):
    shown = opened("fail")
    shown.emulate_media(media="print", color_scheme="dark")
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not shown.locator("nav.parts").is_visible()
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.locator("#matrix table caption").last.is_visible()
    assert len(shown.pdf()) > 20_000
