"""A backend that records a forward in segments between eager breaks; what records a segment is left to its kinds."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphtune.results import Sharing
from graphtune.worker.graphs.backend import WARMUPS, CaptureError, CaptureTiming, Forward, GraphBackend
from graphtune.worker.graphs.breaks import Break, EagerBreak
from graphtune.worker.graphs.shape_key import ShapeKey


class Segment(Protocol):
    """A recorded stretch between two breaks; one without operations replays as nothing."""

    def replay(self) -> object:
        """Run it."""


@dataclass(frozen=True, eq=False)
class Segmented:
    """One recorded forward: segments with a break between each two, and the output that a replay leaves."""

    segments: tuple[Segment, ...]
    breaks: tuple[Break, ...]
    output: torch.Tensor
    nodes: int | None

    def __post_init__(self) -> None:
        if len(self.segments) != len(self.breaks) + 1:
            raise ValueError(f"{len(self.segments)} segments cannot have {len(self.breaks)} breaks between them")

    def replay(self) -> torch.Tensor:
        """Run segments and bodies in turn; returns the output."""
        for segment, cut in zip(self.segments, self.breaks, strict=False):
            segment.replay()
            cut.run()
        self.segments[-1].replay()
        return self.output


class BreakableBackend(GraphBackend):
    """Records whatever lies between functions marked as breaks (``eager_break``) and runs those at each replay.

    With ``output`` shared every key's output is rows of one buffer, copied there in its last segment; the buffer has
    ``output_rows`` rows or those of the first key. Per size, each key's output is held for itself. ``barrier`` is
    called at capture only, after a segment ended and before the body runs, so that the processes of a group arrive
    there together. ``debug_eager`` makes the whole forward one break: everything of a replay but the segments.

    The hook is called once before the first warm-up as well. Bodies run during the recording too: they must find
    buffers that are harmless to write. Nothing is recorded for autograd.
    """

    name = "breakable"

    def __init__(
        self,
        *,
        output: Sharing = "shared",
        output_rows: int | None = None,
        barrier: Callable[[], None] | None = None,
        debug_eager: bool = False,
    ) -> None:
        self._output = output
        self._output_rows = output_rows
        self._barrier = barrier
        self._debug_eager = debug_eager
        self._rows = OutputRows(output_rows)
        self._recorded: dict[ShapeKey, Segmented] = {}
        self._inputs: dict[ShapeKey, tuple[torch.Tensor, ...]] = {}

    @abstractmethod
    def record(self, forward: Forward, barrier: Callable[[], None] | None) -> tuple[Segmented, float]:
        """Record one call in segments; returns them and the seconds spent on making segments launchable."""

    def drop_free_memory(self) -> None:
        """Give what the allocator holds and nobody uses back to the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device; called before each warm-up. Raises RuntimeError outside a session."""

    def capture_one(
        self,
        key: ShapeKey,
        forward: Forward,
        capture_inputs: Sequence[torch.Tensor] = (),
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> CaptureTiming:
        self.synchronize()
        if self._debug_eager:
            forward = EagerBreak(forward)
        started = time.perf_counter()
        # A forward's own no_grad is easily passed by when only its inner part is called.
        with torch.no_grad():
            output = warm_up(forward, post_warmup_hook, self.synchronize)
            shape, dtype, device = output.shape, output.dtype, output.device
            del output
            if self._output == "shared" and not self._rows.owned():
                # The rows outlive the warm-ups and must not hold a larger block that those left behind, nor share one
                # with the last output, which is gone by now.
                self.drop_free_memory()
            rows = self._rows.like(shape, dtype, device) if self._output == "shared" else None
            warmed = time.perf_counter()
            recorded, instantiate_s = self.record(_into(rows, forward), self._barrier)
        ended = time.perf_counter()
        self._recorded[key] = recorded
        self._inputs[key] = tuple(capture_inputs)
        return CaptureTiming(
            warmup_s=warmed - started,
            record_s=ended - warmed - instantiate_s,
            instantiate_s=instantiate_s,
            nodes=recorded.nodes,
            segments=len(recorded.segments),
        )

    def can_run(self, key: ShapeKey) -> bool:
        return key in self._recorded

    def replay_session(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def replay(self, key: ShapeKey) -> torch.Tensor:
        with torch.inference_mode():
            return self._recorded[key].replay()

    def output(self, key: ShapeKey) -> torch.Tensor | None:
        return self._recorded[key].output

    def owned(self, key: ShapeKey) -> dict[str, torch.Tensor]:
        """What this backend keeps alive for a key outside the pool: bridges and the shared output rows, by name."""
        bridges = {
            f"break {index} {cut.name}[{place}]": tensor
            for index, cut in enumerate(self._recorded[key].breaks)
            for place, tensor in enumerate(cut.bridges())
        }
        return {**bridges, **self._rows.owned()}

    def cleanup(self) -> None:
        self._recorded.clear()
        self._inputs.clear()
        self._rows = OutputRows(self._output_rows)


def _into(rows: torch.Tensor | None, forward: Forward) -> Forward:
    """A forward whose output is copied to ``rows``, or itself when there are none."""
    if rows is None:
        return forward

    def copied() -> torch.Tensor:
        output = forward()
        if output.shape != rows.shape or output.dtype != rows.dtype:
            raise CaptureError(f"the output changed its shape from {tuple(rows.shape)} to {tuple(output.shape)}")
        return rows.copy_(output)

    return copied


class OutputRows:
    """One buffer whose leading rows are the output of every key: only its largest shape takes memory.

    It has ``rows`` rows, or as many as the first output when None: then the largest size comes first.
    """

    def __init__(self, rows: int | None) -> None:
        self._rows = rows
        self._buffer: torch.Tensor | None = None

    def owned(self) -> dict[str, torch.Tensor]:
        """The buffer by name, once it exists."""
        return {} if self._buffer is None else {"output_rows": self._buffer}

    def like(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The rows for an output of this shape, made at the first call. Raises CaptureError when they do not fit."""
        if self._buffer is None:
            rows = shape[0] if self._rows is None else self._rows
            # A normal tensor even under inference mode: it outlives the session and is written outside it.
            with torch.inference_mode(False), torch.no_grad():
                self._buffer = torch.empty((rows, *shape[1:]), dtype=dtype, device=device)
        buffer = self._buffer
        if (buffer.shape[1:], buffer.dtype) != (shape[1:], dtype):
            found, made = f"{tuple(shape[1:])} {dtype}", f"{tuple(buffer.shape[1:])} {buffer.dtype}"
            raise CaptureError(f"the output has rows of {found}, that of other sizes {made}; they share one buffer")
        if shape[0] > buffer.shape[0]:
            raise CaptureError(
                f"an output of {shape[0]} rows does not fit the shared {buffer.shape[0]}; "
                "capture the largest size first or declare output_rows"
            )
        return buffer[: shape[0]]


def warm_up(forward: Forward, hook: Callable[[], None] | None, synchronize: Callable[[], None]) -> torch.Tensor:
    """Call ``forward`` twice, the hook after each and once before the first; returns the last output.

    The hook clears what a forward leaves behind in state that requests own. The first call needs it too: it is the one
    that settles caches and scales, and the state may be that of earlier requests.
    """
    if hook is not None:
        hook()
    output: Any = None
    for _ in range(WARMUPS):
        synchronize()
        output = forward()
        if hook is not None:
            hook()
    if not isinstance(output, torch.Tensor):
        raise CaptureError(f"the recorded call must return one tensor, not {type(output).__name__}")
    return output
