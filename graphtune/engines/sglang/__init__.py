"""SGLang 0.5.23."""

from __future__ import annotations

from graphtune.engines.sglang.engine import SGLANG, SGLang

__all__ = ["SGLANG", "SGLang"]
