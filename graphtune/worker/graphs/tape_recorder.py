"""How a tape is recorded: what one call does, as descriptions of operations and of the tensors they use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from graphtune.worker.graphs.backend import CaptureError
from graphtune.worker.graphs.failure import first_line
from graphtune.worker.graphs.tape_operators import (
    ALLOCATIONS,
    COPIES,
    HOST_READ,
    Operator,
    Origin,
    calling_line,
    operator,
    tensors_in,
)
from graphtune.worker.graphs.tape_pool import BytePool


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor in the pool as a description: entries that held tensors would keep the pool from reusing their bytes."""

    address: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugated: bool = False
    negated: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Outside:
    """A tensor from outside the pool that an entry uses; ``constant`` for a number that an assignment wrapped."""

    tensor: torch.Tensor
    origin: Origin
    constant: bool = False

    def __repr__(self) -> str:
        return f"{tuple(self.tensor.shape)} {self.tensor.dtype} first used by {self.origin}"


@dataclass(frozen=True, slots=True, repr=False)
class Made:
    """A block that a recording placed a tensor in, and the line that made it."""

    block: weakref.ref[np.ndarray]
    address: int
    nbytes: int
    size: tuple[int, ...]
    dtype: torch.dtype
    origin: Origin

    def __repr__(self) -> str:
        return f"{self.size} {self.dtype} made by {self.origin}"


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One operation to issue again. ``results``: the path (indices) of each result to copy, and where to."""

    call: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[tuple[int, ...], Ref], ...]
    origin: Origin


@dataclass(frozen=True, eq=False)
class Recording:
    """What one call did: entries in order, its output, the outside tensors it used and the blocks it took.

    ``output_address`` is where the output's storage began while recording.
    """

    entries: tuple[Entry, ...]
    output: torch.Tensor
    output_address: int
    outside: tuple[Outside, ...]
    made: tuple[Made, ...]
    pool: BytePool


class Recorder(TorchDispatchMode):
    """Runs each operation, moves what it makes into pool blocks and writes down how to issue it again.

    While ``paused`` operations just run; ``length`` tells where in the entries a pause began.
    """

    def __init__(self, pool: BytePool) -> None:
        super().__init__()
        self.refused: str | None = None
        self.assigning = False
        self.paused = False
        self._pool = pool
        self._entries: list[Entry] = []
        self._outside: dict[Ref, Outside] = {}
        self._constants: set[int] = set()
        self._made: list[Made] = []
        self._ours: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler, more than a second, at the first operation recorded in a process.
        return False

    @property
    def length(self) -> int:
        """Entries so far."""
        return len(self._entries)

    @property
    def made(self) -> tuple[Made, ...]:
        """Blocks placed so far."""
        return tuple(self._made)

    def describe(self, tensor: torch.Tensor) -> Ref | Outside:
        """A tensor as entries hold it: memory of this recording without holding it, anything else by itself."""
        described: Ref | Outside = self._describe(tensor, calling_line("argument of a break"))
        return described

    def recording(self, output: torch.Tensor, hold_output: bool) -> Recording:
        storage, ref = output.untyped_storage(), describe(output)
        if self._in_pool(output):
            # On the block's own storage it holds the block; over the segment it does not. Neither has a history.
            with torch.inference_mode(False), torch.no_grad():
                offset = int(output.storage_offset())
                output = view_of(storage, offset, ref) if hold_output else at_address(ref, self._pool)
        outside = tuple(self._outside.values())
        return Recording(tuple(self._entries), output, storage.data_ptr(), outside, tuple(self._made), self._pool)

    def refuse(self, operation: str, reason: str) -> CaptureError:
        """The error to raise. Only its text is kept: an error in a cycle with its traceback would hold blocks."""
        origin = calling_line(operation)
        message = f"{operation} {reason} — at {origin.place}: {origin.source}"
        self.refused = self.refused or message
        return CaptureError(message)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        facts = operator(func)
        if facts.composite:
            # Inference mode shows composites whole; their intermediates would be made outside the pool.
            with self:
                return facts.decompose(args, kwargs)
        with torch._C.DisableTorchFunction():
            return self._record(facts, tuple(args), kwargs)

    def _record(self, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = facts.bind(args, kwargs)
        if facts.name == "aten.lift_fresh.default" and self.assigning and bound["self"].dim() == 0:
            # x[mask] = 0.0 wraps its number in a tensor; the number is as frozen as any in the source.
            self._constants.add(bound["self"].untyped_storage().data_ptr())
            return facts.call(*args, **kwargs)
        reason = facts.refuses(bound)
        if reason is not None:
            raise self.refuse(facts.name, reason)
        origin = calling_line(facts.name)
        written = [t for name in bound if name in facts.writes for t in tensors_in(bound[name])]
        result = self._run(facts, args, kwargs, bound, written)
        if facts.changes_view_only:
            return result
        known = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs)) if t.numel()}
        fresh: list[tuple[tuple[int, ...], Ref]] = []
        result = self._place_fresh(facts, result, (), known, fresh, origin)
        if facts.name in ALLOCATIONS:
            return result
        has_effect = any(t.numel() for t in written) or (not facts.returned and any(True for _ in tensors_in(bound)))
        if fresh or has_effect:
            args, kwargs = self._describe(args, origin), self._describe(kwargs, origin)
            self._entries.append(entry_for(facts, args, kwargs, tuple(fresh), origin))
        return result

    def _run(
        self,
        facts: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: Mapping[str, Any],
        written: list[torch.Tensor],
    ) -> Any:
        """The call's results, with nothing outside the pool written."""
        outside = [] if facts.changes_view_only else [t for t in written if not self._in_pool(t)]
        if not outside:
            result = facts.call(*args, **kwargs)
            return tree_map_only(torch.Tensor, torch.Tensor.zero_, result) if facts.name in ALLOCATIONS else result
        if facts.custom:
            return self._imagine(facts, args, kwargs)
        if all(facts.returned) and len(outside) == len(written) and all(t.numel() for t in written):
            results = tuple(bound[name] for name in facts.returned if name is not None)
            return results[0] if len(results) == 1 else (results or None)
        # Some targets are in the pool, have no elements yet or are not all results: write copies of the outside ones.
        copies = {id(t): t.clone() for t in outside}
        args, kwargs = tree_map_only(torch.Tensor, lambda t: copies.get(id(t), t), (args, kwargs))
        originals = {id(copies[id(t)]): t for t in outside}
        result = facts.call(*args, **kwargs)
        if any(copies[id(t)].shape != t.shape for t in outside):
            raise self.refuse(facts.name, "resizes its output, which changes an address; allocate it at its final size")
        return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)

    def _imagine(self, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Zeros in the shapes that a custom operator's fake kernel gives; its body would write outside."""
        given: dict[int, torch.Tensor] = {}

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            given[id(fake)] = tensor
            return fake

        try:
            with torch.inference_mode(False), torch.no_grad():
                fake_args, fake_kwargs = tree_map_only(torch.Tensor, stand_in, (args, kwargs))
                fakes = facts.call(*fake_args, **fake_kwargs)
        except Exception as error:
            reason = f"writes outside the pool and has no usable fake kernel to tell its shapes ({first_line(error)})"
            raise self.refuse(facts.name, reason) from error

        def real(fake: torch.Tensor) -> torch.Tensor:
            if id(fake) in given:
                return given[id(fake)]
            return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype).zero_()

        return tree_map_only(torch.Tensor, real, fakes)

    def _place_fresh(
        self,
        facts: Operator,
        result: Any,
        path: tuple[int, ...],
        known: set[int],
        fresh: list[tuple[tuple[int, ...], Ref]],
        origin: Origin,
    ) -> Any:
        """The result with new tensors moved into blocks. Aliases are told by storage: schemas mark some wrongly."""
        if isinstance(result, (list, tuple)):
            return type(result)(
                self._place_fresh(facts, item, (*path, index), known, fresh, origin)
                for index, item in enumerate(result)
            )
        if not isinstance(result, torch.Tensor):
            return result
        if result.device.type != "cpu" or result.layout != torch.strided:
            raise self.refuse(facts.name, f"makes a {result.layout} tensor on {result.device}, not plain CPU memory")
        if result.numel() == 0 or result.untyped_storage().data_ptr() in known:
            return result
        placed = self._place(facts, result, origin)
        fresh.append((path, describe(placed)))
        return placed

    def _place(self, facts: Operator, source: torch.Tensor, origin: Origin) -> torch.Tensor:
        if torch._debug_has_internal_overlap(source) == 1:
            raise self.refuse(facts.name, "makes a tensor whose elements overlap")
        # Strides as the operation chose them: an attention output is often a transposed view of its memory.
        extent = 1 + sum((n - 1) * step for n, step in zip(source.size(), source.stride(), strict=True))
        nbytes = extent * source.element_size()
        block = self._pool.allocate(nbytes)
        # Under inference mode too: inference tensors could not be written by a model outside of it.
        with torch.inference_mode(False), torch.no_grad():
            storage = torch.from_numpy(block).untyped_storage()
            placed = view_of(storage, 0, describe(source))
        placed.copy_(source)
        address = storage.data_ptr()
        self._ours.add(address)
        self._made.append(Made(weakref.ref(block), address, nbytes, tuple(source.size()), source.dtype, origin))
        return placed

    def _in_pool(self, tensor: torch.Tensor) -> bool:
        """Whether this recording placed it; pool tensors of earlier recordings are from outside as well."""
        return tensor.untyped_storage().data_ptr() in self._ours

    def _describe(self, value: Any, origin: Origin) -> Any:
        if isinstance(value, torch.Tensor):
            ref = describe(value)
            if value.numel() == 0 or self._in_pool(value):
                return ref
            if ref not in self._outside:
                constant = value.untyped_storage().data_ptr() in self._constants
                self._outside[ref] = Outside(value.detach(), origin, constant)
            return self._outside[ref]
        if isinstance(value, dict):
            return {name: self._describe(item, origin) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._describe(item, origin) for item in value)
        return value


