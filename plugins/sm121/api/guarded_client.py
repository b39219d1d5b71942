"""A client that knows what the engine can do. Importing ``openai`` takes half a second."""

from typing import Any

import openai
from openai._models import FinalRequestOptions

from sm121.core.server import Endpoint
from sm121.engines.capabilities import Capabilities, needed


class GuardedClient(openai.OpenAI):
    """A client of a server, which raises NotRun where a request needs what the engine has not."""

    def __init__(self, endpoint: Endpoint, capabilities: Capabilities, **options: Any) -> None:
        super().__init__(**endpoint.client_options(**options))
        self._capabilities = capabilities

    def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        """The SDK's hook for looking at a request before it is built."""
        body = options.json_data if isinstance(options.json_data, dict) else {}
        if options.method == "post":
            sent = {**body, **(options.extra_json or {})}
            self._capabilities.require(*needed(str(options.url), sent))
        return super()._prepare_options(options)
