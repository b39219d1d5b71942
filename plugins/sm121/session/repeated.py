"""Check a running server again and again: `sm121 run --every 10m --base-url URL`.

Each round is a run of its own, of the smoke and correctness checks of the plan `quick`; it measures
no rates, because other clients use the server too. Between two rounds the server's counters are
read, so that a minute in which speculation fails is found even if no round falls into it.
"""

import contextlib
import datetime
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from sm121.client import health
from sm121.core import own_tests
from sm121.core.address import root_of
from sm121.core.command_parser import Parser
from sm121.core.errors import UsageError
from sm121.core.printable import printable
from sm121.core.server import NO_KEY, Endpoint
from sm121.core.verdict import Verdict
from sm121.engines import given_key
from sm121.report import headline
from sm121.run import stored_run
from sm121.session import own_options
from sm121.session.acceptance import AcceptanceWatch, Taken, read_counters
from sm121.stress import soak

#: What a round runs.
_ROUND = ("--plan", "quick", "-m", "smoke or correctness", "-q")
#: Options of the loop and of a round that a user may not give.
_OWN_OPTIONS = ("--plan", "-m", "--every", "--certify", "--against", "--shard")
_RECORDS = "rounds.jsonl"
#: Bytes of a file of records; it then becomes the older one of two.
_LARGEST_FILE = 8 << 20
#: Reports of red rounds that are kept: the first, and the newest.
_RED_REPORTS = 10
#: Exit statuses of a run that was refused: a wrong request, and nothing to run.
_REFUSED = (4, 5)
#: How pytest names what is wrong with a request.
_PYTEST_ERROR = re.compile(r"\b(?:error|ERROR): (?!usage:)(.+)")
#: A round begins with one token, which has so many seconds.
_TOKEN_WITHIN_S = 10.0


@dataclass(frozen=True)
class Round:
    """One round, as `rounds.jsonl` has it.

    Attributes:
        number: From 1, also over restarts in one folder.
        started: When it began, in ISO 8601.
        seconds: How long it took.
        verdict: The verdict of its run, or of the time before it.
        sentence: One line for a person.
        acceptance: The lowest share of accepted draft tokens of a minute since the round before it.
            None: no minute had enough drafts.
        report: The folder of its report, if it was kept.
        missed_readings: How many readings of the server's counters failed since the round before.
        why_missed: The error of the last of them.
    """

    number: int
    started: str
    seconds: float
    verdict: Verdict
    sentence: str
    acceptance: float | None = None
    report: str | None = None
    missed_readings: int = 0
    why_missed: str | None = None

    @property
    def is_red(self) -> bool:
        """Whether the round shows a deviation."""
        return self.verdict is not Verdict.PASS


