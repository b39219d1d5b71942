"""A plugin for a user's project that replaces vLLM in `pytest_llm_server` by a server with a known
fault: `-p meta_tests.fakes.llm_engine`."""

from meta_tests.fakes.fault_engine import FaultEngine
from sm121.engines import registry

registry.register(FaultEngine())
