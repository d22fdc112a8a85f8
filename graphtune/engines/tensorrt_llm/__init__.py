"""TensorRT-LLM 1.3 and 1.4, and 1.2 with its older list."""

from __future__ import annotations

from graphtune.engines.tensorrt_llm.engine import TENSORRT_LLM, TensorRTLLM

__all__ = ["TENSORRT_LLM", "TensorRTLLM"]