class Records:
    """The files of the rounds: one line each, and the reports of red ones; both bounded.

    A process that finds rounds of earlier processes in its folder numbers on from them, so that no
    report replaces another, and counts their reports in its bound.

    Attributes:
        newest: The number of the newest round in the folder; 0 if there is none.
    """

    def __init__(self, folder: Path) -> None:
        """Read which rounds a folder has.

        Args:
            folder: Where the rounds are kept; made if it does not exist.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = folder / _RECORDS
        self._older = self._file.with_suffix(".1.jsonl")
        self._reports = _numbered_reports(folder)
        recorded = [*_numbers(self._older), *_numbers(self._file)]
        self.newest = max([0, *recorded, *self._reports])

    def keep(self, played: Round, report: Path | None) -> Round:
        """Write a round's line. Keep its report if the round is red.

        Args:
            played: The round.
            report: The folder of its report, which the next round replaces.

        Returns:
            The round, with the place of its report.
        """
        self.newest = max(self.newest, played.number)
        if played.is_red and report is not None and report.is_dir():
            played = replace(played, report=str(self._keep_report(played.number, report)))
        if self._file.is_file() and self._file.stat().st_size > _LARGEST_FILE:
            self._file.replace(self._older)
        record = asdict(played) | {"verdict": played.verdict.value}
        with self._file.open("ab+") as lines:
            if _is_cut(lines):
                lines.write(b"\n")
            lines.write(json.dumps(record).encode() + b"\n")
        return played

    def _keep_report(self, number: int, report: Path) -> Path:
        """Copy a report; remove those beyond the bound, except the first."""
        kept = self._folder / f"red-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(report, kept, symlinks=True)
        self._reports[number] = kept
        for old in sorted(self._reports)[1 : 1 - _RED_REPORTS]:
            shutil.rmtree(self._reports.pop(old), ignore_errors=True)
        return kept


def _numbered_reports(folder: Path) -> dict[int, Path]:
    """Return the kept reports in a folder, by the number of their round."""
    found: dict[int, Path] = {}
    for path in folder.glob("red-*"):
        match = re.fullmatch(r"red-([0-9]+)", path.name)
        if match:
            found[int(match[1])] = path
    return found


def _numbers(file: Path) -> Iterator[int]:
    """Yield the numbers of the rounds in a file of records.

    A process that was killed while it wrote leaves a line that is cut: it has no number.
    """
    if not file.is_file():
        return
    for line in file.read_text("utf-8", "replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        number = record.get("number") if isinstance(record, dict) else None
        if isinstance(number, int):
            yield number


def _is_cut(lines: BinaryIO) -> bool:
    """Whether the last line of a file has no end."""
    if lines.seek(0, os.SEEK_END) == 0:
        return False
    lines.seek(-1, os.SEEK_END)
    return lines.read(1) != b"\n"


def repeat(
    every_s: float,
    play: Callable[[int], tuple[Round, Path | None]],
    records: Records,
    say: Callable[[str], None],
    *,
    stopped: threading.Event,
) -> int:
    """Play rounds until a signal comes.

    Args:
        every_s: Seconds from the beginning of one round to that of the next.
        play: Plays the round of a number; returns it and the folder of its report.
        records: Where the rounds are kept.
        say: Prints one line.
        stopped: Set by a signal: no other round begins.

    Returns:
        0 if every round was green, else 1; 5 if no round ended.
    """
    rounds = 0
    red = 0
    while not stopped.is_set():
        began = time.monotonic()
        played, report = play(records.newest + 1)
        if stopped.is_set() and played.verdict is Verdict.NOT_RUN:
            break  # the signal ended this round
        rounds += 1
        played = records.keep(played, report)
        if played.is_red:
            red += 1
        say(line_of(played))
        stopped.wait(max(0.0, every_s - (time.monotonic() - began)))
    counted = "1 round" if rounds == 1 else f"{rounds} rounds"
    say(f"stopped after {counted}: {rounds - red} green, {red} red")
    if rounds == 0:
        return 5
    if red:
        return 1
    return 0


def line_of(played: Round) -> str:
    """Return the line that is printed of a round.

    Args:
        played: The round.
    """
    acceptance = ""
    if played.acceptance is not None:
        acceptance = f"; acceptance at least {played.acceptance:.0%}"
    missed = ""
    if played.missed_readings:
        why = printable(played.why_missed or "")
        missed = f"; failed readings of /metrics: {played.missed_readings} ({why})"
    mark = "RED " if played.is_red else ""
    report = f"; report: {played.report}" if played.report else ""
    return (
        f"{mark}round {played.number}: {printable(played.sentence)} "
        f"({played.seconds:.0f} s{acceptance}{missed}{report})"
    )


def run(every: str, words: Sequence[str], say: Callable[[str], None]) -> int:
    """Check a running server again and again, until SIGINT, SIGTERM or SIGHUP.

    Args:
        every: The time from one round to the next, as in 10m.
        words: The other arguments of `sm121 run`; --base-url is among them.
        say: Prints one line.

    Returns:
        The exit status, as of `repeat`.

    Raises:
        UsageError: An argument is wrong or missing, or the first round selects no checks.
    """
    every_s = soak.parse_duration(every, "--every")
    option = own_options.reader(words)
    given = {word.partition("=")[0] for word in words}
    for name in _OWN_OPTIONS:
        if name in given:
            raise UsageError(f"--every and {name}: expected one of them")
    if option("--base-url") is None:
        raise UsageError("--every: expected --base-url URL too. It checks a running server")
    url = root_of(option("--base-url"), "--base-url")
    endpoint = Endpoint(url, given_key.api_key(option) or NO_KEY, "")
    folder = Path(option("--report-dir")).absolute()
    watch = AcceptanceWatch(functools.partial(read_counters, endpoint))
    player = _Player(_for_a_round(words), folder, endpoint, watch)
    with watch.running(), _signals(player):
        return repeat(every_s, player.play, Records(folder), say, stopped=player.stopped)


def judged(verdict: Verdict, sentence: str, taken: Taken) -> tuple[Verdict, str]:
    """Judge a round together with the time before it.

    Args:
        verdict: The verdict of the round's own run.
        sentence: Its line for a person.
        taken: What the watch found since the round before it.

    Returns:
        The verdict and the line of both. A deviation is named beside the failure of a red round.
    """
    finding = taken.deviation or taken.not_watched
    if finding is None:
        return verdict, sentence
    if verdict is not Verdict.PASS:
        return verdict, f"{sentence}; {finding}"
    verdict = Verdict.FAIL if taken.deviation is not None else Verdict.INCONCLUSIVE
    return verdict, f"{verdict}: {finding}"


class _Player:
    """Runs the suite once a round."""

    def __init__(
        self, words: list[str], folder: Path, endpoint: Endpoint, watch: AcceptanceWatch
    ) -> None:
        self._words = words
        self._report = folder / "latest"
        self._log = folder / "round.log"  # a report directory has nothing but the report
        self._endpoint = endpoint
        self._watch = watch
        self._process: subprocess.Popen[bytes] | None = None
        self._has_run = False
        self.stopped = threading.Event()

    def play(self, number: int) -> tuple[Round, Path]:
        """Play one round.

        Args:
            number: Its number.

        Returns:
            The round, and the folder of its report.

        Raises:
            UsageError: The first run was refused, as for an option that does not exist: every round
                would be.
        """
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        began = time.monotonic()
        own_verdict, own_sentence = self._run()
        taken = self._watch.taken()
        verdict, sentence = judged(own_verdict, own_sentence, taken)
        played = Round(
            number=number,
            started=started,
            seconds=time.monotonic() - began,
            verdict=verdict,
            sentence=sentence,
            acceptance=taken.lowest,
            missed_readings=taken.missed,
            why_missed=taken.why_missed,
        )
        return played, self._report

    def stop(self) -> None:
        """End the round that runs, and begin no other."""
        self.stopped.set()
        if self._process is not None:
            # Python drops an interrupt that comes in a callback of its imports. SIGTERM ends it
            # before the suite's handler is set, and is an interrupt from then on.
            self._process.send_signal(signal.SIGTERM)

    def _run(self) -> tuple[Verdict, str]:
        shutil.rmtree(self._report, ignore_errors=True)
        key = self._endpoint.api_key if self._endpoint.asks_for_a_key else None
        probe = health.check(
            self._endpoint.base_url, within_s=_TOKEN_WITHIN_S, api_key=key, model=None
        )
        if not probe.healthy:  # the suite's own requests would wait for a stalled server
            return Verdict.FAIL, f"FAIL: {probe.message}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        words = [*self._words, *_ROUND, f"--report-dir={self._report}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                own_tests.command(words, Path.cwd()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches it once, through `stop`
            )
            if self.stopped.is_set():
                self.stop()
            status = self._process.wait()
            self._process = None
        verdict, sentence = self._outcome(status)
        if status in _REFUSED and verdict is Verdict.NOT_RUN and not self._has_run:
            raise UsageError(f"--every: expected a round that runs checks, got {sentence}")
        self._has_run = True
        return verdict, sentence

    def _outcome(self, status: int) -> tuple[Verdict, str]:
        """Return the verdict of a round's run and its line for a person."""
        try:
            run = stored_run.file_of(self._report)
        except UsageError:
            why = _reason_in(self._log)
            return Verdict.NOT_RUN, f"{Verdict.NOT_RUN}: no verdict (exit status {status}): {why}"
        if not run.finished:
            return Verdict.NOT_RUN, f"{Verdict.NOT_RUN}: the run did not end (exit status {status})"
        return run.verdict, str(headline.of(run))


@contextlib.contextmanager
def _signals(player: _Player) -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        player.stop()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _for_a_round(words: Sequence[str]) -> list[str]:
    """Return the words of the command line that each round gets: all but --report-dir."""
    parser = Parser(prog="sm121 run", add_help=False, allow_abbrev=False)
    parser.add_argument("--report-dir")
    return parser.parse_known_args(list(words))[1]


def _reason_in(log: Path) -> str:
    """Return why a run has no verdict: pytest's last error, or else its last line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    for line in reversed(lines):
        match = _PYTEST_ERROR.search(line)
        if match:
            return match[1]
    return next((line for line in reversed(lines) if line), "it printed nothing")
