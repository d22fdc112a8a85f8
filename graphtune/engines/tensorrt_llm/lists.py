"""TensorRT-LLM's own capture lists. Decode in requests, prefill in tokens."""

from __future__ import annotations

from collections.abc import Iterable

from graphtune.engines.base import Serving
from graphtune.engines.grids import ascending, steps

DEFAULT_GRAPH_MAX = 128
DEFAULT_MAX_BATCH_SIZE = 2048
DEFAULT_MAX_NUM_TOKENS = 8192


def generate_decode(largest: int, *, padding: bool, powers_above_128: bool = False) -> tuple[int, ...]:
    """The decode list up to ``largest``, which is appended when the grid misses it.

    ``powers_above_128`` is the padded list of releases up to 1.2; later ones go on in steps of 64.
    """
    powers = [1 << bit for bit in range(8, max(largest, 1).bit_length() + 1) if 1 << bit < largest]
    tail: Iterable[int]
    if padding:
        tail = powers if powers_above_128 else steps(192, largest, 64)
        grid = ascending((1, 2, 4), steps(8, 128, 8), tail)
    else:
        grid = ascending(steps(1, 31, 1), (32, 64, 128), powers)
    return ascending((size for size in grid if size <= largest), (largest,))


def decode_cap(serving: Serving) -> int:
    """The largest decode batch the engine can run, in requests: its batch limit or its token limit."""
    batch = DEFAULT_MAX_BATCH_SIZE if serving.max_running_requests is None else serving.max_running_requests
    tokens = DEFAULT_MAX_NUM_TOKENS if serving.max_batched_tokens is None else serving.max_batched_tokens
    return min(batch, tokens // serving.width)


DEFAULT_PREFILL_SIZES: tuple[int, ...] = ascending((1 << bit for bit in range(8)), steps(256, 3072, 256))
"""Prefill sizes in tokens when none are given: powers of two up to 128, then steps of 256."""
