"""Eager breaks: functions that cut a recording in two and run outside it, at capture and at every replay.

A marked function reached while a breakable backend records ends the current segment, runs once so that its results
have an address, and starts the next segment. A replay launches segment, body, segment, … in turn. What a body needs of
the batch it must fetch itself when it runs: its arguments are those of the capture, at the same addresses.

At capture no segment has run, so a body sees unwritten memory in whatever a segment makes. A body that branches on
values, or waits for other processes, needs a ``capture_stub``.
"""

from __future__ import annotations

import contextlib
import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from graphtune.worker.graphs.backend import CaptureError

P = ParamSpec("P")
R = TypeVar("R")

_cutting: ContextVar[Cutter | None] = ContextVar("cutting", default=None)


class EagerBreak(Generic[P, R]):
    """A function that cuts the recordings in which it is called; anywhere else, full recordings included, it just runs.

    ``capture_stub`` runs in its place at capture and must return results of the same structure and shapes. With
    ``enabled`` false it never cuts. ``run_eager`` is the function itself.
    """

    def __init__(
        self, body: Callable[P, R], *, capture_stub: Callable[P, R] | None = None, enabled: bool = True
    ) -> None:
        functools.update_wrapper(self, body)
        self.run_eager = body
        self.at_capture = capture_stub or body
        self.enabled = enabled

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        cutter = _cutting.get()
        if cutter is None or not self.enabled:
            return self.run_eager(*args, **kwargs)
        return cutter.cut(self, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> EagerBreak[..., R]:
        if instance is None:
            return self
        bound: Callable[..., R] = types.MethodType(self.run_eager, instance)
        stub = None if self.at_capture is self.run_eager else types.MethodType(self.at_capture, instance)
        return EagerBreak(bound, capture_stub=stub, enabled=self.enabled)


@overload
def eager_break(body: Callable[P, R]) -> EagerBreak[P, R]: ...


@overload
def eager_break(
    *, capture_stub: Callable[..., Any] | None = None, enabled: bool = True
) -> Callable[[Callable[P, R]], EagerBreak[P, R]]: ...


def eager_break(
    body: Callable[..., Any] | None = None,
    *,
    capture_stub: Callable[..., Any] | None = None,
    enabled: bool = True,
) -> Any:
    """Mark a function or method as an EagerBreak; usable with and without arguments."""
    if body is None:
        return functools.partial(EagerBreak, capture_stub=capture_stub, enabled=enabled)
    return EagerBreak(body, capture_stub=capture_stub, enabled=enabled)


@dataclass(frozen=True, eq=False)
class Break:
    """A body with the arguments of its capture and the tensors that the next segments read its results from.

    Arguments and results in the pool are descriptions of memory that do not hold it. Results that the body made are
    held: they were made between recordings, and the next segment reads their addresses.
    """

    name: str
    body: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bridge: Any

    def run(self) -> None:
        """Run the body and put its results where the next segment reads them."""
        refill(self.bridge, self.body(*self.args, **self.kwargs), self.name)

    def bridges(self) -> Iterator[torch.Tensor]:
        """The tensors of the bridge."""
        return leaves(self.bridge)


class Cutter(ABC):
    """What a breakable backend records with: ends and begins segments, says how memory of the pool is remembered."""

    def __init__(self, barrier: Callable[[], None] | None) -> None:
        self.breaks: list[Break] = []
        self._barrier = barrier

    @abstractmethod
    def end_segment(self) -> None:
        """Stop recording."""

    @abstractmethod
    def begin_segment(self) -> None:
        """Record again, into a new segment on the same pool."""

    @abstractmethod
    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without holding it, when it is memory that graphs may use again."""

    def between_segments(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a body at capture."""
        return contextlib.nullcontext()

    def cut(self, marked: EagerBreak[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End a segment, run the body, remember it, begin the next segment; returns what the body returned."""
        name = str(getattr(marked, "__qualname__", marked.run_eager))
        self.end_segment()
        # Strong references would keep the pool from using a layer's tensors again in the next one.
        positional, named = map_tensors(self.alias, args), map_tensors(self.alias, kwargs)
        if self._barrier is not None:
            # Processes reach this point at different times, and a body may hold collectives that do not wait long.
            self._barrier()
        # Breaks inside the body are a part of it.
        with self.between_segments(), cutting(None):
            result = marked.at_capture(*args, **kwargs)
        refuse_unknown(result, name)
        given = {tensor.untyped_storage().data_ptr() for tensor in leaves((args, kwargs))}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return self.alias(tensor) if tensor.untyped_storage().data_ptr() in given else tensor

        self.breaks.append(Break(name, marked.run_eager, positional, named, map_tensors(keep, result)))
        self.begin_segment()
        return result


@contextlib.contextmanager
def cutting(cutter: Cutter | None) -> Iterator[None]:
    """Within it, this thread's marked functions are handed to ``cutter``; with None they just run."""
    token = _cutting.set(cutter)
    try:
        yield
    finally:
        _cutting.reset(token)


def refill(bridge: Any, result: Any, name: str) -> None:
    """Copy a body's results into the tensors that the next segment reads; what already lies there is left alone."""
    if bridge is None and result is None:
        return
    if isinstance(bridge, torch.Tensor) and isinstance(result, torch.Tensor):
        if (bridge.shape, bridge.dtype) != (result.shape, result.dtype):
            found, made = (f"{tuple(t.shape)} {t.dtype}" for t in (result, bridge))
            raise RuntimeError(f"break {name} returned {found} where it returned {made} at capture")
        if bridge.data_ptr() != result.data_ptr() or bridge.stride() != result.stride():
            bridge.copy_(result)
        return
    if not isinstance(bridge, (list, tuple)) or type(bridge) is not type(result) or len(bridge) != len(result):
        raise RuntimeError(f"break {name} returned {type(result).__name__} where it returned another kind at capture")
    for part, fresh in zip(bridge, result, strict=True):
        refill(part, fresh, name)


def refuse_unknown(result: Any, name: str) -> None:
    """Raise CaptureError for results that could not be renewed at replay: a number would be frozen."""
    if isinstance(result, (list, tuple)):
        for item in result:
            refuse_unknown(item, name)
    elif result is not None and not isinstance(result, torch.Tensor):
        kind = type(result).__name__
        raise CaptureError(f"break {name} returned {kind}; tensors, lists and tuples of them, and None can be renewed")


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with every tensor in it replaced; other values as they are."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: map_tensors(function, item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    return value
