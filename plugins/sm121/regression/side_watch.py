"""Checks that each side of an A/B comparison keeps the same server, and that it answers sanely."""

from dataclasses import dataclass, field

from sm121.answers import exam
from sm121.core.server import Server
from sm121.core.verdict import Invalid
from sm121.engines.attached_life import AttachedLife
from sm121.engines.life import Dead
from sm121.evidence.silent_errors import ErrorReader
from sm121.regression.ab import Side
from sm121.run import server_decisions
from sm121.run.run import Run


@dataclass
class SideWatch:
    """Compares each measured server of a side with the side's first one (`ab.Visit`)."""

    run: Run
    sides: tuple[Side, Side]
    #: For each side with a URL, watches the process there since the first visit.
    _lives: dict[str, AttachedLife] = field(default_factory=dict)
    #: For each side, reads the log of its server.
    _errors: dict[str, ErrorReader] = field(default_factory=dict)
    #: The prompts that side A continued correctly at its first visit.
    _answered: frozenset[str] | None = None

    def forgotten(self, name: str, server: Server) -> str | None:
        """Return a message if an answer of a server is wrong, but A's first answer was right.

        Returns None if there is no such answer. The rate of a server whose answers are noise must
        not count.

        Args:
            name: The side, ``A`` or ``B``.
            server: Its server.

        Raises:
            Invalid: A itself gave the wrong answer.
        """
        questions = exam.load(self.run.profile.correctness.exam).completions
        mistakes = exam.unknown(server.endpoint, questions)
        if self._answered is None:
            prompts = frozenset(completion.prompt for completion in questions)
            self._answered = prompts - mistakes.keys()
            if not self._answered:
                self.run.record.unproven(
                    "A/B: the known answers of the sides were not compared, because A itself "
                    f"answers wrongly: {mistakes}"
                )
        lost = [prompt for prompt in mistakes if prompt in self._answered]
        if not lost:
            return None
        message = self.run.record.redact(
            f"{name} answers {lost[0]!r} with {mistakes[lost[0]]}, which A answered correctly at "
            "its first turn"
        )
        if name == "A":
            raise Invalid(message)
        return message

    def decide_silent(self, name: str, server: Server) -> None:
        """Judge new errors in the log of a server at a URL.

        Args:
            name: The side.
            server: Its server.
        """
        if server.log is None:
            return
        if name not in self._errors:
            size = server.log.stat().st_size
            self._errors[name] = ErrorReader(server.reader or "", size)
        errors = self._errors[name].read(server.log)
        server_decisions.decide_logged_errors(self.run.record, errors, f"log of {name}")

    def check_process(self, where: str, name: str, server: Server, url: str) -> None:
        """Check that a side's server is still the first one, and not the server of the other side.

        Args:
            where: The side and the number of its measurement, as the message names them.
            name: The side.
            server: Its server.
            url: Its URL.

        Raises:
            Invalid: The server was replaced, or both URLs belong to one server.
        """
        if name not in self._lives:
            self._lives[name] = AttachedLife(server)
            unwatched = self._lives[name].unwatched
            if unwatched is not None:
                self.run.record.unproven(f"A/B: server {name}: {unwatched}")
        life = self._lives[name]
        state = life.state()
        if isinstance(state, Dead):
            raise Invalid(
                f"{where}: the process that answered at {url} was replaced: {state.detail}"
            )
        life_of_a = self._lives.get("A")
        if life_of_a is None or name == "A":
            return
        same = life_of_a.signs.is_same_process(life.signs)
        if same:
            urls = " and ".join(str(side.url) for side in self.sides)
            raise Invalid(f"{urls} are the same server, so there is nothing to compare")
        if same is None:
            self.run.record.unproven(
                "A/B: unknown whether the URLs are of two servers: neither the metric "
                "process_start_time_seconds nor their processes are visible here"
            )
