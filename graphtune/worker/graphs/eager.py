"""No graph: the forward itself, behind the interface of a graph backend. The reference that graphs are held to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from graphtune.worker.graphs.backend import WARMUPS, CaptureTiming, Forward, GraphBackend
from graphtune.worker.graphs.shape_key import ShapeKey


class EagerBackend(GraphBackend):
    """Keeps each key's forward and calls it at replay. Nothing is recorded and there is no pool."""

    name = "eager"

    def __init__(self) -> None:
        self._forwards: dict[ShapeKey, Forward] = {}
        self._inputs: dict[ShapeKey, tuple[torch.Tensor, ...]] = {}

    def capture_session(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def capture_one(
        self,
        key: ShapeKey,
        forward: Forward,
        capture_inputs: Sequence[torch.Tensor] = (),
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> CaptureTiming:
        started = time.perf_counter()
        for _ in range(WARMUPS):
            forward()
            if post_warmup_hook is not None:
                post_warmup_hook()
        warmed = time.perf_counter()
        self._forwards[key] = forward
        self._inputs[key] = tuple(capture_inputs)
        return CaptureTiming(warmup_s=warmed - started, record_s=0.0, instantiate_s=0.0, nodes=None, segments=None)

    def can_run(self, key: ShapeKey) -> bool:
        return key in self._forwards

    def replay_session(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def replay(self, key: ShapeKey) -> torch.Tensor:
        return self._forwards[key]()

    def pool_segments(self) -> tuple[int, ...]:
        return ()

    def cleanup(self) -> None:
        self._forwards.clear()
        self._inputs.clear()
