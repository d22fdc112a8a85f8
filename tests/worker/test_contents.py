"""What a graph holds: read through the driver's bindings (made up here), and from tapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch

from graphtune.results import CaptureList, KernelCount
from graphtune.worker.graphs import contents
from graphtune.worker.graphs.contents import demangled, driver_bindings, kernel_counts
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.measurement import Measurement
from graphtune.worker.memory import Ledger
from tests.worker import tiny, tiny_prefill


class CUresult(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class CUgraphNodeType(Enum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_GRAPH = 4


@dataclass(frozen=True)
class Node:
    kind: CUgraphNodeType
    name: str = ""
    child: int = 0
    bound: bool = True


@dataclass
class Parameters:
    func: int
    kern: int


@dataclass
class Driver:
    """The few calls of the bindings, over graphs given as lists of nodes; ``failing`` is a call that fails."""

    graphs: dict[int, list[Node]]
    failing: str = ""
    CUresult: Any = CUresult
    CUgraphNodeType: Any = CUgraphNodeType
    names: dict[int, str] = field(default_factory=dict)

    def CUgraph(self, handle: int) -> int:
        return handle

    def _done(self, call: str, *values: Any) -> tuple[Any, ...]:
        if call == self.failing:
            return (CUresult.CUDA_ERROR_INVALID_VALUE, *(None for _ in values))
        return (CUresult.CUDA_SUCCESS, *values)

    def cuGraphGetNodes(self, graph: int, many: int) -> tuple[Any, ...]:
        nodes = self.graphs[graph]
        return self._done("cuGraphGetNodes", nodes[:many] if many else None, len(nodes))

    def cuGraphNodeGetType(self, node: Node) -> tuple[Any, ...]:
        return self._done("cuGraphNodeGetType", node.kind)

    def cuGraphChildGraphNodeGetGraph(self, node: Node) -> tuple[Any, ...]:
        return self._done("cuGraphChildGraphNodeGetGraph", node.child)

    def cuGraphKernelNodeGetParams(self, node: Node) -> tuple[Any, ...]:
        handle = 1 + len(self.names)
        self.names[handle] = node.name
        return self._done("cuGraphKernelNodeGetParams", Parameters(*((handle, 0) if node.bound else (0, handle))))

    def cuFuncGetName(self, function: int) -> tuple[Any, ...]:
        return self._done("cuFuncGetName", self.names[function].encode())

    def cuKernelGetName(self, kernel: int) -> tuple[Any, ...]:
        return self._done("cuKernelGetName", self.names[kernel].encode())


KERNEL, MEMCPY, GRAPH = CUgraphNodeType
GRAPHS = {
    7: [
        Node(KERNEL, "gemm"),
        Node(KERNEL, "norm"),
        Node(KERNEL, "gemm", bound=False),
        Node(MEMCPY),
        Node(GRAPH, child=8),
    ],
    8: [Node(KERNEL, "gemm"), Node(KERNEL, "_ZN2at6native6vectorEv")],
}


def test_kernels_are_counted_by_name_and_other_nodes_by_kind_child_graphs_included() -> None:
    counts = kernel_counts([7], Driver(GRAPHS))
    assert counts == (
        KernelCount("gemm", 3),
        KernelCount("at::native::vector()", 1),
        KernelCount("memcpy", 1),
        KernelCount("norm", 1),
    )
    segments = kernel_counts([8, 8], Driver(GRAPHS))
    assert segments is not None and segments[0] == KernelCount("at::native::vector()", 2)


@pytest.mark.parametrize("call", ["cuGraphGetNodes", "cuGraphNodeGetType", "cuFuncGetName", "cuKernelGetName"])
def test_a_driver_that_cannot_tell_leaves_the_figure_out(call: str) -> None:
    assert kernel_counts([7], Driver(GRAPHS, failing=call)) is None


def test_without_bindings_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(contents.importlib, "import_module", missing)
    assert driver_bindings() is None and kernel_counts([7], None) is None


def test_names_that_are_not_mangled_stay() -> None:
    assert demangled("triton_poi_fused_0") == "triton_poi_fused_0"
    assert demangled("_Znot a name") == "_Znot a name"


def measured(**changes: Any) -> Measurement:
    cell = tiny.cell(latency=(), **changes)
    with torch.inference_mode():
        engine = tiny.engine(cell)
        engine.warm_up()
        made = Measurement(cell, engine, Ledger(None), None, lambda *_: None)
        made.run()
    return made


def test_a_sweep_stores_what_the_graphs_of_a_processs_first_list_hold() -> None:
    lists = (tiny.capture_list(1, 2), CaptureList("again", "decode", "full", (1, 2), "ascending"))
    first, second = measured(lists=lists).captured_lists
    for capture in first.captures:
        assert capture.kernels is not None
        assert sum(kernel.nodes for kernel in capture.kernels) == capture.nodes
        assert any("aten" in kernel.name for kernel in capture.kernels)
    assert all(capture.kernels is None for capture in second.captures)
    assert first.pool_segments is not None and first.pool_segments >= 1
    (later,) = measured(lists=lists[:1], process=2).captured_lists
    assert all(capture.kernels is None for capture in later.captures)


def test_segments_count_together() -> None:
    graph = tiny_prefill.captured(tiny_prefill.eager(), 8)
    kernels = graph.backend.kernels(ShapeKey(8))
    assert kernels is not None and sum(kernel.nodes for kernel in kernels) > 10
