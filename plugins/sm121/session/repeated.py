"""`sm121 run --every 10m --base-url URL`: checks a running server at regular intervals.

Each round is a separate run of the smoke and correctness checks of the plan `quick`. It measures no
rates, because other clients use the server, too. Between two rounds the suite reads the server's
counters, and so detects a minute with low acceptance of draft tokens.
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
from sm121.session.acceptance import AcceptanceReadings, AcceptanceWatch, read_counters
from sm121.stress import soak

#: The arguments of each round.
_ROUND = ("--plan", "quick", "-m", "smoke or correctness", "-q")
#: Options that the user may not combine with --every.
_OWN_OPTIONS = ("--plan", "-m", "--every", "--certify", "--against", "--shard")
_RECORDS = "rounds.jsonl"
#: The maximum size of a file of records in bytes. A full file is renamed, and a new one is begun.
_LARGEST_FILE = 8 << 20
#: How many reports of failed rounds are kept: the first one and the newest ones.
_RED_REPORTS = 10
#: The exit statuses of a refused run: a usage error, or nothing to run.
_REFUSED = (4, 5)
#: The form of pytest's error messages.
_PYTEST_ERROR = re.compile(r"\b(?:error|ERROR): (?!usage:)(.+)")
#: A round first requests one token, which must come within this many seconds.
_TOKEN_WITHIN_S = 10.0


@dataclass(frozen=True)
class MonitorRound:
    """One round: a line of `rounds.jsonl`.

    Attributes:
        number: The number of the round, from 1. After a restart in the same folder, it continues.
        started: The start of the round, in ISO 8601.
        seconds: The duration of the round.
        verdict: The verdict on the round's run and on the time since the round before it.
        sentence: One line for people.
        acceptance: The lowest share of accepted draft tokens of a minute since the round before it.
            None: no minute had enough drafts.
        report: The folder of the report, if it was kept.
        missed_readings: The number of failed readings of the counters since the last round.
        why_missed: The error of the last failed reading.
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
    """The files of the rounds: one line per round, and the reports of failed rounds.

    Both have a size limit. If the folder contains rounds of earlier processes, their numbers are
    continued, so that no report replaces another, and their reports count for the limit.

    Attributes:
        newest: The number of the newest round in the folder; 0 if there is none.
    """

    def __init__(self, folder: Path) -> None:
        """Find the rounds in a folder.

        Args:
            folder: The folder of the rounds. It is created if it does not exist.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = folder / _RECORDS
        self._older = self._file.with_suffix(".1.jsonl")
        self._reports = _numbered_reports(folder)
        recorded = [*_numbers(self._older), *_numbers(self._file)]
        self.newest = max([0, *recorded, *self._reports])

    def keep(self, played: MonitorRound, report: Path | None) -> MonitorRound:
        """Write the line of a round. Keep its report if the round failed.

        Args:
            played: The round.
            report: The folder of its report. The next round overwrites this folder.

        Returns:
            The round, with the place of the kept report.
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
        """Copy a report. Remove the oldest reports beyond the limit, except the first one."""
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

    A process that was killed during a write leaves an incomplete line, which has no number.
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
    """Whether the last line of a file is incomplete."""
    if lines.seek(0, os.SEEK_END) == 0:
        return False
    lines.seek(-1, os.SEEK_END)
    return lines.read(1) != b"\n"


def repeat(
    every_s: float,
    play: Callable[[int], tuple[MonitorRound, Path | None]],
    records: Records,
    say: Callable[[str], None],
    *,
    stopped: threading.Event,
) -> int:
    """Run rounds until a signal comes.

    Args:
        every_s: The seconds from the beginning of one round to the beginning of the next.
        play: Runs the round with a given number; returns the round and the folder of its report.
        records: The files of the rounds.
        say: Prints one line.
        stopped: Set by a signal. Then no further round begins.

    Returns:
        0 if all rounds passed, 1 if a round failed, 5 if no round ended.
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


def line_of(played: MonitorRound) -> str:
    """Return the line to print for a round.

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
    """Check a running server at regular intervals, until SIGINT, SIGTERM or SIGHUP.

    Args:
        every: The time from one round to the next, such as 10m.
        words: The other arguments of `sm121 run`, including --base-url.
        say: Prints one line.

    Returns:
        The exit status of `repeat`.

    Raises:
        UsageError: An argument is wrong or missing, or the first round selects no checks.
    """
    every_s = soak.parse_duration(every, "--every")
    option = own_options.reader(words)
    given = {_name_of(word) for word in words}
    for name in _OWN_OPTIONS:
        if name in given:
            raise UsageError(f"--every and {name}: expected one of them, got both")
    if option("--base-url") is None:
        raise UsageError(
            "--every: expected --base-url URL as well, because --every checks a running server"
        )
    url = root_of(option("--base-url"), "--base-url")
    endpoint = Endpoint(url, given_key.api_key(option) or NO_KEY, "")
    folder = Path(option("--report-dir")).absolute()
    watch = AcceptanceWatch(functools.partial(read_counters, endpoint))
    player = _Player(_for_a_round(words), folder, endpoint, watch)
    with watch.running(), _signals(player):
        return repeat(every_s, player.play, Records(folder), say, stopped=player.stopped)


