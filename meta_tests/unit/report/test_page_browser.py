"""report.html in a real browser, for each kind of reader and each output."""

import itertools

import pytest

from meta_tests.fakes import browser, report_runs
from meta_tests.folders import ROOT
from meta_tests.texts import text_file
from sm121.report import page, stored

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
]
REAL = ROOT / "conformance-report" / "verdict.json"
KINDS = ("pass", "fail", "invalid", "inconclusive", "crash", "hostile")
#: The combinations that axe-core checks in `make test`. `make catalogues` checks all combinations.
LOOKS = (("hostile", 390, "light"),)


def _seldom(kinds):
    slow = pytest.mark.slow("further kinds")
    parameters = []
    for k in kinds:
        if k in ("crash", "hostile"):
            parameters.append(k)
        else:
            parameters.append(pytest.param(k, marks=slow))
    return parameters


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A report of each kind."""
    folder = tmp_path_factory.mktemp("reports")
    return {kind: page.write(stored.read(report_runs.write(kind, folder / kind))) for kind in KINDS}


@pytest.fixture(scope="module")
def loaded():
    """The loaded reports. They stay open for all tests of this module, because loading a report
    takes longer than checking it."""
    return {}


@pytest.fixture
def opened(chromium, reports, loaded):
    """Open a report at a width. A console error makes the test fail."""
    used = []

    def open_(kind, width=1440, **options):
        key = (kind, *sorted(options.items()))
        if key not in loaded:
            loaded[key] = browser.open_report(chromium, reports[kind], width, **options)
        used.append(loaded[key])
        view = loaded[key].page
        view.set_viewport_size({"width": width, "height": browser.WIDTHS[width]})
        view.emulate_media(media="screen", color_scheme="light")
        return view

    yield open_
    for report in used:
        report.is_quiet()


def _anew(view):
    """Reset the page, and undo what an earlier test has opened or followed."""
    view.goto(view.url.partition("#")[0])
    view.wait_for_selector("html[data-ready=yes]", state="attached")


@pytest.mark.parametrize("kind", _seldom(KINDS))
def test_nothing_is_wider_than_the_screen(opened, kind):
    _fits(opened(kind, min(browser.WIDTHS)))


#: A script that returns the parts of a chart's axes beyond the edge of the drawing. The charts have
#: fixed margins, because plotly's own margins (`automargin`) do not converge for some data and
#: widths.
CUT = text_file("cut-off.js")


def _fits(view):
    drawn = "[...document.querySelectorAll('[data-chart]')].every(c => c.querySelector('svg'))"
    assert view.evaluate(drawn), "a chart was not drawn"
    for width, height in (browser.WIDTHS | browser.NARROWEST).items():
        view.set_viewport_size({"width": width, "height": height})
        view.wait_for_timeout(300)  # plotly reacts to a changed width with a delay
        assert browser.fits(view), f"at {width} pixels"
        assert view.evaluate(CUT) == [], f"at {width} pixels"


def test_a_number_at_either_end_of_an_axis_is_not_cut_off(opened):
    view = opened("pass", min(browser.WIDTHS))
    ends = "{'xaxis.range': [0, 1200.5], 'xaxis.tickvals': [0, 1200.5]}"
    view.evaluate(f"Plotly.relayout(document.querySelector('[data-chart=latency-1]'), {ends})")
    assert "1200.5" in view.inner_text("[data-chart=latency-1]")
    assert view.evaluate(CUT) == []
    _anew(view)


@pytest.mark.skipif(not REAL.is_file(), reason=f"no {REAL}: `make conformance` writes it")
def test_the_report_of_the_real_run(opened, reports, tmp_path):
    """The present page shows the report of a real vLLM's run, with its answers and logs."""
    reports["real"] = tmp_path / "report.html"
    report = stored.read(REAL.parent)
    reports["real"].write_text(page.html(report), "utf-8")
    assert reports["real"].stat().st_size < 2_000_000
    view = opened("real", min(browser.WIDTHS))
    assert view.locator("#verdict").inner_text() == report.run.verdict.value
    _fits(view)


@pytest.mark.parametrize("kind", _seldom(kind for kind in KINDS if kind != "hostile"))
def test_verdict_and_reason_are_on_the_first_screen(opened, kind):
    view = opened(kind)
    word = view.locator("#verdict")
    expected = "FAIL" if kind == "crash" else kind.upper()
    assert word.inner_text() == expected
    for selector in ("#verdict", ".why", ".strip"):
        box = view.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= browser.WIDTHS[1440], f"{selector} is below the fold"


