"""The contract of a graph backend: how one shape is recorded and replayed. Runners own everything else."""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from graphtune.results import KernelCount
from graphtune.worker.graphs.shape_key import ShapeKey

Forward = Callable[[], torch.Tensor]

WARMUPS = 2
"""Calls before a recording: the first settles caches and lazy loading, the second runs as the recording will."""


@dataclass(frozen=True)
class CaptureTiming:
    """Seconds of one capture and what it holds; ``nodes`` and ``segments`` are None where they cannot be counted."""

    warmup_s: float
    record_s: float
    instantiate_s: float
    nodes: int | None
    segments: int | None


@contextlib.contextmanager
def collector_frozen() -> Iterator[None]:
    """Garbage collection before the block, none in it, and one after it.

    A collection in the middle of a recording could free a CUDA object, which a recording must not do, and would return
    pool bytes at a moment that differs from run to run, and with them the layout of the pool.
    """
    gc.collect()
    # What a caller has frozen stays frozen, and what was made since must stay collectable.
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if freezes:
            gc.unfreeze()
        gc.collect()


class CaptureError(Exception):
    """Recording failed; the message names the operation where it is known, with file and line."""


class GraphBackend(ABC):
    """Six operations. Outputs returned by ``replay`` are valid until the next replay from the same pool."""

    name: str

    @abstractmethod
    def capture_session(self) -> AbstractContextManager[None]:
        """Wraps a runner's whole capture loop: binds one stream and one pool, freezes garbage collection."""

    @abstractmethod
    def capture_one(
        self,
        key: ShapeKey,
        forward: Forward,
        capture_inputs: Sequence[torch.Tensor] = (),
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> CaptureTiming:
        """Warm ``forward`` up twice (hook after each), then record it under ``key``.

        ``forward`` returns one tensor whose rows are the key's size. ``capture_inputs`` are kept alive with the graph.
        A recording executes nothing: outputs hold garbage and state is as the warm-ups left it. Raises CaptureError;
        CUDA memory errors pass through as they are.
        """

    @abstractmethod
    def can_run(self, key: ShapeKey) -> bool:
        """True when exactly this key has been recorded."""

    @abstractmethod
    def replay_session(self) -> AbstractContextManager[None]:
        """Wraps model code that runs at replay time."""

    @abstractmethod
    def replay(self, key: ShapeKey) -> torch.Tensor:
        """Launch the graph and return its recorded output."""

    def output(self, key: ShapeKey) -> torch.Tensor | None:
        """Where the next replay of ``key`` leaves its output; None when it makes a new tensor."""
        return None

    def strays(self, key: ShapeKey, owners: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """Memory that the recording of ``key`` depends on and nobody promised to keep, each with the line that used it.

        Empty where the mechanism cannot tell: a CUDA graph does not say which addresses it reads.
        """
        return ()

    def kernels(self, key: ShapeKey) -> tuple[KernelCount, ...] | None:
        """What the recording of ``key`` runs, by name, most nodes first; None where the mechanism cannot tell."""
        return None

    @abstractmethod
    def pool_segments(self) -> tuple[int, ...]:
        """Bytes of each segment of device memory that the pool holds now."""

    def pool_bytes(self) -> int:
        """Bytes of device memory that the pool holds now."""
        return sum(self.pool_segments())

    @abstractmethod
    def cleanup(self) -> None:
        """Drop graphs, outputs and the pool; usable for a new session afterwards."""
