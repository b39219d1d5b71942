"""The OpenAI-compatible API: what is published about it, and how a server is compared with it."""
