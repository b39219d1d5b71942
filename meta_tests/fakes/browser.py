"""A real browser for the report's tests: Debian's Chromium, controlled by playwright."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

FLAGS = ["--no-sandbox", "--no-first-run"] + [
    f"--disable-{name}"
    for name in ("gpu", "quic", "background-networking", "component-update", "sync")
]
UNFOLD = "document.querySelectorAll('details').forEach(d => { d.open = true; })"
WIDTHS = {390: 844, 1440: 900}
#: The narrowest screen that the page must fit.
NARROWEST = {360: 740}


def missing() -> str | None:
    """Return why no browser is available, and how to get one; None if there is one."""
    for name in ("playwright", "axe_playwright_python"):
        if importlib.util.find_spec(name) is None:
            return f"no {name}: pip install 'sm121-conformance[dev]'"
    if shutil.which("chromium") is None:
        return "no /usr/bin/chromium: apt-get install chromium"
    return None


@dataclass
class Opened:
    """An open page, with its console errors and its network requests."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def is_quiet(self) -> None:
        """Require that the page had no error and sent no request to the network."""
        assert self.complaints == []
        local = ("file:", "data:", "blob:")
        assert [url for url in self.requests if not url.startswith(local)] == []


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the browser with a new profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def open_report(browser: Any, file: Path, width: int, **options: Any) -> Opened:
    """Open a page, and wait until its charts, if it has any, are drawn."""
    size = {"width": width, "height": (WIDTHS | NARROWEST)[width]}
    page = browser.new_page(viewport=size, **options)
    opened = Opened(page)
    page.on("console", lambda message: opened.complaints.append(f"{message.type} {message.text}"))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(file.resolve().as_uri())
    if options.get("java_script_enabled", True) and page.locator("#figures").count():
        page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=20_000)
    return opened


def fits(page: Any) -> bool:
    """Return whether no element is wider than the screen."""
    root = "document.documentElement"
    return page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")


def reached_by_tab(page: Any, presses: int) -> set[str]:
    """Return the kinds of elements that the Tab key reaches after the skip link, and check that
    each of them shows its focus."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(presses):
        page.keyboard.press("Tab")
        script = "(e => [e.tagName, getComputedStyle(e).outlineStyle])(document.activeElement)"
        tag, outline = page.evaluate(script)
        reached.add(tag)
        assert tag == "BODY" or outline != "none", f"{tag} does not show that it has the focus"
    return reached


def accessibility(page: Any, part: str = "html") -> list[str]:
    """Return one line for each axe-core rule that a part of a page violates."""
    rules = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    if not page.evaluate("typeof axe !== 'undefined'"):
        # Do not add a script element, because the page's content security policy refuses it.
        page.evaluate(rules)
    return page.evaluate(
        """async (part) => (await axe.run(part, { resultTypes: ["violations"] })).violations.map(
          (rule) => `${rule.id}: ${rule.help}; ${rule.nodes.length} times, first ` +
            `${rule.nodes[0].html.slice(0, 200)}: ${rule.nodes[0].failureSummary}`)""",
        part,
    )
