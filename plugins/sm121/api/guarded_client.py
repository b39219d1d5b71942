"""An ``openai`` client that checks the capabilities of the engine before each request.

Importing ``openai`` takes half a second, so this module is imported only when it is needed.
"""

from typing import Any

import openai
from openai._models import FinalRequestOptions

from sm121.core.server import Endpoint
from sm121.engines.capabilities import Capabilities, needed


class GuardedClient(openai.OpenAI):
    """A client whose requests raise NotRun if the engine lacks a capability that they need.

    Args:
        endpoint: The server.
        capabilities: The capabilities of its engine.
        **options: Further arguments of `openai.OpenAI`.
    """

    def __init__(self, endpoint: Endpoint, capabilities: Capabilities, **options: Any) -> None:
        super().__init__(**endpoint.client_options(**options))
        self._capabilities = capabilities

    def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        """Check the capabilities. The SDK calls this hook before it builds a request."""
        if options.method == "post":
            body = options.json_data if isinstance(options.json_data, dict) else {}
            sent = {**body, **(options.extra_json or {})}
            self._capabilities.require(*needed(str(options.url), sent))
        return super()._prepare_options(options)
