"""A tiny Llama-shaped cell for tests of the capture engine on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from graphtune.plan import Cell, LatencyAt, Measure
from graphtune.results import CaptureList
from graphtune.worker.engine import Engine, build

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def capture_list(*sizes: int, **settings: Any) -> CaptureList:
    return replace(CaptureList("test", "decode", "full", tuple(sizes)), **settings)


def cell(**changes: Any) -> Cell:
    base = Cell(
        model_name="tiny",
        model_config=CONFIG,
        weights=None,
        dtype="float32",
        shard=1,
        seed=7,
        phase="decode",
        attention="sdpa",
        page_size=16,
        kv_tokens=2048,
        lists=(capture_list(1, 2, 4, 8),),
        latency=(LatencyAt((1, 4), 100),),
        measure=Measure(min_samples=3, noise=0.5, max_seconds=0.01),
    )
    return replace(base, **changes)


def engine(of: Cell | None = None, reached: Callable[[str], None] = lambda stage: None) -> Engine:
    with torch.inference_mode():
        return build(of or cell(), torch.device("cpu"), reached)