def test_hostile_output_is_text(opened):
    view = opened("hostile")
    assert view.evaluate("window.owned") is None
    assert view.evaluate("document.images.length") == 0
    assert view.evaluate("[...document.querySelectorAll('b')].length") == 0
    view.evaluate(browser.UNFOLD)
    text = view.inner_text("body")
    assert text.count("<script>window.owned=1</script>") > 10, "it is shown, as it was written"
    assert "\x1b" not in text and "\u202e" not in text and "\\u202e" in text
    assert view.evaluate("document.scripts.length") == 3
    links = view.evaluate("[...document.links].map(a => a.protocol)")
    assert set(links) == {"file:"}


def test_the_policy_stops_what_escaping_would_not(opened, reports, tmp_path, chromium):
    """The page's content security policy stops a script that is injected into the page.

    The script can neither run nor send anything."""
    text = reports["pass"].read_text("utf-8")
    file = tmp_path / "report.html"
    bad = "<script>window.owned=1</script><img src='http://127.0.0.1:9/x' onerror='owned=2'>"
    file.write_text(text.replace("<main", f"{bad}<main", 1))
    report = browser.open_report(chromium, file, 1440)
    assert report.page.evaluate("window.owned") is None
    assert any("Content Security Policy" in line for line in report.complaints)
    report.page.close()


EVERY_LOOK = itertools.product(KINDS, browser.WIDTHS, ("light", "dark"))


@pytest.mark.parametrize(
    ("kind", "width", "scheme"),
    [pytest.param(*look, marks=[pytest.mark.slow] * (look not in LOOKS)) for look in EVERY_LOOK],
)
def test_axe_finds_nothing(opened, kind, width, scheme):
    """axe-core finds no fault of contrast, names, roles or order, with all sections opened."""
    view = opened(kind, width)
    view.evaluate(browser.UNFOLD)
    view.emulate_media(color_scheme=scheme)
    view.wait_for_timeout(200)
    assert browser.accessibility(view) == []


def test_axe_would_find_something(chromium, reports, tmp_path):
    file = tmp_path / "report.html"
    text = reports["pass"].read_text("utf-8")
    faint = "<p style='color: #bbb; background: #fff'>hard to read</p>"
    file.write_text(text.replace("<main", f"{faint}<main", 1))
    report = browser.open_report(chromium, file, 1440)
    rules = [line.partition(":")[0] for line in browser.accessibility(report.page)]
    assert rules == ["color-contrast", "region"]
    report.page.close()


@pytest.mark.slow("one width after the other")
def test_tiles_do_not_overlap(opened):
    """Tiles do not overlap at any width from a phone to a wall display, even with a rate of six
    digits."""
    view = opened("fail")
    view.evaluate("document.querySelectorAll('.tile .value')[1].firstChild.data = '112920 '")
    for width in range(360, 1921, 60):
        view.set_viewport_size({"width": width, "height": 900})
        assert view.evaluate(text_file("apart.js")), f"at {width} pixels"


def test_tests_are_filtered_linked_and_copied(opened):
    view = opened("fail")
    _anew(view)
    clipboard = "{ value: { writeText: async (text) => { window.copied = text; } } }"
    view.evaluate(f"Object.defineProperty(navigator, 'clipboard', {clipboard})")
    view.locator("#tests summary").first.click()
    rows = view.locator("#every-test tbody tr:visible")
    every = rows.count()
    view.locator("[data-filter=level]").select_option("performance")
    assert rows.count() == 3 and view.locator("#shown").inner_text() == f"3 of {every} tests"
    view.locator("#tests .tabs a", has_text="FAIL").click()
    assert rows.count() == 1
    rows.get_by_role("button", name="copy id").click()
    identity = "tests/test_performance.py::test_decode_rate[tg32-d0]"
    view.wait_for_function(f"window.copied === '{identity}'")
    rows.get_by_role("button", name="copy command").click()
    view.wait_for_function("window.copied.startsWith('python -m pytest')")
    view.locator("#unfilter").click()
    assert rows.count() == every
    view.locator("[data-filter=text]").fill("decode")
    assert 0 < rows.count() < every
    view.locator("[data-filter=severity]").select_option("blocker")
    # A link opens the section of its target, and marks the target.
    anchor = "test-stress-test-many-sequential-requests"
    view.evaluate("document.querySelector('#tests details').open = false")
    view.evaluate(f"location.hash = '{anchor}'")
    line = view.locator(f"#{anchor}")
    line.wait_for(state="visible")
    marked, usual = (
        view.locator(f"{row} > td").first.evaluate("e => getComputedStyle(e).backgroundColor")
        for row in (f"#{anchor}", "#every-test tbody tr:not(:target)")
    )
    assert marked != usual
    assert line.locator(".here").get_attribute("href") == f"#{anchor}"
    # A click on a level's name shows its tests.
    view.locator("#levels a", has_text="smoke").click()
    assert rows.count() == 3
    view.locator("#unfilter").click()


