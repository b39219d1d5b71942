"""The OpenAI-compatible API: what is published about it, and how a server is held against it."""
