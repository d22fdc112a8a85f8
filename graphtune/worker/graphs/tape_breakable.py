"""The breakable backend where there is no GPU: one tape per segment, all of one recording, all in one pool."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from graphtune.results import KernelCount, Sharing
from graphtune.worker.graphs.backend import Forward
from graphtune.worker.graphs.breakable import BreakableBackend, Segmented
from graphtune.worker.graphs.breaks import Cutter, cutting
from graphtune.worker.graphs.contents import counted
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.graphs.tape import Tape, make_recorder, record_with, tensors_of
from graphtune.worker.graphs.tape_pool import BytePool, InBytePools
from graphtune.worker.graphs.tape_recorder import Recorder


class TapeBreakable(InBytePools, BreakableBackend):
    """Breakable tapes. ``segment_bytes`` is the granularity of their pool, see BytePool; ``pools`` are those of another
    backend to record into."""

    def __init__(
        self,
        *,
        output: Sharing = "shared",
        output_rows: int | None = None,
        barrier: Callable[[], None] | None = None,
        debug_eager: bool = False,
        segment_bytes: int = 64 * 1024,
        pools: list[BytePool] | None = None,
    ) -> None:
        super().__init__(
            segment_bytes=segment_bytes,
            pools=pools,
            output=output,
            output_rows=output_rows,
            barrier=barrier,
            debug_eager=debug_eager,
        )

    def synchronize(self) -> None:
        if not self._pools:
            raise RuntimeError("capture_one() outside capture_session()")

    def record(self, forward: Forward, barrier: Callable[[], None] | None) -> tuple[Segmented, float]:
        recorder = make_recorder(self.pool)
        cutter = _TapeCutter(recorder, self.pool, barrier)
        with cutting(cutter):
            recording = record_with(recorder, forward, self.pool, hold_output=self._output == "per_size")
        started = time.perf_counter()
        ends = [*cutter.ends, len(recording.entries)]
        starts = [0, *cutter.ends]
        tapes = [
            Tape(replace(recording, entries=recording.entries[start:end]))
            for start, end in zip(starts, ends, strict=True)
        ]
        segmented = Segmented(tuple(tapes), tuple(cutter.breaks), recording.output, len(recording.entries))
        return segmented, time.perf_counter() - started

    def strays(self, key: ShapeKey, owners: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """As for whole tapes. Arguments of breaks count as used; bridges and output rows are the backend's own."""
        # Every segment's tape knows what the whole recording used and made.
        tape = self._recorded[key].segments[0]
        assert isinstance(tape, Tape)
        unowned = (f"outside tensor {outside}" for outside in tape.unowned({**owners, **self.owned(key)}))
        escaped = (f"tensor that outlives its recording, {made}" for made in tape.escaped())
        return (*unowned, *escaped)

    def kernels(self, key: ShapeKey) -> tuple[KernelCount, ...]:
        tapes = [segment for segment in self._recorded[key].segments if isinstance(segment, Tape)]
        return counted(sum((tape.operations() for tape in tapes), Counter()))

    def cleanup(self) -> None:
        super().cleanup()
        self._pools = []


class _TapeCutter(Cutter):
    """Pauses the recorder for a body; ``ends`` says where in the entries each segment but the last ended."""

    def __init__(self, recorder: Recorder, pool: BytePool, barrier: Callable[[], None] | None) -> None:
        super().__init__(barrier)
        self.ends: list[int] = []
        self._recorder = recorder
        self._pool = pool

    def end_segment(self) -> None:
        self.ends.append(self._recorder.length)
        self._recorder.paused = True

    def begin_segment(self) -> None:
        self._recorder.paused = False

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        described = tensors_of(self._recorder.describe(tensor), self._pool)
        assert isinstance(described, torch.Tensor)
        return described

    @contextlib.contextmanager
    def between_segments(self) -> Iterator[None]:
        """The recording's memory as a body finds it on a GPU, where nothing has been computed yet.

        Afterwards it is as before: a tape does run what it records, and an index of poison would be out of range.
        """
        blocks = [(made, block.copy()) for made in self._recorder.made if (block := made.block()) is not None]
        for made, _ in blocks:
            self._pool.poison(made.address, made.nbytes)
        yield
        for made, content in blocks:
            block = made.block()
            if block is not None:
                block[:] = content
