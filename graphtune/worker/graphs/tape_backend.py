"""The full backend where there is no GPU: one tape per key, all in one pool."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from graphtune.results import KernelCount, Sharing
from graphtune.worker.graphs.backend import WARMUPS, CaptureTiming, Forward, GraphBackend
from graphtune.worker.graphs.contents import counted
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.graphs.tape import Tape, record
from graphtune.worker.graphs.tape_pool import BytePool, InBytePools


class TapeBackend(InBytePools, GraphBackend):
    """Records whole forwards on tapes.

    With ``output`` shared, outputs lie in pool memory that later captures use again; per size, each is held for itself.
    ``segment_bytes`` is the pool's granularity, see BytePool. ``pools`` are those of another backend to record into.
    """

    name = "full"

    def __init__(
        self, *, output: Sharing = "shared", segment_bytes: int = 64 * 1024, pools: list[BytePool] | None = None
    ) -> None:
        super().__init__(segment_bytes=segment_bytes, pools=pools)
        self._hold_output = output == "per_size"
        self._tapes: dict[ShapeKey, Tape] = {}
        self._inputs: dict[ShapeKey, tuple[torch.Tensor, ...]] = {}

    def capture_one(
        self,
        key: ShapeKey,
        forward: Forward,
        capture_inputs: Sequence[torch.Tensor] = (),
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> CaptureTiming:
        if not self._pools:
            raise RuntimeError("capture_one() outside capture_session()")
        started = time.perf_counter()
        for _ in range(WARMUPS):
            forward()
            if post_warmup_hook is not None:
                post_warmup_hook()
        warmed = time.perf_counter()
        recording = record(forward, self.pool, hold_output=self._hold_output)
        recorded = time.perf_counter()
        tape = Tape(recording)
        instantiated = time.perf_counter()
        self._tapes[key] = tape
        self._inputs[key] = tuple(capture_inputs)
        return CaptureTiming(
            warmup_s=warmed - started,
            record_s=recorded - warmed,
            instantiate_s=instantiated - recorded,
            nodes=tape.nodes,
            segments=1,
        )

    def can_run(self, key: ShapeKey) -> bool:
        return key in self._tapes

    def replay_session(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def replay(self, key: ShapeKey) -> torch.Tensor:
        return self._tapes[key].replay()

    def output(self, key: ShapeKey) -> torch.Tensor | None:
        return self._tapes[key].output

    def kernels(self, key: ShapeKey) -> tuple[KernelCount, ...]:
        return counted(self._tapes[key].operations())

    def cleanup(self) -> None:
        self._tapes.clear()
        self._inputs.clear()
        self._pools = []

    def strays(self, key: ShapeKey, owners: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """Outside tensors in no owner's storage, and tensors made while recording that outlive it, the output apart."""
        tape = self._tapes[key]
        unowned = (f"outside tensor {outside}" for outside in tape.unowned(owners))
        escaped = (f"tensor that outlives its recording, {made}" for made in tape.escaped())
        return (*unowned, *escaped)
