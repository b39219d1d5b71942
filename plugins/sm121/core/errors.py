"""The errors that a user can act on. Each message is one line with a remedy."""


class Sm121Error(Exception):
    """The base of all errors that the suite raises. Each argument is a text or an `unmet.Fact`."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class UsageError(Sm121Error):
    """A wrong option or file.

    It is raised before any expensive step, and leads to exit status 4.
    """


class OptionError(UsageError):
    """The value of one of pytest's options is wrong.

    Attributes:
        option: The name of the option, with its dashes. The message begins with it.
        fault: The rest of the message.
    """

    def __init__(self, option: str, fault: str) -> None:
        super().__init__(f"{option} {fault}")
        self.option = option
        self.fault = fault
