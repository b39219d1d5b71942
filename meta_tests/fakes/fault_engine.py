"""An engine with the name vLLM that starts a server with a known fault."""

from meta_tests.fakes.two_ranks import TwoRanks
from meta_tests.folders import FAKES
from sm121.core.configuration import ServerConfiguration


class FaultEngine(TwoRanks):
    """Starts ``fault_server.py`` with the arguments of that program."""

    name = "vllm"
    reserved_arguments: tuple[str, ...] = ("--port",)

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        command = [configuration.python, str(FAKES / "fault_server.py"), "--port", str(port)]
        return [*command, *configuration.arguments]
