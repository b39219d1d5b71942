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
import markdown
import report_runs
from PIL import Image

from sm121.report import page, stored, summary
from sm121.run.verdict_file import AgainstReport

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "docs" / "report"
KINDS = ("fail", "invalid", "inconclusive", "crash")
#: The first screens, not the whole of it: a picture of all of it is looked at by nobody.
HEIGHTS = {360: 2600, 1440: 3600}
_MOST_BYTES = 300_000
_LIKE_A_FORGE = """body { font: 14px/1.5 sans-serif; margin: 24px } h1 { font-size: 22px }
h2 { font-size: 18px } h1, h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: 4px }
table { border-collapse: collapse } th, td { border: 1px solid #d1d9e0; padding: 3px 10px }"""


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


def pull_request(chromium, folder: Path) -> None:
    """The summary of a pull request that is slower than what was merged, as a page shows it."""
    run = stored.read(report_runs.write("fail", folder)).run
    kept = report_runs.write("pass", folder.with_name("trusted"))
    run.against = AgainstReport(
        run="the run of 2026-11-23T10:43:01+00:00",
        engine="vllm 0.33.0",
        new=["tests/test_performance.py::test_decode_rate[tg32-d0]"],
        mended=["tests/test_correctness.py::test_a_tool_can_be_required"],
        worse=["tg32@d0: 47.3 tok/s against 53.6 (5 stored runs), 11.8% worse; 5% allowed"],
        measured=stored.read(kept).run.metrics,
    )
    text = summary.markdown(run) + "\n[The report, the logs and verdict.json](#)\n"
    body = markdown.markdown(text, extensions=["tables", "md_in_html"])
    page = chromium.new_page(viewport={"width": 1012, "height": 800})
    page.set_content(f"<style>{_LIKE_A_FORGE}</style>{body}")
    target = OUTPUT / "pull-request.png"
    whole = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    whole.quantize(64, dither=Image.Dither.NONE).save(target, optimize=True)
    print(target, target.stat().st_size, whole.size)
    page.close()


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
        pull_request(chromium, Path(folder) / "pull-request")
        for kind in KINDS:
            directory = report_runs.write(kind, Path(folder) / kind)
            shoot(chromium, page.write(stored.read(directory)), kind)


if __name__ == "__main__":
    main()
