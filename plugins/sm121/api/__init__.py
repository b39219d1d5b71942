"""Check a server against the schemas and rules of the OpenAI-compatible API."""
