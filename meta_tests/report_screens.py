"""docs/report/: pictures of reports at both widths, for people to look at.

``python meta_tests/report_screens.py [--embedded DIR]``: the constructed runs, and a report
directory of an embedded run where one is given (its pictures stay as they are without).
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from pathlib import Path

import browser
import report_runs
from PIL import Image

from sm121.report import page, stored

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "docs" / "report"
KINDS = ("fail", "invalid", "inconclusive", "crash")
#: The first screens, not the whole of it: a picture of all of it is looked at by nobody.
HEIGHTS = {360: 2600, 1440: 3600}
_MOST_BYTES = 300_000


def shoot(chromium, file: Path, name: str) -> None:
    for width, height in HEIGHTS.items():
        opened = browser.open_report(chromium, file, width)
        opened.page.wait_for_timeout(300)
        whole = Image.open(io.BytesIO(opened.page.screenshot(full_page=True)))
        part = whole.convert("RGB").crop((0, 0, width, min(height, whole.height)))
        target = OUTPUT / f"{name}-{width}.png"
        part.quantize(200, dither=Image.Dither.NONE).save(target, optimize=True)
        size = target.stat().st_size
        assert size < _MOST_BYTES, f"{target}: {size} bytes"
        print(target, size)
        opened.page.close()
    top = Image.open(OUTPUT / f"{name}-1440.png").convert("RGB").crop((0, 0, 1440, 1000))
    if name == "embedded":
        top.quantize(128, dither=Image.Dither.NONE).save(OUTPUT / "first-screen.png", optimize=True)


def _anywhere(report: Path, folder: Path) -> Path:
    """A copy of a report that does not say where on this machine the checkout lies."""
    copy = Path(shutil.copytree(report, folder / "embedded"))
    for name in ("verdict.json", "details.json"):
        text = (copy / name).read_text("utf-8")
        (copy / name).write_text(text.replace(f"{ROOT}/", ""), "utf-8")
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--embedded", type=Path, metavar="DIR")
    embedded = parser.parse_args().embedded
    if (why := browser.missing()) is not None:
        raise SystemExit(why)
    OUTPUT.mkdir(exist_ok=True)
    with browser.chromium() as chromium, tempfile.TemporaryDirectory() as folder:
        if embedded is not None:
            shoot(chromium, page.write(stored.read(_anywhere(embedded, Path(folder)))), "embedded")
        for kind in KINDS:
            directory = report_runs.write(kind, Path(folder) / kind)
            shoot(chromium, page.write(stored.read(directory)), kind)


if __name__ == "__main__":
    main()
