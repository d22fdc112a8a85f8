"""vLLM 0.33."""

from __future__ import annotations

from graphtune.engines.vllm.engine import VLLM, VLLMEngine

__all__ = ["VLLM", "VLLMEngine"]
