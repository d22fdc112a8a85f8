"""What a cell will roughly take, for --dry-run and the time left. Orders of magnitude, never shown as a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from graphtune.kv_pool import DTYPE_BYTES
from graphtune.model_config import ModelConfig
from graphtune.plan import Cell
from graphtune.units import GIB

QUANTITIES = 3
"""Times per point: device, host, step; each sampled until the noise target or ``max_seconds``."""


@dataclass(frozen=True)
class Pace:
    """Seconds of the parts of a cell on one kind of device, rounded from runs of the shipped recipes."""

    start_s: float
    per_weight_gib_s: float
    per_capture_s: float
    share_of_max_seconds: float


PACES = {"cuda": Pace(6.0, 0.05, 0.07, 0.35), "cpu": Pace(8.0, 2.0, 0.05, 0.6)}


def expected_seconds(cell: Cell, model: ModelConfig, device: str) -> float:
    """Start, weights, captures with their gate, and the timed steps."""
    pace = PACES[device]
    captures = sum(len(one.sizes) for one in cell.lists)
    points = sum(len(at.sizes) * len(at.executions) for at in cell.latency)
    per_point = QUANTITIES * cell.measure.max_seconds * pace.share_of_max_seconds
    weights_gib = model.weights_bytes(DTYPE_BYTES[cell.dtype]) / GIB
    return pace.start_s + weights_gib * pace.per_weight_gib_s + captures * pace.per_capture_s + points * per_point


def expected_bytes(cell: Cell, model: ModelConfig, device: str) -> int:
    """Weights, rope table, KV pool, logits of the largest bucket, and the runtime with its workspaces."""
    width = DTYPE_BYTES[cell.dtype]
    largest = max((one.sizes[-1] for one in cell.lists), default=0)
    logits = largest * model.vocab_size * (width + 4)
    runtime = GIB if device == "cuda" else GIB // 2
    fixed = model.weights_bytes(width) + model.rope_cache_bytes()
    return fixed + cell.kv_tokens * model.kv_bytes_per_token(width) + logits + runtime
