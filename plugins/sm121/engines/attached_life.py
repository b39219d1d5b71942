"""Detect that an attached server has ended, or that another process answers in its place."""

import time
from dataclasses import replace
from functools import partial

import httpx

from sm121.core.server import Server
from sm121.core.waiting import until
from sm121.engines.attached_pages import entry_of, json_in, json_of, request_token
from sm121.engines.attached_processes import AttachedProcesses
from sm121.engines.life import Alive, Dead
from sm121.engines.sign_reader import SignReader
from sm121.engines.signs import CLOCK_SLACK_S, CREATED_OF_ANSWERS, Signs, Word
from sm121.evidence.failure import Cause

#: Seconds between the first two readings of the values that identify a server process (`Signs`). In
#: vLLM and other engines, the ``created`` of a model is the time of the request. This value changes
#: within this time, which shows that it does not identify the process.
_TWO_REQUESTS_S = 1.2
#: If a server does not answer, the suite repeats its requests for this many seconds. After that,
#: the server counts as ended.
_GONE_AFTER_S = 5.0
#: After a request, the server's log must contain a line about it within this many seconds.
_LOGGED_WITHIN_S = 5.0
#: Values that differ after every restart of a server. If ``created`` is the same in all answers, it
#: is the time at which the server started.
_BOUND = {
    Word("random_seed", "/server_info"),
    Word("random_seed", "/get_server_info"),
    Word("created", "/v1/models"),
    CREATED_OF_ANSWERS,
}