def _name_of(word: str) -> str:
    """Return the option's name of ``--name=value`` or ``-mvalue``; other words are unchanged."""
    is_short = word.startswith("-") and not word.startswith("--")
    return word[:2] if is_short else word.partition("=")[0]


def judged(verdict: Verdict, sentence: str, taken: AcceptanceReadings) -> tuple[Verdict, str]:
    """Judge a round together with the time before it.

    Args:
        verdict: The verdict of the round's own run.
        sentence: The line of the round's run.
        taken: What the watch has found since the last round.

    Returns:
        The verdict and the line for both. If both have failures, the line has both.
    """
    finding = taken.deviation or taken.not_watched
    if finding is None:
        return verdict, sentence
    if verdict is not Verdict.PASS:
        return verdict, f"{sentence}; {finding}"
    verdict = Verdict.FAIL if taken.deviation is not None else Verdict.INCONCLUSIVE
    return verdict, f"{verdict}: {finding}"


class _Player:
    """Runs the suite once for each round."""

    def __init__(
        self, words: list[str], folder: Path, endpoint: Endpoint, watch: AcceptanceWatch
    ) -> None:
        self._words = words
        self._report = folder / "latest"
        self._log = folder / "round.log"  # a report directory must contain only the report
        self._endpoint = endpoint
        self._watch = watch
        self._process: subprocess.Popen[bytes] | None = None
        self._has_run = False
        self.stopped = threading.Event()

    def play(self, number: int) -> tuple[MonitorRound, Path]:
        """Run one round.

        Args:
            number: The number of the round.

        Returns:
            The round, and the folder of its report.

        Raises:
            UsageError: The first run was refused, for example because of an unknown option. All
                later rounds would be refused, too.
        """
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        began = time.monotonic()
        own_verdict, own_sentence = self._run()
        taken = self._watch.taken()
        verdict, sentence = judged(own_verdict, own_sentence, taken)
        played = MonitorRound(
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
        """End the running round, and begin no other."""
        self.stopped.set()
        if self._process is not None:
            # Send SIGTERM, because Python drops a KeyboardInterrupt that is raised in a callback of
            # the import system. SIGTERM ends the process if the suite has not set its handler yet,
            # and interrupts the run afterwards.
            self._process.send_signal(signal.SIGTERM)

    def _run(self) -> tuple[Verdict, str]:
        shutil.rmtree(self._report, ignore_errors=True)
        key = self._endpoint.api_key if self._endpoint.asks_for_a_key else None
        probe = health.check(
            self._endpoint.base_url, within_s=_TOKEN_WITHIN_S, api_key=key, model=None
        )
        # If the server is stalled, the suite's own requests would wait for it.
        if not probe.healthy:
            return Verdict.FAIL, f"FAIL: {probe.message}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        words = [*self._words, *_ROUND, f"--report-dir={self._report}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                own_tests.command(words, Path.cwd()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # In its own session, the process gets a Ctrl-C only once, through `stop`.
                start_new_session=True,
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
        """Return the verdict of a round's run, and its line for people."""
        try:
            run = stored_run.file_of(self._report)
        except UsageError:
            why = _reason_in(self._log)
            return Verdict.NOT_RUN, f"{Verdict.NOT_RUN}: no verdict (exit status {status}): {why}"
        if not run.finished:
            return Verdict.NOT_RUN, f"{Verdict.NOT_RUN}: the run did not end (exit status {status})"
        return run.verdict, str(headline.headline_of(run))


@contextlib.contextmanager
def _signals(player: _Player) -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        player.stop()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # With nohup, SIGHUP stays ignored.
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _for_a_round(words: Sequence[str]) -> list[str]:
    """Return the arguments for each round: those of the user without --report-dir."""
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
