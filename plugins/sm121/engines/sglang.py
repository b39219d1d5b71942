"""SGLang: command line, environment and version."""

from collections.abc import Mapping, Sequence

from sm121.core.configuration import ServerConfiguration
from sm121.engines.python_engine import IN_ENGINE, PythonEngine, own_options


class SGLang(PythonEngine):
    """SGLang's OpenAI-compatible server (``sglang.launch_server``)."""

    name = "sglang"
    title = "SGLang"
    remedy = "`pip install sglang` into its own environment, or use SGLang's container"
    reserved_arguments: tuple[str, ...] = (
        "--host", "--port", "--api-key", "--model-path", "--model", "--served-model-name",
    )  # fmt: skip
    reserved_variables: tuple[str, ...] = ("SM121_API_KEY",)

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """Return the command line, see `protocol.Engine`.

        The command starts ``sglang.launch_server`` with the suite's API key, and enables the
        metrics that the suite reads.

        Args:
            configuration: The configuration of the server.
            port: The port of 127.0.0.1 at which the server must listen.
        """
        return [
            configuration.python,
            str(IN_ENGINE / "sm121_sglang_launch.py"),
            *own_options(configuration, port, model="--model-path"),
            "--enable-metrics",
            *configuration.given,
        ]

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """Return the whole environment, see `protocol.Engine`.

        Args:
            configuration: The configuration of the server.
            api_key: The API key that the server must require.
        """
        return self._environment(configuration, {"SM121_API_KEY": api_key})

    def check_arguments(
        self, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> list[str | None]:
        """Return SGLang's own message for each list of arguments; None if it accepts it.

        SGLang's parser requires a model, so this method adds one to each list.

        Args:
            python: The interpreter of SGLang.
            lists: The lists of arguments.
            environment: SGLang's whole environment.

        Raises:
            UsageError: SGLang is not installed in the interpreter, or its parser cannot be run.
        """
        whole = [["--model-path", "model", *arguments] for arguments in lists]
        return super().check_arguments(python, whole, environment)
