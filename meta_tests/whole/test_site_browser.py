"""The documentation's site in a real browser: on the screen, with the keyboard, and on the network.

It is built once, with the flags of `make docs` and another folder."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meta_tests.fakes import browser
from meta_tests.folders import ROOT

#: The combinations of width and colour scheme.
LOOKS = []
for width in browser.WIDTHS:
    for scheme in ("light", "dark"):
        LOOKS.append((width, scheme))
#: Each combination is tested on one page; `--slow` tests all pages in all combinations.
SAMPLE = {(390, "light"): 0, (390, "dark"): 1, (1440, "light"): 2, (1440, "dark"): 3}

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
]
_LISTED = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
NAV = [f"{name}.html" for name in re.findall(r"- ([\w/-]+)\.md$", _LISTED, re.M)]


def build(folder: Path, docs: Path | None = None) -> Path:
    """Build the site of the documentation, or of other pages without a navigation, in another
    folder."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8").replace("hooks: [", f"hooks: [{ROOT}/")
    if docs is not None:  # these pages contain faults
        text = text.partition("\nnav:\n")[0].replace("strict: true", "strict: false")
        text = re.sub(r"not_in_nav: \|\n(?:  .*\n)+", "", text)
    for key, path in (("docs_dir", docs or ROOT / "docs"), ("custom_dir", ROOT / "tools/site")):
        text = re.sub(rf"{key}: .*", f"{key}: {path}", text)
    (folder / "mkdocs.yml").write_text(text)
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder / "site")], cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=120,
    )  # fmt: skip
    return folder / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"))


@dataclass
class Reader:
    """A browser that opens pages at one width and in one colour scheme."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def faults(self, file: Path, *, accessible: bool = False) -> list[str]:
        """Return one line for each fault of a page."""
        self.requests.clear()
        self.complaints.clear()
        self.page.goto(file.as_uri())
        needed, width = self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        lines = [f"{needed} pixels wide, the screen has {width}"] if needed > width else []
        lines += [f"no image: {source}" for source in self.page.evaluate(
            "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
        )]  # fmt: skip
        if accessible:
            self.page.wait_for_function(
                "[...document.querySelectorAll('.md-code__nav')].every(n => n.ariaLabel)"
            )
            lines += browser.accessibility(self.page)
        outside = [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))]
        lines += [f"asks the network: {url}" for url in outside] + self.complaints
        return [f"{file.name}: {one}" for one in lines]


def reader(chromium: Any, width: int, scheme: str) -> Reader:
    size = {"width": width, "height": browser.WIDTHS[width]}
    opened = Reader(chromium.new_page(viewport=size, color_scheme=scheme))
    opened.page.on("request", lambda request: opened.requests.append(request.url))
    opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    return opened


def _look(chromium: Any, site: Path, look: tuple[int, str], pages: list[str], **asked: Any) -> None:
    at = reader(chromium, *look)
    faults = []
    for name in pages:
        faults.extend(at.faults(site / name, **asked))
    at.page.close()
    assert faults == [], "\n".join(faults)


@pytest.mark.slow("every page once more")
def test_every_page_fits_a_telephone_and_asks_no_network(chromium, site):
    tables = [f"tables/{page.name}" for page in sorted((site / "tables").glob("*.html"))]
    assert len(NAV) > 20 and len(tables) > 20
    _look(chromium, site, (390, "light"), [*NAV, *tables])


@pytest.mark.slow("the site, and each of its pages once; `make lint` builds it too")
@pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look[0]}-{look[1]}")
def test_pages_can_be_read_by_everybody(chromium, site, look):
    """axe-core checks the pages with all rules.

    The four combinations together cover each page once."""
    _look(chromium, site, look, NAV[SAMPLE[look] :: len(SAMPLE)], accessible=True)


@pytest.mark.slow("a minute and a half")
@pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look[0]}-{look[1]}")
def test_every_page_can_be_read_by_everybody(chromium, site, look):
    _look(chromium, site, look, NAV, accessible=True)


FAULTS = {
    "pixels wide, the screen has": '<div style="width: 3000px">a table that nothing scrolls</div>',
    "color-contrast": '<p style="color: #bbb; background: #fff">hardly to be seen</p>',
    "no image": "![a picture](data:image/png;base64,bm90IG9uZQ==)",
    "asks the network": '<img src="http://127.0.0.1:9/x.png" alt="from elsewhere">',
    "aria-hidden-focus": '<div aria-hidden="true"><a href="index.html">hidden</a></div>',
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A site with a page for each fault, and a page without a fault."""
    folder = tmp_path_factory.mktemp("broken")
    for number, fault in enumerate(["Nothing is wrong here.", *FAULTS.values()]):
        page = folder / "docs" / f"page-{number}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"# A page\n\nText before it.\n\n{fault}\n")
    shutil.copy(folder / "docs" / "page-0.md", folder / "docs" / "index.md")
    return build(folder, folder / "docs")


def test_each_fault_is_noticed(chromium, broken):
    at = reader(chromium, 390, "light")
    assert at.faults(broken / "page-0.html", accessible=True) == []
    for number, expected in enumerate(FAULTS, 1):
        faults = at.faults(broken / f"page-{number}.html", accessible=True)
        assert any(expected in fault for fault in faults), f"{expected}: {faults}"
