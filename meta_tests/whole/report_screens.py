"""Write docs/report/: pictures of reports for people to look at, at both widths, light and dark.

``python -m meta_tests.whole.report_screens [--real DIR ...] [--hide TEXT ...]`` writes a picture
``KIND-WIDTH-THEME.png`` for each kind of run, an A/B comparison, and many runs over time. A given
report directory is used for its kind (``crash`` if it has one, otherwise its verdict); the others
have rates that were measured on GPUs (``measured_runs.py``).
"""

import argparse
import functools
import io
import shutil
import tempfile
from pathlib import Path

import markdown
from PIL import Image

from meta_tests.fakes import browser, measured_runs, planted_runs, report_runs
from meta_tests.folders import ROOT
from sm121.report import history, page, stored, summary
from sm121.run.verdict_file import AgainstReport

OUTPUT = ROOT / "docs" / "report"
KINDS = ("pass", "fail", "invalid", "inconclusive", "crash", "ab", "history")
#: Only the first screens of a page, because nobody looks at a picture of a whole page.
HEIGHTS = {390: 2600, 1440: 3000}
THEMES = ("light", "dark")
_MOST_BYTES = 200_000
_LIKE_A_FORGE = """body { font: 14px/1.5 sans-serif; margin: 24px } h1 { font-size: 22px }
h2 { font-size: 18px } h1, h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: 4px }
table { border-collapse: collapse } th, td { border: 1px solid #d1d9e0; padding: 3px 10px }"""


def shoot(chromium, file: Path, kind: str) -> None:
    for width, height in HEIGHTS.items():
        for theme in THEMES:
            opened = browser.open_report(chromium, file, width, color_scheme=theme)
            opened.page.wait_for_timeout(300)
            whole = Image.open(io.BytesIO(opened.page.screenshot(full_page=True))).convert("RGB")
            save(whole, OUTPUT / f"{kind}-{width}-{theme}.png", height)
            if (kind, width, theme) == ("pass", 1440, "light"):
                save(whole, OUTPUT / "first-screen.png", browser.WIDTHS[width])
            opened.page.close()


def save(whole: Image.Image, target: Path, height: int) -> None:
    """Save as much of the page's height as the size limit for files of the docs allows."""
    size = _MOST_BYTES
    while size >= _MOST_BYTES:
        part = whole.crop((0, 0, whole.width, min(height, whole.height)))
        part.quantize(160, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            target, optimize=True
        )
        size = target.stat().st_size
        rows = part.height
        height = int(part.height * 0.9)
    print(f"{target.relative_to(ROOT)}: {whole.width} x {rows}, {size} bytes")


def measured(kind: str, folder: Path) -> Path:
    """Write the report page for one kind of run, with rates that were measured on GPUs."""
    if kind == "history":
        runs = planted_runs.sixty(planted_runs.base(folder / "base"), folder / "runs")
        target = folder / "history.html"
        return history.write(history.read_runs([(None, runs)]), target)[0]
    write = measured_runs.ab if kind == "ab" else functools.partial(measured_runs.write, kind)
    return page.write(stored.read(write(folder)))


def kind_of(directory: Path) -> str:
    run = stored.read(directory).run
    return "crash" if run.crashes else run.verdict.value.lower()


def anywhere(report: Path, folder: Path, hidden: list[str]) -> Path:
    """Return a copy of a report without paths of this machine."""
    copy = Path(shutil.copytree(report, folder))
    for file in copy.rglob("*.json"):
        text = file.read_text("utf-8")
        for prefix in hidden:
            text = text.replace(prefix, "")
        file.write_text(text, "utf-8")
    return copy


def pull_request(chromium, folder: Path) -> None:
    """Return the summary of a pull request that is slower than the merged version, as a page."""
    report = stored.read(report_runs.write("fail", folder))
    run = report.run
    trusted = report_runs.write("pass", folder.with_name("trusted"))
    run.against = AgainstReport(
        run="the run of 2026-11-23T10:43:01+00:00",
        engine="vllm 0.33.0",
        new=["tests/test_performance.py::test_decode_rate[tg32-d0]"],
        mended=["tests/test_correctness.py::test_a_tool_can_be_required"],
        worse=["tg32@d0: 47.3 tok/s against 53.6 (5 stored runs), 11.8% worse; 5% allowed"],
        measured=stored.read(trusted).run.metrics,
    )
    text = summary.markdown(run, report) + "\n[The report, the logs and verdict.json](#)\n"
    body = markdown.markdown(text, extensions=["tables", "md_in_html", "fenced_code"])
    page = chromium.new_page(viewport={"width": 1012, "height": 800})
    page.set_content(f"<style>{_LIKE_A_FORGE}</style>{body}")
    target = OUTPUT / "pull-request.png"
    whole = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    whole.quantize(64, dither=Image.Dither.NONE).save(target, optimize=True)
    print(target, target.stat().st_size, whole.size)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", type=Path, metavar="DIR", nargs="+", default=[])
    parser.add_argument("--hide", metavar="TEXT", nargs="+", default=[])
    parser.add_argument("--only", metavar="KIND", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    if (why := browser.missing()) is not None:
        raise SystemExit(why)
    OUTPUT.mkdir(exist_ok=True)
    real = {kind_of(directory): directory for directory in options.real}
    with browser.chromium() as chromium, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pull_request(chromium, folder / "pull-request")
        for kind in options.only:
            if kind in real:
                directory = anywhere(real[kind], folder / kind, [f"{ROOT}/", *options.hide])
                file = page.write(stored.read(directory))
            else:
                file = measured(kind, folder / kind)
            shoot(chromium, file, kind)


if __name__ == "__main__":
    main()
