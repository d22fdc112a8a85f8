"""What a cell will roughly take, for --dry-run and the time left. Orders of magnitude, never shown as a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from graphtune.kv_pool import DTYPE_BYTES
from graphtune.model_config import ModelConfig
from graphtune.plan import Cell
from graphtune.units import GIB


@dataclass(frozen=True)
class Pace:
    """Seconds of the parts of a cell on one kind of device, rounded from runs of the shipped recipes."""

    start_s: float
    per_weight_gib_s: float
    per_capture_s: float
    share_of_max_seconds: float
    operations_per_s: float


PACES = {"cuda": Pace(6.0, 0.05, 0.07, 0.7, 5e14), "cpu": Pace(8.0, 2.0, 0.05, 1.0, 2e10)}

CAPTURE_RUNS, GATE_RUNS, TIMED_RUNS = 3, 7, 4
"""How often a prefill runs: eager warm-up and those of the capture, comparisons of the gate, samples of a step time."""


PADDED_SHARE = 0.25
"""A padded step is read for its device time alone, in few samples."""


def expected_seconds(cell: Cell, model: ModelConfig, device: str) -> float:
    """Start, weights, captures with their gate, the timed steps, and the products of prefills."""
    pace = PACES[device]
    captures = sum(len(one.sizes) for one in cell.lists)
    points: float = sum(len(at.sizes) * len(at.executions) for at in cell.latency)
    points += PADDED_SHARE * sum(len(padded.buckets) for at in cell.latency for padded in at.padded)
    points += sum(len(at.tokens) * len(at.executions) for at in cell.prefill_latency)
    weights_gib = model.weights_bytes(DTYPE_BYTES[cell.dtype]) / GIB
    return (
        pace.start_s
        + weights_gib * pace.per_weight_gib_s
        + captures * pace.per_capture_s
        + points * cell.measure.max_seconds * pace.share_of_max_seconds
        + _prefill_tokens(cell) * 2 * model.parameter_count() / pace.operations_per_s
    )


def _prefill_tokens(cell: Cell) -> int:
    """Tokens of all prefills that the cell runs."""
    runs = CAPTURE_RUNS + (GATE_RUNS if cell.gate else 0)
    captured = sum(sum(one.sizes) for one in cell.lists if one.phase == "prefill")
    timed = sum(sum(at.tokens) * len(at.executions) for at in cell.prefill_latency)
    return captured * runs + timed * TIMED_RUNS


def expected_bytes(cell: Cell, model: ModelConfig, device: str) -> int:
    """Weights, rope table, KV pool, logits of the largest bucket, and the runtime with its workspaces."""
    width = DTYPE_BYTES[cell.dtype]
    largest = max((one.sizes[-1] for one in cell.lists), default=0)
    logits = largest * model.vocab_size * (width + 4)
    runtime = GIB if device == "cuda" else GIB // 2
    fixed = model.weights_bytes(width) + model.rope_cache_bytes()
    return fixed + cell.kv_tokens * model.kv_bytes_per_token(width) + logits + runtime
