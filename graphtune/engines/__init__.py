"""One module per serving engine, holding everything that changes with that engine."""

from __future__ import annotations

from graphtune.engines.base import Engine
from graphtune.engines.sglang import SGLANG
from graphtune.engines.tensorrt_llm import TENSORRT_LLM
from graphtune.engines.vllm import VLLM
from graphtune.errors import InputError

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (SGLANG, VLLM, TENSORRT_LLM)}


def engine_named(name: str) -> Engine:
    """The engine of that name; ``tensorrt-llm`` and ``tensorrt_llm`` are the same. Raises InputError otherwise."""
    engine = ENGINES.get(name.replace("-", "_"))
    if engine is None:
        raise InputError(f"unknown engine {name!r}", action=f"Known engines: {', '.join(ENGINES)}.")
    return engine
