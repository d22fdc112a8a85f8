"""A two-layer model on the CPU, where recordings are tapes: what the demonstrations share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from graphtune.plan import Cell, Measure
from graphtune.results import CaptureList
from graphtune.worker.engine import Engine, build
from graphtune.worker.runners.base import CaptureFailure
from graphtune.worker.runners.buffers import LiveBatch
from graphtune.worker.runners.decode import GraphDecode
from graphtune.worker.runners.series import make_batches

MODEL: dict[str, Any] = {
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


def small_engine(*sizes: int) -> Engine:
    """Model, KV cache and eager path for batches up to the largest size."""
    cell = Cell(
        model_name="small",
        model_config=MODEL,
        weights=None,
        dtype="float32",
        shard=1,
        seed=7,
        phase="decode",
        attention="sdpa",
        page_size=16,
        kv_tokens=4096,
        lists=(capture_list(*sizes),),
        latency=(),
        measure=Measure(),
    )
    with torch.inference_mode():
        return build(cell, torch.device("cpu"), lambda stage: None)


def capture_list(*sizes: int) -> CaptureList:
    return CaptureList("demonstration", "decode", "full", sizes)


def capture(engine: Engine, *sizes: int) -> GraphDecode:
    """Record the sizes after warming them up, largest first."""
    of = capture_list(*sizes)
    runner = GraphDecode(engine.eager, engine.make_backend(of), of)
    with torch.inference_mode():
        engine.eager.warm_up(sizes)
        for size, outcome in runner.capture():
            if isinstance(outcome, CaptureFailure):
                raise RuntimeError(f"size {size}: {outcome.reason}")
    return runner


def step(engine: Engine, *lengths: int, seed: int = 0) -> LiveBatch:
    """One decode step of new requests that hold ``lengths`` tokens each, the one it writes included."""
    counts = np.asarray([lengths], dtype=np.int32)
    with torch.inference_mode():
        rows = engine.table.admit(list(lengths))
        (live,) = make_batches(engine.table, rows=rows, lengths=counts, vocab_size=MODEL["vocab_size"], seed=seed)
    return live


def difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """‖value − reference‖ / ‖reference‖."""
    return float(torch.linalg.vector_norm(value - reference) / torch.linalg.vector_norm(reference))
