"""A cache that is first filled inside a recording lies in the graph pool, and the next replay overwrites it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from small_engine import small_engine

from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.graphs.tape_backend import TapeBackend

Table = Callable[[], torch.Tensor]


def capture_with(table: Table, size: int, owners: dict[str, torch.Tensor]) -> tuple[TapeBackend, tuple[str, ...]]:
    """Record a forward that scales logits by a table, and a second one; returns what the gate would name."""
    engine = small_engine(size)
    eager = engine.eager
    batch = eager.buffers.batch(size, size)
    backend = TapeBackend()
    with torch.inference_mode(), backend.capture_session():
        eager.attention.bind(size, per_size=False)
        eager.attention.plan(batch, graph_size=size)
        backend.capture_one(ShapeKey(size), lambda: eager.forward(batch) * table())
        backend.capture_one(ShapeKey(1), lambda: eager.forward(batch)[:1] * 3)
    everything = {**eager.owners(), **engine.model.named_tensors(), **owners}
    return backend, backend.strays(ShapeKey(size), everything)


def wrong() -> tuple[tuple[str, ...], bool]:
    """What the gate names, and whether the cached table still holds its values after a replay."""
    base = torch.linspace(1, 2, 211)
    cache: dict[str, torch.Tensor] = {}
    calls = 0

    def table() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls < 3:  # both warm-ups took another path, as an autotuner's first calls do
            return base + base
        if "table" not in cache:
            cache["table"] = base + base
        return cache["table"]

    backend, strays = capture_with(table, 4, {"base": base})
    backend.replay(ShapeKey(1))
    return strays, torch.equal(cache["table"], base + base)


def cured() -> tuple[tuple[str, ...], bool]:
    """The same with the table made before the capture, by somebody who keeps it."""
    base = torch.linspace(1, 2, 211)
    kept = base + base
    backend, strays = capture_with(lambda: kept, 4, {"table": kept})
    backend.replay(ShapeKey(1))
    return strays, torch.equal(kept, base + base)


def main() -> None:
    strays, intact = wrong()
    print(f"filled while recording: the table is {'intact' if intact else 'garbage'} after a replay")
    for stray in strays:
        print(f"the gate names: {stray}")
    strays, intact = cured()
    print(f"filled before: {len(strays)} strays, the table is {'intact' if intact else 'garbage'}")


if __name__ == "__main__":
    main()
