"""vLLM's HTTP endpoints, for all test servers that run on aiohttp."""

from aiohttp import web


class VllmPages:
    """A healthy server with a version and a model.

    A subclass has the methods ``metrics`` and ``complete``, which generates the answers."""

    release = "0.32.0"
    owner = "vllm"
    #: The paths below ``/v1/`` at which a request generates text.
    generates = ("completions", "chat/completions")
    model: str
    #: The longest sequence, in tokens.
    context: int

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        for page in ("health", "version", "metrics"):
            app.router.add_get(f"/{page}", getattr(self, page))
        app.router.add_get("/v1/models", self.models)
        for path in self.generates:
            app.router.add_post(f"/v1/{path}", self.complete)
        return app

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self.release})

    async def models(self, _request: web.Request) -> web.Response:
        entry = {"id": self.model, "object": "model", "owned_by": self.owner}
        entry |= {"max_model_len": self.context}
        return web.json_response({"object": "list", "data": [entry]})
