"""Breakable CUDA graphs: one graph per segment, all on one pool, recorded on the current stream."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphtune.results import KernelCount, Sharing
from graphtune.worker.graphs.alias import alias
from graphtune.worker.graphs.backend import CaptureError, Forward, collector_frozen
from graphtune.worker.graphs.breakable import BreakableBackend, Segmented
from graphtune.worker.graphs.breaks import Cutter, cutting
from graphtune.worker.graphs.contents import driver_bindings, kernel_counts
from graphtune.worker.graphs.failure import explain, first_line
from graphtune.worker.graphs.forks import Forks, noted
from graphtune.worker.graphs.full import node_count, segments_of
from graphtune.worker.graphs.shape_key import ShapeKey


class CudaBreakable(BreakableBackend):
    """Records segments with ``torch.cuda.CUDAGraph``, into ``pools`` where another backend shares its own.

    Everything, bodies and eager steps included, runs on one stream that is not the default one: the caller sets it
    before. Streams that a forward forks to with ``wait_stream`` are joined before a segment ends; a fork by events that
    it does not join itself fails the capture.
    A segment keeps the pool in use, so memory that only descriptions of tensors point to is not given back.
    """

    def __init__(
        self,
        *,
        output: Sharing = "shared",
        output_rows: int | None = None,
        barrier: Callable[[], None] | None = None,
        debug_eager: bool = False,
        pools: list[Any] | None = None,
    ) -> None:
        super().__init__(output=output, output_rows=output_rows, barrier=barrier, debug_eager=debug_eager)
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            raise RuntimeError("set a stream of your own before making this backend; the default one cannot capture")
        self._pools = [] if pools is None else pools

    @contextlib.contextmanager
    def capture_session(self) -> Iterator[None]:
        torch.cuda.synchronize()
        with collector_frozen():
            torch.cuda.empty_cache()
            if not self._pools:
                self._pools.append(torch.cuda.graph_pool_handle())
            yield
            torch.cuda.synchronize()

    def synchronize(self) -> None:
        if not self._pools:
            raise RuntimeError("capture_one() outside capture_session()")
        torch.cuda.synchronize()

    def drop_free_memory(self) -> None:
        torch.cuda.empty_cache()

    def record(self, forward: Forward, barrier: Callable[[], None] | None) -> tuple[Segmented, float]:
        torch.cuda.synchronize()
        forks = Forks(torch.cuda.current_stream())
        cutter = _CudaCutter(self._pools[-1], barrier, forks)
        cutter.begin_segment()
        try:
            with cutting(cutter), noted(forks):
                output = forward()
            cutter.end_segment()
        except BaseException as error:
            cutter.abandon()
            # Torch keeps a pool that a failed capture recorded into marked as in use; later sizes need another one.
            self._pools.append(torch.cuda.graph_pool_handle())
            if isinstance(error, (CaptureError, torch.cuda.OutOfMemoryError)) or not isinstance(error, Exception):
                raise
            raise CaptureError(explain(error)) from error
        started = time.perf_counter()
        for segment in cutter.segments:
            segment.instantiate()
        torch.cuda.synchronize()
        counts = [segment.nodes for segment in cutter.segments]
        nodes = None if None in counts else sum(count for count in counts if count is not None)
        recorded = Segmented(tuple(cutter.segments), tuple(cutter.breaks), output, nodes)
        return recorded, time.perf_counter() - started

    def kernels(self, key: ShapeKey) -> tuple[KernelCount, ...] | None:
        segments = self._recorded[key].segments
        graphs = [segment.graph.raw_cuda_graph() for segment in segments if isinstance(segment, _CudaSegment)]
        return kernel_counts(graphs, driver_bindings())

    def pool_segments(self) -> tuple[int, ...]:
        return segments_of(self._pools)

    def cleanup(self) -> None:
        torch.cuda.synchronize()
        for recorded in self._recorded.values():
            for segment in recorded.segments:
                assert isinstance(segment, _CudaSegment)
                segment.graph.reset()
        super().cleanup()
        self._pools = []


class _CudaSegment:
    """One graph. A segment without nodes is not launched; where nodes cannot be counted it is."""

    def __init__(self) -> None:
        # Kept, so that recording and instantiating are timed apart and nodes can be counted.
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.nodes: int | None = None

    def instantiate(self) -> None:
        self.nodes = node_count(self.graph)
        if self.nodes != 0:
            self.graph.instantiate()

    def replay(self) -> None:
        if self.nodes != 0:
            self.graph.replay()


class _CudaCutter(Cutter):
    """Begins and ends captures on one pool."""

    def __init__(self, pool: Any, barrier: Callable[[], None] | None, forks: Forks) -> None:
        super().__init__(barrier)
        self.segments: list[_CudaSegment] = []
        self._pool = pool
        self._forks = forks
        self._recording: torch.cuda.CUDAGraph | None = None

    def begin_segment(self) -> None:
        segment = _CudaSegment()
        segment.graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.segments.append(segment)
        self._recording = segment.graph

    def end_segment(self) -> None:
        assert self._recording is not None
        self._forks.join()
        graph, self._recording = self._recording, None
        try:
            with warnings.catch_warnings():
                # Two breaks in a row leave a segment with nothing in it, as they should.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                graph.capture_end()
        except RuntimeError as error:
            raise CaptureError(f"ending a segment failed: {first_line(error)}") from error

    def abandon(self) -> None:
        """After a failure: end what is being recorded and drop every segment."""
        if self._recording is not None:
            graph, self._recording = self._recording, None
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
        self.segments.clear()
        self.breaks.clear()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        # Whatever lies on the device is remembered by address alone, as in a graph; the rest is kept as it is.
        return alias(tensor) if tensor.is_cuda and tensor.numel() else tensor
