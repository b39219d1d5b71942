"""The errors that a user can act on. Each message is one line: required, seen, remedy."""


class Sm121Error(Exception):
    """Base of every error that the suite raises on purpose. Each argument is a text or a fact."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class UsageError(Sm121Error):
    """What was asked for is wrong. Raised before anything expensive starts; exit status 4."""


class OptionError(UsageError):
    """The value of one of pytest's options is wrong; the message begins with the option."""

    def __init__(self, option: str, wrong: str) -> None:
        super().__init__(f"{option} {wrong}")
        self.option, self.wrong = option, wrong