def test_the_filter_is_used_with_a_keyboard_alone(opened):
    view = opened("fail")
    _anew(view)
    view.evaluate("document.querySelector('#tests details').open = true")
    view.locator("#tests summary").first.focus()
    view.keyboard.press("Tab")
    view.keyboard.press("p")  # selects the level performance in the filter
    assert view.locator("#every-test tbody tr:visible").count() == 3
    for _ in range(3):
        view.keyboard.press("Tab")
    assert view.evaluate("document.activeElement.id") == "unfilter"
    view.keyboard.press("Enter")
    for _ in range(2):
        view.keyboard.press("Tab")  # the focus moves to the scrolling table, then to the first test
    assert view.evaluate("document.activeElement.className") == "here"
    view.keyboard.press("Enter")
    assert view.evaluate("document.querySelector('tr:target') !== null")


@pytest.mark.slow("one more look")
def test_a_theme_is_chosen_and_kept(chromium, reports):
    report = browser.open_report(chromium, reports["pass"], 1440, color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    axis = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    light = [report.page.evaluate(paper), report.page.evaluate(axis)]
    report.page.locator("#theme").select_option("dark")
    dark = [report.page.evaluate(paper), report.page.evaluate(axis)]
    assert light[0] != dark[0] and light[1] != dark[1]
    report.page.reload()
    report.page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert [report.page.evaluate(paper), report.page.evaluate(axis)] == dark
    report.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert report.page.evaluate(axis) == light[1], "paper is light"
    report.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert report.page.evaluate(axis) == dark[1]
    assert report.complaints == []
    report.page.close()


@pytest.mark.slow("a browser with a broken store")
def test_a_browser_without_local_storage_has_no_error(chromium, reports):
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
    view = opened("invalid")
    names = view.locator("#matrix details table thead th").all_inner_texts()
    assert names[:2] == ["cell", "verdict"]


@pytest.mark.slow("one more look")
def test_the_path_of_a_request_is_drawn(opened):
    view = opened("pass")
    lines = view.locator("#requests svg")
    assert lines.count() == 4, "the median and the slowest of two cells"
    slow = lines.nth(1)
    assert "slowest request: first chunk after" in slow.get_attribute("aria-label")
    boxes = [slow.locator(part).bounding_box() for part in (".wait", ".gap >> nth=0", ".end")]
    for a, b in itertools.pairwise(boxes):
        assert a["x"] < b["x"]
    for box in boxes:
        assert box["height"] > 20


def test_a_keyboard_reaches_everything(opened):
    view = opened("fail")
    _anew(view)
    assert browser.reached_by_tab(view, 0) == set()
    assert view.locator(".skip").bounding_box()["x"] >= 0, "the skip link shows when it has focus"
    _anew(view)
    assert {"A", "SUMMARY", "PRE", "DIV"} <= browser.reached_by_tab(view, 80)


def test_a_screen_reader_finds_its_way(opened):
    view = opened("fail")
    once = ["html[lang=en]", "header", "nav[aria-label]", "main", "footer", "h1"]
    never = ["table:not(:has(caption))", "thead th:not([scope=col])"]
    never += ["section:not([aria-labelledby])", ".chart:not([role=img][aria-label])"]
    never += [f"figure:not(:has({part}))" for part in ("figcaption", "table")]
    for selectors, number in ((once, 1), (never, 0)):
        counts = {one: view.locator(one).count() for one in selectors}
        assert counts == dict.fromkeys(selectors, number)
    of_all = "[...document.querySelectorAll('{}')].map(e => {})"
    levels = view.evaluate(of_all.format("h1,h2,h3", "Number(e.tagName[1])"))
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), "no level left out"
    ids = view.evaluate(of_all.format("[id]", "e.id"))
    drawn = ("clip", "legend", "topdefs", "defs")  # plotly creates these ids
    written = [name for name in ids if not name.startswith(drawn)]
    assert len(written) == len(set(written)), "ids are unique"
    targets = view.evaluate(of_all.format('a[href^="#"]', "e.hash"))
    assert {name.removeprefix("#") for name in targets} <= set(ids)


def test_without_scripts_every_number_is_there(opened):
    view = opened("pass", java_script_enabled=False)
    assert "tg32@d0" in view.content() and view.locator(".chart").first.is_visible()
    assert view.locator("#every-test tbody tr").count() == 17
    assert view.locator("#requests svg").first.is_visible()
    for useless in (".filter", ".theme"):
        assert not view.locator(useless).is_visible()


@pytest.mark.slow("one more look")
def test_it_can_be_printed(opened):
    view = opened("fail")
    view.emulate_media(media="print", color_scheme="dark")
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not view.locator("nav.parts").is_visible()
    view.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert view.locator("#matrix table caption").last.is_visible()
    assert len(view.pdf()) > 20_000
