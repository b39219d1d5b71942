"""A real browser for the report's tests: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = {360: 740, 1440: 900}


def missing() -> str | None:
    """Why there is no browser here, and how to get one; None if there is."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        return "no playwright: pip install 'sm121-conformance[dev]'"
    if shutil.which("chromium") is None:
        return "no /usr/bin/chromium: apt-get install chromium"
    return None


@dataclass
class Opened:
    """A page, and everything that it complained of or asked the network for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def open_report(browser: Any, file: Path, width: int, **options: Any) -> Opened:
    """Open a report and wait until its charts are drawn."""
    page = browser.new_page(viewport={"width": width, "height": WIDTHS[width]}, **options)
    opened = Opened(page)
    page.on("console", lambda message: opened.complaints.append(f"{message.type} {message.text}"))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(file.resolve().as_uri())
    if options.get("java_script_enabled", True):
        page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=20_000)
    return opened
