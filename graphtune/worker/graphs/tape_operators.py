"""What a tape must know of an operator: what it writes, whether it may be recorded, how it is replayed."""

from __future__ import annotations

import functools
import linecache
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from graphtune.worker.graphs.failure import is_model_code

COMPOSITE = DispatchKey.CompositeImplicitAutograd
BUILT_IN = {"aten", "prims", "prim"}
ALLOCATIONS = {
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_permuted.default",
    "aten.empty_strided.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
}
COPIES = {"aten.clone.default", "aten._to_copy.default"}
INDEXING = {"aten.index.Tensor", "aten._unsafe_index.Tensor"}
MASKED_WRITES = {"aten.index_put_.default", "aten.index_put.default", "aten._unsafe_index_put.default"}
# Refused whatever their tags say; the shape of the second group depends on values and torch does not tag it.
REFUSED = {
    "aten.lift_fresh": "makes a tensor from host data, which a recording would freeze; make it before and keep it",
    "aten.resize_": "changes an address; allocate at the final size",
    "aten.resize_as_": "changes an address; allocate at the final size",
    "aten.set_": "changes an address; copy into the tensor instead",
    "aten.repeat_interleave": "has an output whose shape depends on values",
    "aten._pack_padded_sequence": "has an output whose shape depends on values",
}
NUMBERS = {"int", "float", "bool", "number", "Scalar", "SymInt"}
HOST_READ = "reads a value back to the host, which a recording would freeze"


@dataclass(frozen=True, slots=True)
class Origin:
    """An operation and the line of the model that called it."""

    operation: str
    file: str
    line: int

    @property
    def source(self) -> str:
        """Text of the line; empty when the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """Folder, file and line; whole paths would name the machine's user in stored results."""
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line}"

    def __str__(self) -> str:
        return f"{self.operation} at {self.place}: {self.source}"


def calling_line(operation: str) -> Origin:
    """The innermost running line outside torch and the tape."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_model_code(frame.f_code.co_filename):
            return Origin(operation, frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return Origin(operation, "<unknown>", 0)


@dataclass(frozen=True)
class Operator:
    """Facts of one overload, taken from its schema once.

    ``writes`` are the arguments that it declares to change; ``returned`` names, per result, the changed argument that
    the result is, or None for a result of its own. ``out`` is the overload that computes the same into given
    tensors named ``out_names``, when torch has a real one.
    """

    call: OpOverload
    name: str
    namespace: str
    arguments: tuple[str, ...]
    writes: frozenset[str]
    returned: tuple[str | None, ...]
    out: OpOverload | None
    out_names: tuple[str, ...]
    composite: bool
    changes_view_only: bool
    refusal: str | None
    returns_number: bool

    def decompose(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a composite's own kernel. OpOverload.decompose() prefers Python versions, which round differently."""
        return self.call._op_dk(COMPOSITE, *args, **kwargs)

    @property
    def custom(self) -> bool:
        return self.namespace not in BUILT_IN

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name; those at their default are missing."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}

    def refuses(self, bound: Mapping[str, Any]) -> str | None:
        """Why this call cannot be recorded, or None."""
        if self.refusal is not None:
            return self.refusal
        if self.name in INDEXING and any(is_mask(index) for index in bound["indices"]):
            return "picks by a mask: the output's shape depends on values"
        if self.name in MASKED_WRITES and any(is_mask(index) for index in bound["indices"]):
            # One value is a masked fill on a GPU; several need the mask's positions on the host.
            several = bound["values"].numel() > 1
            return "writes several values by a mask: their places are read back" if several else None
        if self.name == "aten.native_batch_norm.default" and bound.get("training"):
            return "updates running statistics that it does not declare as written"
        if self.namespace == "graphtune":
            numbers = [name for name, value in bound.items() if holds_number(value)]
            if numbers:
                return f"takes numbers from the host ({', '.join(numbers)}), which a recording freezes; pass tensors"
        if self.custom and self.returns_number and any(True for _ in tensors_in(bound)):
            return HOST_READ
        return None


@functools.cache
def operator(call: OpOverload) -> Operator:
    """Facts of an overload."""
    schema = call._schema
    name = str(call)
    written = [(a.name, a.alias_info) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    sets = {alias: name for name, info in written for alias in info.before_set}
    returned = tuple(
        next((sets[alias] for alias in result.alias_info.before_set if alias in sets), None)
        if result.alias_info is not None
        else None
        for result in schema.returns
    )
    out, out_names = _out_overload(call) if not written else (None, ())
    return Operator(
        call=call,
        name=name,
        namespace=call.namespace,
        arguments=tuple(argument.name for argument in schema.arguments),
        writes=frozenset(name for name, _ in written),
        returned=returned,
        out=out,
        out_names=out_names,
        composite=has_kernel(call, COMPOSITE) and not has_kernel(call, DispatchKey.CPU),
        changes_view_only=torch.Tag.inplace_view in call.tags,
        refusal=_refusal(call, name),
        returns_number=any(str(result.type) in NUMBERS for result in schema.returns),
    )


def has_kernel(call: OpOverload, key: DispatchKey) -> bool:
    """Whether a kernel is registered for exactly this key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(call.name(), key))


def _refusal(call: OpOverload, name: str) -> str | None:
    refused = REFUSED.get(name.rsplit(".", 1)[0])
    if refused is not None:
        return None if name == "aten.repeat_interleave.self_int" else refused
    if torch.Tag.data_dependent_output in call.tags:
        return HOST_READ
    if torch.Tag.dynamic_output_shape in call.tags and name not in INDEXING:
        return "has an output whose shape depends on values"
    return None


def _out_overload(call: OpOverload) -> tuple[OpOverload | None, tuple[str, ...]]:
    """The overload with the same arguments plus one given tensor per result. Generated ones run and copy anyway."""
    schema = call._schema
    if not schema.returns or any(str(result.type) != "Tensor" for result in schema.returns):
        return None, ()
    wanted = [(a.name, str(a.type), a.kwarg_only) for a in schema.arguments]
    for overload in call.overloadpacket.overloads():
        candidate = getattr(call.overloadpacket, overload)
        given = [a for a in candidate._schema.arguments if a.is_out]
        others = [(a.name, str(a.type), a.kwarg_only) for a in candidate._schema.arguments if not a.is_out]
        if others == wanted and len(given) == len(schema.returns) and torch.Tag.generated not in candidate.tags:
            return candidate, tuple(a.name for a in given)
    return None, ()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested dicts, lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def holds_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(holds_number(item) for item in value)
    return isinstance(value, (int, float, complex))


def is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)
