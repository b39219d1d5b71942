"""Durations in README, docs and CI examples equal ``fixtures/durations.toml``, and numbers of
checks equal `sm121 plan`."""

import re
from pathlib import Path

import pytest

from meta_tests.folders import ROOT
from sm121.session import durations

#: A number of minutes or hours, as people write it in a text.
_QUOTED = re.compile(
    r"(?<![\w.:])(?:(?P<clock>\d+:\d\d)|(?P<low>\d+(?:\.\d+)?)(?: to (?P<high>\d+(?:\.\d+)?))?"
    r"|(?P<word>half an|an?|one|two|three))[ -](?P<unit>min(?:utes?)?|h(?:ours?)?)\b"
    r"(?: (?P<rest>\d+) min\b)?"
)
_WORDS = {"half an": 0.5, "a": 1, "an": 1, "one": 1, "two": 2, "three": 3}
#: Pages that are generated from the parsers and profiles, or by `sm121 plan`.
_GENERATED = ("commands.md", "options.md", "requirements.md")
_LEAST_ROOM = 1.05


SHIPPED = durations.load()


def quoting_files() -> list[Path]:
    """Return every file that shows a duration to a reader."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in _GENERATED]
    others = [*(ROOT / "docs" / "ci").iterdir(), *(ROOT / ".github").rglob("*.yml")]
    own = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "action.yml")]
    return sorted([*own, *pages, *others])


def blocks(file: Path) -> list[str]:
    """Return the paragraphs, the table rows and the code lines of a page."""
    text = file.read_text("utf-8").partition("<!-- Made by")[0]
    whole: list[str] = []
    in_code = file.suffix != ".md"
    begins_anew = True
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        is_alone = in_code or line.startswith("|") or not line.strip()
        if is_alone or begins_anew or re.match(r"\s*(-|\d+\.) ", line):
            whole.append(line)
        else:
            whole[-1] += f" {line.strip()}"
        begins_anew = is_alone
    return whole


def minutes_of(match: re.Match[str]) -> tuple[float, float]:
    """Return the smallest and the largest number of minutes of a quoted duration."""
    if match["clock"]:
        minutes, seconds = match["clock"].split(":")
        low = high = int(minutes) + int(seconds) / 60
    else:
        low = _WORDS[match["word"]] if match["word"] else float(match["low"])
        high = float(match["high"] or low)
    factor = 60 if match["unit"].startswith("h") else 1
    rest = float(match["rest"] or 0)
    return low * factor + rest, high * factor + rest


def minutes_said(row: durations.Quoted) -> tuple[float, float]:
    """Return the smallest and the largest number of minutes of a row.

    The duration of a plan is rounded as the suite does it."""
    if row.minutes is not None:
        return row.minutes
    match = _QUOTED.search(str(SHIPPED.time(row)))
    assert match is not None, row.id
    return minutes_of(match)


def wrong_quotes(file: Path) -> list[str]:
    """Return each duration that equals no row, or equals a row about something else."""
    wrong = []
    for block in blocks(file):
        about = []
        for row in SHIPPED.quoted:
            if any(word in block for word in row.near):
                about.append(row)
        for match in _QUOTED.finditer(block):
            quoted = minutes_of(match)
            if any(quoted == pytest.approx(minutes_said(row), abs=0.1) for row in about):
                continue
            rows = "; ".join(f"{row.id}: {SHIPPED.time(row)}" for row in about) or "no row"
            wrong.append(f"{match[0]!r} in {block.strip()[:120]!r}: {rows}")
    return wrong


@pytest.mark.parametrize("file", quoting_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_quoted_duration_is_that_of_a_row(file):
    assert wrong_quotes(file) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        pytest.param("`--plan quick` takes 4 to 10 min", 0, id="right"),
        pytest.param("`--plan quick` takes 8 min", 1, id="another-number"),
        pytest.param("`--plan merge` takes 4 to 10 minutes", 1, id="another-row"),
        pytest.param("| `--certify` | 4 h 40 min |", 1, id="hours-and-minutes"),
        pytest.param("nothing of it is a duration: 10 minimal, 3 hosts, 2.5", 0, id="no-duration"),
    ],
)
def test_a_wrong_quote_is_found(tmp_path, text, number):
    file = tmp_path / "page.md"
    file.write_text(text, "utf-8")
    assert len(wrong_quotes(file)) == number


#: The profile that the documents are about, and the one for a CPU.
_PROFILES = ("sm121-gpt-oss-120b", "cpu-tiny-gpt-oss")
_COUNTED = re.compile(
    r"(?P<checks>\d+) checks of plan (?P<plan>\w+)|"
    r"--plan (?P<named>\w+)`? \((?P<of_named>\d+) checks"
)


#: The level that is in the plan quick only with an option.
_BY_OPTION = ("quick", "regression")


def checks_of_plans() -> dict[str, int]:
    """Return the number of checks of each plan at the end of docs/plans.md.

    test_docs.py compares that part with `sm121 plan`."""
    made = (ROOT / "docs" / "plans.md").read_text("utf-8").partition("<!-- Made by")[2]
    return {plan: int(checks) for plan, checks in re.findall(r"^\| (\w+) \| (\d+) \|", made, re.M)}


def checks_that_ship(profile: str, plan: str) -> int:
    levels = SHIPPED.profiles[profile].plans[plan].levels
    return sum(bounds.checks for level, bounds in levels.items() if (plan, level) != _BY_OPTION)


def wrong_counts(file: Path) -> list[str]:
    """Return each wrong number of checks of a plan."""
    wrong = []
    for match in _COUNTED.finditer(file.read_text("utf-8")):
        plan = match["plan"] or match["named"]
        checks = match["checks"] or match["of_named"]
        expected = {checks_that_ship(profile, plan) for profile in _PROFILES}
        if int(checks) not in expected:
            wrong.append(f"{match[0]}: expected one of {sorted(expected)}")
    return wrong


def test_the_checks_that_ship_are_those_of_the_plans():
    counts = checks_of_plans()
    assert [*counts] == ["quick", "merge", "full"]
    assert {plan: checks_that_ship(_PROFILES[0], plan) for plan in counts} == counts


@pytest.mark.parametrize("file", quoting_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_quoted_number_of_checks_is_that_of_the_plan(file):
    assert wrong_counts(file) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        pytest.param("`PASS: 36 checks of plan quick passed`", 0, id="right"),
        pytest.param("`PASS: 29 checks of plan quick passed`", 1, id="of-an-earlier-day"),
        pytest.param("`--plan merge` (474 checks, about 30 min)", 1, id="a-named-plan"),
    ],
)
def test_a_wrong_number_of_checks_is_found(tmp_path, text, number):
    file = tmp_path / "page.md"
    file.write_text(text, "utf-8")
    assert len(wrong_counts(file)) == number


def timeouts(file: Path) -> dict[str, int]:
    """Return the timeout in minutes of each job of a GitHub workflow or a GitLab pipeline."""
    found = {}
    job = ""
    indent = "" if "gitlab" in file.name else "  "
    for line in file.read_text("utf-8").splitlines():
        if match := re.match(indent + r"([\w-]+):$", line):
            job = match[1]
        elif match := re.match(r"\s+timeout-minutes: (\d+)", line):
            found[job] = int(match[1])
        elif match := re.match(r"\s+timeout: (\d+)h", line):
            found[job] = 60 * int(match[1])
    return found


@pytest.mark.parametrize("file", sorted({row.file for row in SHIPPED.timeout}))
def test_the_limit_of_a_job_is_that_of_a_row_and_long_enough(file):
    rows = {row.job: row for row in SHIPPED.timeout if row.file == file}
    assert timeouts(ROOT / file) == {job: row.minutes for job, row in rows.items()}
    high_s = {row.id: SHIPPED.time(row).high for row in SHIPPED.quoted}
    short = [row for row in rows.values() if row.minutes * 60 < _LEAST_ROOM * high_s[row.of]]
    assert short == []
