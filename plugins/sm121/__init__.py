"""Conformance suite for vLLM and FlashInfer serving gpt-oss in MXFP4 on NVIDIA GB10 (SM121)."""

__version__ = "0.2.0"
