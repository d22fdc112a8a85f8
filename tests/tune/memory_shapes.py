"""What a decode forward of the capture engine asks of the allocator, by shapes, and pool growths read on an H200."""

from __future__ import annotations

from typing import NamedTuple

from graphtune.allocation_events import encode
from graphtune.results import AllocationTrace
from graphtune.tune.block_pool import BlockPool
from graphtune.units import MIB

BF16 = 2


class Shape(NamedTuple):
    hidden: int
    q: int
    kv: int
    inner: int
    vocab: int
    layers: int


LLAMA_8B = Shape(4096, 4096, 1024, 14336, 128256, 32)
QWEN_06B = Shape(1024, 2048, 1024, 3072, 151936, 28)

SGLANG = (1, 2, 4, 8, 12, 16, 24, 32, *range(40, 257, 8))
GROWTH_PER_SIZE_ASCENDING = [
    *(22, 0, 0, 2, 0, 0, 0, 20, 0, 12, 14, 18, 18, 20, 42, 24, 26, 28),
    *(30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 82, 64),
]


def trace(shape: Shape, size: int, *, hold_output: bool, workspace_bytes: int = 0) -> AllocationTrace:
    """The requests of one size; ``workspace_bytes`` are held beside the pool."""
    residual, hidden, qkv, attended, gate_up, inner, logits = range(7)
    events = [(residual, size * shape.hidden * BF16), (hidden, size * shape.hidden * BF16)]
    layer = [
        (qkv, size * (shape.q + 2 * shape.kv) * BF16),
        (attended, size * shape.q * BF16),
        (qkv, 0),
        (attended, 0),
        (gate_up, size * 2 * shape.inner * BF16),
        (inner, size * shape.inner * BF16),
        (gate_up, 0),
        (inner, 0),
    ]
    events += layer * shape.layers
    events += [(logits, size * shape.vocab * BF16), (hidden, 0), (residual, 0)]
    if not hold_output:
        events.append((logits, 0))
    room = -(-_peak(events) // (2 * MIB)) * 2 * MIB
    beside = encode([(0, workspace_bytes)]) if workspace_bytes else ()
    return AllocationTrace(room, encode(events), beside, holes=((12 * MIB, 1),))


def _peak(events: list[tuple[int, int]]) -> int:
    live: dict[int, int] = {}
    peak = 0
    for name, size in events:
        live[name] = size
        peak = max(peak, sum(live.values()))
    return peak


def capture(pool: BlockPool, shape: Shape, size: int, *, first: bool, hold_output: bool) -> None:
    of = trace(shape, size, hold_output=hold_output)
    if first:
        pool.free(pool.allocate(of.room_bytes))
    pool.play(of.pool)
