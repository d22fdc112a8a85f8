"""One CUDA graph per key, all in one pool, recorded on the current stream."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from graphtune.results import KernelCount, Sharing
from graphtune.worker.graphs.alias import alias
from graphtune.worker.graphs.backend import (
    WARMUPS,
    CaptureError,
    CaptureTiming,
    Forward,
    GraphBackend,
    collector_frozen,
)
from graphtune.worker.graphs.contents import driver_bindings, kernel_counts
from graphtune.worker.graphs.failure import explain, first_line
from graphtune.worker.graphs.shape_key import ShapeKey

SEGMENT_BYTES = 2 << 20


class FullBackend(GraphBackend):
    """Records whole forwards with ``torch.cuda.CUDAGraph``, into ``pools`` where another backend shares its own.

    Everything, eager steps included, runs on one stream that is not the default one: the caller sets it before. A
    second stream would cost a cuBLAS workspace of its own. Recording and instantiating are timed apart, which is why
    graphs are kept (``keep_graph``). With ``output`` shared, outputs are aliases of pool memory that later captures use
    again; per size, each is held for itself.
    """

    name = "full"

    def __init__(self, *, output: Sharing = "shared", pools: list[Any] | None = None) -> None:
        self._output = output
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            raise RuntimeError("set a stream of your own before making this backend; the default one cannot capture")
        self._pools = [] if pools is None else pools
        self._first_in_pool = not self._pools
        self._graphs: dict[ShapeKey, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[ShapeKey, torch.Tensor] = {}
        self._inputs: dict[ShapeKey, tuple[torch.Tensor, ...]] = {}

    @contextlib.contextmanager
    def capture_session(self) -> Iterator[None]:
        torch.cuda.synchronize()
        with collector_frozen():
            torch.cuda.empty_cache()
            if not self._pools:
                self._pools.append(torch.cuda.graph_pool_handle())
            yield
            torch.cuda.synchronize()

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
        live_bytes = 0
        for _ in range(WARMUPS):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            live_bytes = torch.cuda.memory_allocated()
            forward()
            live_bytes = torch.cuda.max_memory_allocated() - live_bytes
            if post_warmup_hook is not None:
                post_warmup_hook()
        torch.cuda.synchronize()
        warmed = time.perf_counter()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        output = self._record(graph, forward, first_block_bytes=live_bytes if self._first_in_pool else 0)
        self._first_in_pool = False
        recorded = time.perf_counter()
        graph.instantiate()
        torch.cuda.synchronize()
        instantiated = time.perf_counter()
        self._graphs[key] = graph
        self._outputs[key] = alias(output) if self._output == "shared" else output
        self._inputs[key] = tuple(capture_inputs)
        return CaptureTiming(
            warmup_s=warmed - started,
            record_s=recorded - warmed,
            instantiate_s=instantiated - recorded,
            nodes=node_count(graph),
            segments=1,
        )

    def _record(self, graph: torch.cuda.CUDAGraph, forward: Forward, first_block_bytes: int) -> torch.Tensor:
        # torch.cuda.graph() would synchronise, collect and empty caches at every size; the session did that once.
        graph.capture_begin(pool=self._pools[-1], capture_error_mode="thread_local")
        try:
            if first_block_bytes:
                # One block as large as the forward ever holds, given back at once: activations and output are then
                # cut from it. Left alone, the pool grows by a segment for each and cannot join them later.
                first_block = torch.empty(round_up(first_block_bytes, SEGMENT_BYTES), dtype=torch.uint8, device="cuda")
                del first_block
            output = forward()
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            # Torch keeps a pool that a failed capture recorded into marked as in use; later sizes need another one.
            self._pools.append(torch.cuda.graph_pool_handle())
            if isinstance(error, torch.cuda.OutOfMemoryError) or not isinstance(error, Exception):
                raise
            raise CaptureError(explain(error)) from error
        try:
            graph.capture_end()
        except RuntimeError as error:
            self._pools.append(torch.cuda.graph_pool_handle())
            raise CaptureError(f"ending the capture failed: {first_line(error)}") from error
        return output

    def can_run(self, key: ShapeKey) -> bool:
        return key in self._graphs

    def replay_session(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def replay(self, key: ShapeKey) -> torch.Tensor:
        self._graphs[key].replay()
        return self._outputs[key]

    def kernels(self, key: ShapeKey) -> tuple[KernelCount, ...] | None:
        return kernel_counts([self._graphs[key].raw_cuda_graph()], driver_bindings())

    def output(self, key: ShapeKey) -> torch.Tensor | None:
        return self._outputs[key]

    def pool_segments(self) -> tuple[int, ...]:
        return segments_of(self._pools)

    def cleanup(self) -> None:
        torch.cuda.synchronize()
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._outputs.clear()
        self._inputs.clear()
        self._pools = []
        self._first_in_pool = True


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def segments_of(pools: Iterable[Any]) -> tuple[int, ...]:
    """Bytes of each segment that torch holds for some graph pools."""
    segments = (segment for pool in pools for segment in torch.cuda.memory_snapshot(mempool_id=pool))
    return tuple(int(segment["total_size"]) for segment in segments)


def node_count(graph: torch.cuda.CUDAGraph) -> int | None:
    """Nodes of a kept graph, counted by the driver; None when the driver library cannot be called."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_size_t(0)
    failed = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return None if failed else int(count.value)
