"""Sizes captured from small to large: no graph fits into what an earlier one left in the pool."""

from __future__ import annotations

from dataclasses import replace

import torch
from small_engine import capture_list, small_engine

from graphtune.results import Order
from graphtune.worker.graphs.tape_backend import TapeBackend
from graphtune.worker.runners.decode import GraphDecode

SIZES = (1, 2, 4, 8, 16, 32)


def pool_bytes(order: Order, sizes: tuple[int, ...] = SIZES) -> int:
    """Bytes of the pool after capturing the sizes in this order. Segments are as large as what asks for them, as in a
    model whose activations are large."""
    engine = small_engine(*sizes)
    backend = TapeBackend(segment_bytes=64)
    runner = GraphDecode(engine.eager, backend, replace(capture_list(*sizes), order=order))
    with torch.inference_mode():
        engine.eager.warm_up(sizes)
        list(runner.capture())
    return backend.pool_bytes()


def wrong() -> int:
    return pool_bytes("ascending")


def cured() -> int:
    return pool_bytes("descending")


def largest_alone() -> int:
    return pool_bytes("descending", SIZES[-1:])


def main() -> None:
    print(f"small to large: {wrong():,} bytes for {len(SIZES)} graphs")
    print(f"large to small: {cured():,} bytes; the largest alone takes {largest_alone():,}")


if __name__ == "__main__":
    main()