class AttachedLife:
    """The life of a server that somebody else has started: `sm121.engines.life.Life`.

    The server has died if it no longer answers, or if another process answers in its place; from
    then on, this object watches that other process. Another process is detected by another pid,
    another start time, or smaller counters in ``/metrics``. If neither pids nor start times are
    visible, this object compares all `Signs` of the server, and also expects a line in the server's
    log for each request.

    Args:
        server: The attached server.
    """

    def __init__(self, server: Server) -> None:
        #: Whether the end of the server was already reported.
        self.accounted = False
        self.processes = AttachedProcesses(server.endpoint.base_url)
        self._endpoint = server.endpoint
        self._log = server.log
        with self._endpoint.http(timeout_s=10.0) as http:
            self._named = entry_of(json_of(http, "/v1/models"), server.endpoint.served_name)
        self._reader = SignReader(self._endpoint, self.processes)
        if self._may_be_a_proxy(self._reader.read()):
            with self._endpoint.http(timeout_s=30.0) as http:
                ask = partial(request_token, http, self._endpoint.served_name)
                self.processes.look_behind(ask)
            self._reader = SignReader(self._endpoint, self.processes)
        self._last = self._reader.read()
        self._is_bound = bool(self._last.processes or self._last.started)
        if not self._is_bound:
            first = self._reader.read_all(first=True)
            time.sleep(_TWO_REQUESTS_S)
            self._last = first.steady(self._reader.read_all())
        #: The identifying values of the server when the suite attached to it.
        self.signs = self._last
        self._asked_at = time.monotonic()
        #: The time of the last check. A change that is found later happened after it.
        self._changed_after = time.time()
        self._silent = False
        self._dead: Dead | None = None

    def _may_be_a_proxy(self, signs: Signs) -> bool:
        """Return whether the listener may be another process than the server.

        The listener is the server itself if its start time is the one in /metrics.
        """
        starts = [process.create_time() for process in self.processes.find()]
        if not starts:
            return False
        if signs.started is None:
            return True
        return all(abs(start - signs.started) >= CLOCK_SLACK_S for start in starts)

    @property
    def unwatched(self) -> str | None:
        """Why a restart of the server may go unnoticed; None if every restart is detected."""
        signs = self.signs
        has_bound_word = not _BOUND.isdisjoint(signs.words)
        if has_bound_word or signs.started or signs.processes or any(signs.counters.values()):
            return None  # after a restart, at least one of these values differs
        return (
            f"life of the attached server: {self._where}, and the server reports neither its start "
            "time nor counters (/metrics), so the suite would not detect a restart of the same "
            "release. Attach to the server's own port, on its machine and as its user, or enable "
            "/metrics"
        )

    @property
    def no_memory(self) -> str | None:
        """Why the server's memory cannot be judged; None if its processes are visible here."""
        if self.processes.find():
            return None
        remedy = "run the suite on the server's machine, as the server's user"
        return f"memory of the attached server: {self._where}; {remedy}"

    @property
    def _where(self) -> str:
        address = f"{self.processes.host}:{self.processes.port}"
        upstream = self.processes.upstream
        if upstream is not None:
            return f"a proxy listens at {address} and passes requests to {upstream}"
        return f"this process cannot see which process listens at {address}"

    def state(self, *, asked_within_s: float = 0.0) -> Alive | Dead:
        """Return whether the server lives.

        Once the server has died, each call returns the same `Dead` until `account` is called.

        Args:
            asked_within_s: No request is sent if the server answered within this many seconds.
        """
        is_reported = self._dead is None or self.accounted
        if is_reported and time.monotonic() - self._asked_at >= asked_within_s:
            self._look()
        return self._dead or Alive()

    def answers(self) -> bool:
        """Return whether the server sends the list of its models within 10 s."""
        return self._endpoint.page("/v1/models") is not None

    def account(self) -> None:
        """Mark the server's end as reported."""
        self.accounted = True

    def _look(self) -> None:
        silence = self._silence()
        was_silent = self._silent
        self._silent = silence is not None
        self._asked_at = time.monotonic()
        if silence is None:
            self._note(self._change(was_silent), replaced=True)
        elif not was_silent:
            self._note(silence, replaced=False)
        self._changed_after = time.time()

    def _note(self, sign: str | None, *, replaced: bool) -> None:
        self._dead = None if sign is None else self._died(sign, replaced=replaced)
        self.accounted = False

    def _died(self, sign: str, *, replaced: bool) -> Dead:
        earliest = time.strftime("%TZ", time.gmtime(self._changed_after))
        latest = time.strftime("%TZ", time.gmtime())
        detail = f"{sign} (between {earliest} and {latest})"
        cause = Cause(
            kind="engine_dead",
            summary=f"the attached server: {detail}",
            owner="the owner of the attached server: the server's log shows why it ended",
            remedy=(
                "attach to a server with one process, and keep it running until the run has ended"
            ),
        )
        return Dead(
            what="the attached server ended, and was perhaps started again",
            cause=cause,
            when=time.monotonic(),
            evidence=self._log,
            detail=detail,
            replaced=replaced,
        )

    def _change(self, was_silent: bool) -> str | None:
        """Compare the server's current `Signs` with the stored ones, and store the current ones.

        Return the evidence that another process now answers; None if there is none.
        """
        before = self._last
        size = self._log_size()
        now = self._reader.read() if self._is_bound else self._reader.read_all()
        sign = next(before.changes(now), None)
        if sign is None and not self._is_bound and size is not None:
            # The check also works if the log is rotated, because lines are copied from the renamed
            # file, too.
            follows = until(lambda: self._log_size() != size, _LOGGED_WITHIN_S, every_s=0.05)
            if not follows:
                sign = f"its log {self._log} no longer contains lines about its answers"
        if sign is None and was_silent:
            sign = "it stopped answering, and now answers again"
        if sign is None:
            self._last = now.after(before)
        else:
            words = {word: value for word, value in now.words.items() if word in before.words}
            self._last = replace(now, words=words)
        return sign

    def _log_size(self) -> int | None:
        if self._log is None or not self._log.is_file():
            return None
        return self._log.stat().st_size

    def _silence(self) -> str | None:
        """Return why the server counts as dead; None if it answers, or is only slow."""
        deadline = time.monotonic() + _GONE_AFTER_S
        with self._endpoint.http(timeout_s=10.0) as http:
            while True:
                try:
                    answer = http.get("/v1/models")
                except httpx.TimeoutException:
                    # The server is slow, perhaps because of other clients; tests detect a hang.
                    return None
                except httpx.TransportError as error:
                    why = f"it no longer answers ({type(error).__name__}: {error})"
                else:
                    entry = entry_of(json_in(answer), self._endpoint.served_name)
                    if self._named is None or entry is not None:
                        return None
                    why = f"it no longer lists its model (/v1/models: HTTP {answer.status_code})"
                if time.monotonic() >= deadline:
                    return why
                time.sleep(0.5)
