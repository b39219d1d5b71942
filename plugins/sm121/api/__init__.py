"""The OpenAI-compatible API: its published schemas and rules, and the checks of a server."""
