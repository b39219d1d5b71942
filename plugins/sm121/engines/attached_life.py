"""Whether an attached server is still the process that was attached to."""

import time
from dataclasses import replace
from functools import partial

import httpx

from sm121.core.server import Server
from sm121.core.waiting import until
from sm121.engines.attached import AttachedProcesses, json_in, json_of
from sm121.engines.life import Alive, Dead
from sm121.engines.signs import SignReader, entry_of, token
from sm121.evidence.failure import Cause

#: vLLM and others call a model "created" at the moment of the question.
_TWO_QUESTIONS_S = 1.2
#: How long a server that does not answer is asked again before it is called gone.
_GONE_AFTER_S = 5.0
#: A log has a line of a request so soon; vLLM and SGLang say every ten seconds what they took.
_LOGGED_WITHIN_S = 13.0


class AttachedLife:
    """The life of a server that somebody else has started: `sm121.engines.life.Life`. It has died
    where it is gone, and where another process has taken its place; then that one is looked at. Two
    processes differ in their pids on this machine, their start and their counters (``/metrics``).
    Where neither pids nor start are seen, all that a server says of itself is compared
    (`sm121.engines.signs`), and its log has to follow the questions."""

    def __init__(self, server: Server) -> None:
        self.accounted = False
        self.processes = AttachedProcesses(server.endpoint.base_url)
        self._endpoint, self._log = server.endpoint, server.log
        with self._endpoint.http(timeout_s=10.0) as http:
            self._named = entry_of(json_of(http, "/v1/models"), server.endpoint.served_name)
        self._reader = SignReader(self._endpoint, self.processes)
        self._find_the_server()
        self._last = self._reader.read()
        self._is_bound = bool(self._last.processes or self._last.started)
        if not self._is_bound:
            first = self._reader.read_all(first=True)
            time.sleep(_TWO_QUESTIONS_S)
            self._last = first.steady(self._reader.read_all())
        self.signs, self._asked_at = self._last, time.monotonic()
        self._changed_after = time.time()
        self._silent = False
        self._dead: Dead | None = None

    @property
    def unwatched(self) -> str | None:
        """Why a restart behind the URL may go unnoticed; None where each one shows."""
        if self.signs.of_one_process:
            return None
        return (
            f"life of the attached server: {self._where}, and it shows neither the start of its "
            "process nor counters (/metrics): a restart of the same release would not be detected; "
            "attach to its own port, on its machine and as its user, or show its /metrics"
        )

    @property
    def no_memory(self) -> str | None:
        """Why its memory cannot be judged; None where its processes are seen here."""
        remedy = "run the suite where it runs, as its user"
        is_here = bool(self.processes.find())
        return None if is_here else f"memory of the attached server: {self._where}; {remedy}"

    @property
    def _where(self) -> str:
        address, upstream = f"{self.processes.host}:{self.processes.port}", self.processes.upstream
        if upstream is not None:
            return f"a proxy listens at {address}, and asks {upstream}"
        return f"nobody who listens at {address} is seen from here"

    def state(self, *, asked_within_s: float = 0.0) -> Alive | Dead:
        """A death stands until it is accounted for; after that, whether the next one lives."""
        reported = self._dead is None or self.accounted
        if reported and time.monotonic() - self._asked_at >= asked_within_s:
            silence, was_silent = self._silence(), self._silent
            self._silent, self._asked_at = silence is not None, time.monotonic()
            if silence is None or not was_silent:
                sign = silence or self._change(was_silent)
                self._dead = self._died(sign, replaced=silence is None) if sign else None
                self.accounted = False
            self._changed_after = time.time()
        return self._dead or Alive()

    def account(self) -> None:
        """Its end is in the report."""
        self.accounted = True

    def answers(self) -> bool:
        """Whether it gives the list of its models within 10 s."""
        return self._endpoint.page("/v1/models") is not None

    def _find_the_server(self) -> None:
        """Whoever listens is the server itself where its start is the one of /metrics, or where it
        asks nobody for its answers."""
        started = self._reader.read().started
        starts = [each.create_time() for each in self.processes.find()]
        if not starts or (started is not None and any(abs(s - started) < 2.0 for s in starts)):
            return
        with self._endpoint.http(timeout_s=30.0) as http:
            self.processes.look_behind(partial(token, http, self._endpoint.served_name))
        self._reader = SignReader(self._endpoint, self.processes)

    def _died(self, sign: str, *, replaced: bool) -> Dead:
        moments = [time.strftime("%TZ", time.gmtime(s)) for s in (self._changed_after, time.time())]
        sign = f"{sign}; between {moments[0]} and {moments[1]}"
        cause = Cause(
            kind="engine_dead",
            summary=sign,
            owner="whoever keeps the attached server: its own log says why it ended",
            remedy="attach to one process, and let it live until the run has ended",
        )
        ended = "the attached server ended, and was perhaps started again"
        return Dead(ended, cause, time.monotonic(), self._log, sign, replaced)

    def _change(self, was_silent: bool) -> str | None:
        """What shows that another process answers than before; None where nothing does."""
        size = self._log_size()
        now, before = self._reader.read() if self._is_bound else self._reader.read_all(), self._last
        sign = next(before.changes(now), None)
        if sign is None and not self._is_bound and not self._follows(size):
            sign = f"its log {self._log} follows its answers no more"
        if sign is None and was_silent:
            sign = "it answered no more, and answers again"
        self._last = now.after(before)
        if sign is not None:
            words = {n: value for n, value in now.words.items() if n in before.words}
            self._last = replace(now, words=words)
        return sign

    def _log_size(self) -> int | None:
        return self._log.stat().st_size if self._log is not None and self._log.is_file() else None

    def _follows(self, size: int | None) -> bool:
        """Whether its log has another size than before a question, in time; one that is moved away
        is copied from where it goes."""
        return size is None or until(
            lambda: self._log_size() != size, _LOGGED_WITHIN_S, every_s=0.05
        )

    def _silence(self) -> str | None:
        deadline, name = time.monotonic() + _GONE_AFTER_S, self._endpoint.served_name
        with self._endpoint.http(timeout_s=10.0) as http:
            while True:
                try:
                    answer = http.get("/v1/models")
                except httpx.TimeoutException:
                    return None  # slow, perhaps for others' sake; a hang is for a test to find
                except httpx.TransportError as error:
                    why = f"it answers no more ({type(error).__name__}: {error})"
                else:
                    if self._named is None or entry_of(json_in(answer), name) is not None:
                        return None
                    why = f"its model is named no more (/v1/models: HTTP {answer.status_code})"
                if time.monotonic() >= deadline:
                    return why
                time.sleep(0.5)
