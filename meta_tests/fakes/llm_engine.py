"""A plugin for a user's project that replaces vLLM in `pytest_llm_server` by a server with a known
fault: `-p meta_tests.fakes.llm_engine`."""

from meta_tests.fakes.two_ranks import TwoRanks
from meta_tests.folders import FAKES
from sm121.core.configuration import ServerConfiguration
from sm121.engines import registry


class FaultEngine(TwoRanks):
    """Starts ``fault_server.py`` with that program's arguments."""

    name = "vllm"
    reserved_arguments: tuple[str, ...] = ("--port",)

    def command(self, configuration: ServerConfiguration, *, port: int) -> list[str]:
        command = [configuration.python, str(FAKES / "fault_server.py"), "--port", str(port)]
        return [*command, *configuration.arguments]


registry.register(FaultEngine())
