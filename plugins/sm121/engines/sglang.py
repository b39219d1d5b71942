"""SGLang: command line, environment and version."""

from collections.abc import Mapping, Sequence

from sm121.core.configuration import ServerConfiguration
from sm121.engines.python_engine import IN_ENGINE, PythonEngine, own_options


class SGLang(PythonEngine):
    """SGLang's OpenAI-compatible server (``sglang.launch_server``)."""

    name = "sglang"
    title = "SGLang"
    remedy = "`pip install sglang` in one of its own; its containers have it"
    reserved_arguments: tuple[str, ...] = (
        "--host", "--port", "--api-key", "--model-path", "--model", "--served-model-name",
    )  # fmt: skip
    reserved_variables: tuple[str, ...] = ("SM121_API_KEY",)

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        """``sglang.launch_server`` with the suite's key, and the metrics that the suite reads."""
        return [
            configuration.python,
            str(IN_ENGINE / "sm121_sglang_launch.py"),
            *own_options(configuration, port, model="--model-path"),
            "--enable-metrics",
            *configuration.given,
        ]

    def environment(self, configuration: ServerConfiguration, *, api_key: str) -> Mapping[str, str]:
        """The suite's environment, the configuration's on top."""
        return self._environment(configuration, {"SM121_API_KEY": api_key})

    def check_arguments(
        self, python: str, lists: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> list[str | None]:
        """As of every engine; its parser wants a model."""
        whole = [["--model-path", "model", *arguments] for arguments in lists]
        return super().check_arguments(python, whole, environment)
