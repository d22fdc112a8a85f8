"""What CUDA graphs hold: kernels by name and other nodes by kind, read from the graphs themselves.

Needs ``cuda-bindings`` (the extra ``contents``, and part of CUDA builds of torch); without it nothing is told.
"""

from __future__ import annotations

import ctypes
import importlib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from graphtune.results import KernelCount

LONGEST_NAME = 400
"""Letters kept of a kernel's name; those of templated kernels can have thousands."""

KIND_PREFIX = "CU_GRAPH_NODE_TYPE_"


def driver_bindings() -> Any | None:
    """``cuda.bindings.driver``, or None where it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None


def kernel_counts(graphs: Iterable[int], driver: Any | None) -> tuple[KernelCount, ...] | None:
    """Nodes of all ``graphs`` (CUgraph handles) by name, most first; None without bindings or when a call fails."""
    if driver is None:
        return None
    counts: Counter[str] = Counter()
    try:
        for graph in graphs:
            counts.update(_names(driver, driver.CUgraph(graph)))
    except DriverCallFailed:
        return None
    return counted(counts)


def counted(counts: Counter[str]) -> tuple[KernelCount, ...]:
    """Counts as they are stored: most nodes first, equal ones by name."""
    return tuple(KernelCount(name, nodes) for name, nodes in sorted(counts.items(), key=lambda one: (-one[1], one[0])))


class DriverCallFailed(Exception):
    """A driver call that did not return CUDA_SUCCESS."""


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """The value of one driver call; calls with several return a list of them."""
    error, *values = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverCallFailed(f"{name}: {error}")
    return values[0] if len(values) == 1 else values


def _names(driver: Any, graph: Any) -> Iterable[str]:
    _, many = _call(driver, "cuGraphGetNodes", graph, 0)
    nodes, _ = _call(driver, "cuGraphGetNodes", graph, many)
    for node in nodes[:many]:
        kind = _call(driver, "cuGraphNodeGetType", node)
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from _names(driver, _call(driver, "cuGraphChildGraphNodeGetGraph", node))
        elif kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            yield _kernel_name(driver, node)
        else:
            yield str(kind.name).removeprefix(KIND_PREFIX).lower()


def _kernel_name(driver: Any, node: Any) -> str:
    """A node names a function, or a kernel that is not bound to a context yet."""
    parameters = _call(driver, "cuGraphKernelNodeGetParams", node)
    if int(parameters.func):
        name = _call(driver, "cuFuncGetName", parameters.func)
    else:
        name = _call(driver, "cuKernelGetName", parameters.kern)
    return demangled(name.decode() if isinstance(name, bytes) else str(name))[:LONGEST_NAME]


@cache
def demangled(name: str) -> str:
    """A C++ name as it is written, where the C++ library can be asked; else as it is."""
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return name
    demangle.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    status = ctypes.c_int(0)
    found = demangle(name.encode(), None, None, ctypes.byref(status))
    if not found:
        return name
    text = ctypes.string_at(found).decode()
    free(found)
    return text
