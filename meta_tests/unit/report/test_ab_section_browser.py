"""The A/B section of a report, in a real browser."""

import pytest

from meta_tests.fakes import ab_runs, browser
from sm121.report import page, stored

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
]
#: The widths of a phone and of a desktop screen, in pixels.
PHONE = 390
SCREEN = 1440
SELDOM = pytest.mark.slow("a phone and the light theme show the most")
WIDTHS = pytest.mark.parametrize("width", [PHONE, pytest.param(SCREEN, marks=SELDOM)])


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a run with an A/B comparison."""
    return page.write(stored.read(ab_runs.ab(tmp_path_factory.mktemp("ab"))))


@pytest.fixture
def opened(chromium, report):
    """Open the page at a width. A console error makes the test fail."""
    used = []

    def open_(width=SCREEN, *, scheme="light"):
        used.append(browser.open_report(chromium, report, width, color_scheme=scheme))
        return used[-1].page

    yield open_
    for each in used:
        each.page.close()
        each.is_quiet()


@WIDTHS
def test_nothing_is_wider_than_the_screen(opened, width):
    tab = opened(width)
    tab.evaluate(browser.UNFOLD)
    assert browser.fits(tab)
    if width == PHONE:  # a plot of which half is outside of the view is not drawn
        plots = "[...document.querySelectorAll('.forest')]"
        assert tab.evaluate(f"{plots}.every(e => e.scrollWidth <= e.clientWidth)")


@WIDTHS
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=SELDOM)])
def test_axe_finds_nothing(opened, width, scheme):
    tab = opened(width, scheme=scheme)
    tab.evaluate(browser.UNFOLD)
    assert browser.accessibility(tab, "#ab") == []


def test_the_plot_is_to_scale(opened):
    """The plot is to scale: the point of -9.7 % is left of the band's end (5 % allowed), and +2.1 %
    is right of it."""
    script = """() => [...document.querySelectorAll('.forest tbody tr')].map(row => {
      const x = s => { const e = row.querySelector(s); return e && e.getBoundingClientRect(); };
      const band = x('.band'), point = x('.plot .point');
      return [row.querySelector('th').innerText, band.left, band.right,
              point && (point.left + point.right) / 2]; })"""
    rows = {name.split()[1]: edges for name, *edges in opened().evaluate(script)}
    start, right, point = rows["tg32"]
    assert point < start
    assert (right - point) / (right - start) == pytest.approx(9.7 / 5, rel=0.05)
    assert rows["pp2048"][1] < rows["pp2048"][2]


@SELDOM
def test_it_can_be_printed(opened):
    tab = opened()
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.locator(".forest .point").first.is_visible()
