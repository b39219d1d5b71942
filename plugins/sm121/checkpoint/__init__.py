"""The canary, a tiny, architecture-complete, trained gpt-oss checkpoint, and its tokenizer."""