class RecorderBesideCompiler(Recorder):
    """For processes with ``torch._dynamo`` loaded: it would trace the recorder as a part of the model it compiles."""

    __torch_dispatch__ = Recorder.__torch_dispatch__

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True


class HostReads(TorchFunctionMode):
    """Sees what the dispatcher does not: methods that read a tensor's memory straight from Python."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._recorder.paused:
            return func(*args, **(kwargs or {}))
        name = READS.get(func)
        if name is not None:
            raise self._recorder.refuse(name, HOST_READ)
        if func in SPLITS and any(True for _ in tensors_in((args[1:], kwargs))):
            raise self._recorder.refuse("tensor_split", HOST_READ)
        if func is not torch.Tensor.__setitem__:
            return func(*args, **(kwargs or {}))
        self._recorder.assigning = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._recorder.assigning = False


READS: dict[Callable[..., Any], str] = {
    getattr(torch.Tensor, name): f"Tensor.{name}"
    for name in (
        *("item", "tolist", "numpy", "cpu", "is_nonzero", "equal", "allclose"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__", "__repr__", "__format__"),
    )
}
SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}


def entry_for(
    facts: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fresh: tuple[tuple[tuple[int, ...], Ref], ...],
    origin: Origin,
) -> Entry:
    """The entry that issues a call again, computing new results in place where torch can, else copying them."""
    refs = [ref for _, ref in fresh]
    if facts.name in COPIES and refs:
        return Entry(torch.ops.aten.copy_.default, (refs[0], args[0]), {}, (), origin)
    plain = not any(ref.conjugated or ref.negated for ref in refs)
    if facts.out is not None and refs and plain and len(refs) == len(facts.out_names):
        given = dict(zip(facts.out_names, refs, strict=True))
        return Entry(facts.out, args, {**kwargs, **given}, (), origin)
    return Entry(facts.call, args, kwargs, fresh, origin)


def describe(tensor: torch.Tensor) -> Ref:
    """Where a tensor is and what it looks like; a tensor without elements is nowhere."""
    return Ref(
        tensor.data_ptr() if tensor.numel() else 0,
        tensor.dtype,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def at_address(ref: Ref, pool: BytePool) -> torch.Tensor:
    """The tensor that a Ref describes, over its segment: it keeps the segment's memory, and no block from reuse."""
    segment = pool.segment_at(ref.address)
    if segment is None:
        return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)
    storage = torch.from_numpy(segment.memory).untyped_storage()
    return view_of(storage, (ref.address - segment.address) // ref.dtype.itemsize, ref)


def view_of(storage: torch.UntypedStorage, offset: int, ref: Ref) -> torch.Tensor:
    """A tensor that looks like ``ref`` at element ``offset`` of a storage, with no history and no base."""
    tensor = torch.empty(0, dtype=ref.dtype).set_(storage, offset, ref.size, ref.stride)
    tensor = torch._conj(tensor) if ref.conjugated else tensor
    return torch._neg_view(tensor) if ref.negated else tensor
