"""A server that is measured: its address, its client, and which kinds of prompts it accepts."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sm121.client import timed_process
from sm121.client.patience import Patience
from sm121.client.timed import TimedRequest, completion
from sm121.client.timed_answer import TimedAnswer
from sm121.core.errors import Sm121Error
from sm121.core.server import Endpoint
from sm121.measure import counters, measurement
from sm121.measure.plan import Plan
from sm121.measure.prompts import Prompts

#: Prints a progress line.
Show = Callable[[str], None]

#: The length of the answer to the probe, in tokens. The probe shows how to count the server's
#: tokens.
_PROBE_TOKENS = 2
#: The lengths of the probe's prompts: the first in token ids, the second in words of text.
_PROBE_PROMPT_TOKENS = 8
_PROBE_WORDS = 32
#: Smaller vocabularies to try if the server refuses an id as out of range.
_VOCABULARIES = (30_000, 900)
#: Part of the error in this case: of vLLM ("out of vocabulary"), and of llama-server ("Prompt
#: contains invalid tokens", tools/server/server-context.cpp).
_OUT_OF_RANGE = ("vocab", "invalid tokens")


@dataclass
class MeasuredServer:
    """A server, the client that measures it, and the plan; created by `MeasuredServer.open`."""

    endpoint: Endpoint
    sender: timed_process.TimedProcess
    prompts: Prompts
    plan: Plan
    #: The folder of the raw records.
    directory: Path
    show: Show = lambda _line: None
    #: Reasons why all numbers of this server are invalid, such as a wrong kernel path.
    invalid: list[measurement.Invalidity] = field(default_factory=list)
    #: Checks that were not possible for this server.
    unproven: list[str] = field(default_factory=list)
    #: Returns the new log lines about kernels that were compiled during a request.
    compiled: Callable[[], list[str]] = list
    #: How many requests the server runs at a time; None if the engine chooses.
    slots: int | None = None
    #: Whether `slots` is from the server's start-up log or arguments, and not from the profile.
    slots_sure: bool = False
    #: The maximum length of a prompt with its answer, in tokens; None if it is unknown.
    context: int | None = None
    #: Whether timed requests must request token ids, because the server offers no other way to
    #: count the tokens of a chunk.
    needs_ids: bool = False

    #: For each number of concurrent streams, the tokens per second of all streams together.
    rates_together: dict[int, float] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(
        cls,
        endpoint: Endpoint,
        plan: Plan,
        directory: Path,
        *,
        show: Show = lambda _line: None,
        invalid: Iterable[measurement.Invalidity] = (),
        unproven: Iterable[str] = (),
        natural: bool = False,
        may_draft: bool = True,
        compiled: Callable[[], list[str]] = list,
    ) -> "Iterator[MeasuredServer]":
        """Start a client for a server, and find out which prompts the server accepts.

        Args:
            endpoint: The server.
            plan: Lengths, depths and bounds.
            directory: The folder of the raw records.
            show: Called with lines of progress.
            invalid: Reasons why all numbers of this server are invalid.
            unproven: Checks that are not possible for this server.
            natural: Whether to use the fixed natural texts.
            may_draft: Whether to use the fixed texts also if the server has counters of drafts.
                False if the log shows that the server does not use speculative decoding;
                llama-server has these counters even then.
            compiled: Returns new log lines about kernels that were compiled during a request.

        Yields:
            The server, ready to be measured.

        Raises:
            Sm121Error: The server accepts neither token ids nor text.
        """
        with timed_process.TimedProcess(endpoint.base_url, endpoint.api_key) as sender:
            now = counters.fetch(endpoint)
            drafts = may_draft and now is not None and "drafts" in now.values
            server = cls(
                endpoint=endpoint,
                sender=sender,
                prompts=Prompts(endpoint, plan.measuring.vocabulary, natural or drafts),
                plan=plan,
                directory=directory,
                show=show,
                invalid=[*invalid],
                unproven=[*unproven],
                compiled=compiled,
            )
            server._probe()
            yield server

    @property
    def patience(self) -> Patience:
        """The time limits of a request."""
        measuring = self.plan.measuring
        return Patience(measuring.request_within_s, measuring.silent_within_s)

    def request(
        self,
        prompt_tokens: int,
        tokens: int,
        *,
        text: str = "",
        ids: bool = False,
        temperature: float = 0.0,
    ) -> TimedRequest:
        """Return a request with a fresh prompt.

        Args:
            prompt_tokens: The length of the prompt, in tokens.
            tokens: The length of the answer, in tokens.
            text: The name of the fixed text at the end of the prompt; empty for random tokens.
            ids: Whether to request token ids even if `needs_ids` is false; not for timed requests.
            temperature: The temperature; 0 for greedy sampling.
        """
        exact = not self.prompts.as_text or self.prompts.exact
        return completion(
            self.endpoint.served_name,
            self.prompts.make(prompt_tokens, text),
            prompt_tokens=prompt_tokens if exact else 0,
            tokens=tokens,
            ids=ids or self.needs_ids,
            text=text,
            temperature=temperature,
        )

    def _probe(self) -> None:
        """Find out whether the server accepts token ids, and how to count its answers' tokens."""
        answer = self._answer_to_the_largest_id()
        for vocabulary in _VOCABULARIES:
            error = (answer.error or "").lower()
            if answer.ok or not any(part in error for part in _OUT_OF_RANGE):
                break
            self.prompts.vocabulary = min(self.prompts.vocabulary, vocabulary)
            answer = self._answer_to_the_largest_id()
        if answer.ok or answer.status not in (400, 422):
            self.needs_ids = answer.ok and answer.clock() != "usage"
            needs_tokenizer = answer.ok and self.prompts.natural
            if not needs_tokenizer or self.prompts.can_tokenize():
                return
        refusal = answer.error or "the length of a text is unknown without /tokenize"
        self._probe_text(refusal)

    def _answer_to_the_largest_id(self) -> TimedAnswer:
        """Send a prompt that contains the largest id of the vocabulary, or else a text."""
        prompt = self.prompts.make(_PROBE_PROMPT_TOKENS, "")
        if isinstance(prompt, list):
            prompt[0] = self.prompts.vocabulary - 1
        return self._answer(
            completion(
                self.endpoint.served_name,
                prompt,
                prompt_tokens=_PROBE_PROMPT_TOKENS,
                tokens=_PROBE_TOKENS,
            )
        )

    def _probe_text(self, refusal: str) -> None:
        """Find out how to make texts of a given length. `refusal` is why the server refuses ids."""
        self.prompts.as_text = True
        self.prompts.exact = self.prompts.can_tokenize()
        answer = self._answer(
            completion(
                self.endpoint.served_name,
                self.prompts.words(_PROBE_WORDS),
                prompt_tokens=0,
                tokens=_PROBE_TOKENS,
            )
        )
        if not answer.ok:
            raise Sm121Error(
                f"/v1/completions accepts neither token ids ({refusal}) nor text ({answer.error})"
            )
        if not self.prompts.exact:
            self.unproven.append("prompt length: the server refuses token ids and has no /tokenize")
            tokens = answer.prompt_tokens or _PROBE_WORDS
            self.prompts.tokens_per_word = max(tokens / _PROBE_WORDS, 0.1)
        self.needs_ids = answer.clock() != "usage"

    def _answer(self, request: TimedRequest) -> TimedAnswer:
        return self.sender.run([request], patience=self.patience).answers[0]
