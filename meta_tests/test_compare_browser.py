"""Two runs side by side and the A/B section, in a real browser."""

import browser
import compare_runs
import pytest
import report_runs

from sm121.report import compare_page, page, stored

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
]
#: What a phone and a screen show, in pixels.
WIDTHS = (390, 1440)
PAGES = ("pair", "hostile", "ab")
SELDOM = pytest.mark.slow("a telephone, the light and hostile words show the most")
SLOW_BUT_HOSTILE = ["hostile", *(pytest.param(name, marks=SELDOM) for name in ("pair", "ab"))]
SLOW_BUT_PHONE = [WIDTHS[0], *(pytest.param(width, marks=SELDOM) for width in WIDTHS[1:])]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    one, two = compare_runs.pair(folder)
    hostile = report_runs.write("hostile", folder / "hostile")
    for path in (one, two, hostile):
        page.write(stored.read(path))
    name = report_runs.HOSTILE
    return {
        "pair": compare_page.write([("the trusted run", one), ("now", two)], folder / "x.html"),
        "hostile": compare_page.write([(name, hostile), (name, one)], folder / "y.html"),
        "ab": page.write(stored.read(compare_runs.ab(folder / "ab"))),
    }


@pytest.fixture
def opened(chromium, pages):
    """Opens a page at a width; whatever it complains of fails the test."""
    used = []

    def open_(name, width=WIDTHS[-1], *, scheme="light"):
        used.append(browser.open_report(chromium, pages[name], width, color_scheme=scheme))
        return used[-1].page

    yield open_
    for each in used:
        each.page.close()
        each.is_quiet()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", SLOW_BUT_PHONE)
def test_nothing_is_wider_than_the_screen(opened, name, width):
    tab = opened(name, width)
    tab.evaluate(browser.UNFOLD)
    assert browser.fits(tab)
    if width == WIDTHS[0]:  # a plot that is half out of sight shows nothing
        plots = "[...document.querySelectorAll('.forest')]"
        assert tab.evaluate(f"{plots}.every(e => e.scrollWidth <= e.clientWidth)")


@pytest.mark.parametrize("name", SLOW_BUT_HOSTILE)
@pytest.mark.parametrize("width", SLOW_BUT_PHONE)
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=SELDOM)])
def test_axe_finds_nothing(opened, name, width, scheme):
    tab = opened(name, width, scheme=scheme)
    tab.evaluate(browser.UNFOLD)
    part = "#ab" if name == "ab" else "html"  # the rest of a report is tested with it
    assert browser.accessibility(tab, part) == []


def test_hostile_output_is_text(opened):
    tab = opened("hostile")
    assert tab.evaluate("window.owned") is None
    assert tab.evaluate("[document.images.length, document.scripts.length]") == [0, 0]
    assert tab.evaluate("document.querySelectorAll('b').length") == 0
    text = tab.inner_text("body")
    assert "<script>window.owned=1</script>" in text
    assert "\x1b" not in text and "\u202e" not in text
    assert {*tab.evaluate("[...document.links].map(a => a.protocol)")} == {"file:"}


def test_what_is_new_is_on_the_first_screen(opened):
    tab = opened("pair")
    for selector in ("#headline", ".pair", ".tally"):
        box = tab.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= 900, f"{selector} is below the fold"
    assert "2 tests newly fail in B" in tab.inner_text("#headline")
    targets = tab.evaluate("[...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.hash)")
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map(e => '#' + e.id)")
    assert set(targets) <= set(ids) and len(ids) == len(set(ids))
    tab.click("a[href$='pass/report.html']")
    assert "SM121 conformance" in tab.title()


def test_the_plot_is_to_scale(opened):
    """The point of -12.6 % lies to the left of the band's end, that of the prefill in it."""
    tab = opened("pair")
    script = """() => [...document.querySelectorAll('.forest tbody tr')].map(row => {
      const x = s => { const e = row.querySelector(s); return e && e.getBoundingClientRect(); };
      const band = x('.band'), point = x('.plot .point');
      return [row.querySelector('th').innerText, band.left, band.right,
              point && (point.left + point.right) / 2]; })"""
    rows = {name.split()[1]: edges for name, *edges in tab.evaluate(script)}
    start, right, point = rows["tg32"]
    assert point < start and (right - point) / (right - start) == pytest.approx(12.6 / 5, rel=0.05)
    assert rows["pp2048"][0] < rows["pp2048"][2]


def test_a_keyboard_reaches_what_is_folded(opened):
    assert {"A", "SUMMARY"} <= browser.reached_by_tab(opened("pair"), 40)


@pytest.mark.parametrize("name", ["pair", pytest.param("ab", marks=SELDOM)])
def test_it_can_be_printed(opened, name):
    tab = opened(name)
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.locator(".forest .point").first.is_visible()
    assert len(tab.pdf()) > 20_000
