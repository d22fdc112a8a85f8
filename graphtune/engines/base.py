"""What graphtune needs to know of a serving engine."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from graphtune.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from graphtune.engines.launch import Launch
    from graphtune.engines.resolution import Resolution

Padding = Literal["always", "capped", "exact"]
Unit = Literal["requests", "tokens"]
Role = Literal["prefill", "decode"]

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class DeviceFacts:
    """What engines decide defaults by. ``nvml_total_mib`` is nvidia-smi's figure in MiB; None when unknown."""

    nvml_total_mib: int | None
    compute_capability: tuple[int, int] | None = None
    name: str | None = None


@dataclass(frozen=True)
class Serving:
    """Settings of a deployment that an engine's capture defaults depend on; None means the engine's own default.

    ``spec_tokens`` is the number of draft tokens a step verifies beyond the one it always computes, so that a decode
    request has ``width`` = 1 + ``spec_tokens`` rows. ``role`` is the side of a server that splits prefill from decode.
    """

    tp: int = 1
    max_running_requests: int | None = None
    max_batched_tokens: int | None = None
    chunked_prefill_size: int | None = None
    context_len: int | None = None
    spec_tokens: int = 0
    padding: bool | None = None
    performance_mode: str = "balanced"
    pp: int = 1
    dp: int = 1
    role: Role | None = None
    mem_fraction: float | None = None
    offline: bool = False

    @property
    def width(self) -> int:
        """Rows of one decode request."""
        return 1 + self.spec_tokens


def replays(
    raw: int | np.ndarray, size: int | np.ndarray, padding: Padding, cap_factor: float | None
) -> bool | np.ndarray:
    """Whether ``padding`` lets a graph of ``size`` rows, at least ``raw``, serve ``raw`` rows; of arrays, each with
    each."""
    if padding == "exact":
        return size == raw
    return cap_factor is None or size <= cap_factor * raw if padding == "capped" else True


@dataclass(frozen=True)
class Dispatch:
    """How an engine picks a bucket for a batch: ``always`` pads to the next size, ``capped`` refuses above
    ``cap_factor`` times the raw size, ``exact`` replays only equal sizes. Above the top the engine runs eager.
    ``decode_by_default`` is the engine's own default where the flags that graphtune writes change it."""

    decode: Padding
    prefill: Padding
    decode_unit: Unit
    prefill_unit: Unit
    one_list: bool
    prefill_cap_factor: float | None = None
    above_top: str = "eager"
    decode_by_default: Padding | None = None


@dataclass(frozen=True)
class Flags:
    """What to hand to the engine: command-line arguments, or the text of a YAML file. ``warnings`` say what the
    engine will still change of it, in requests."""

    args: tuple[str, ...] = ()
    yaml: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryRule:
    """How an engine divides a device when nobody tells it otherwise, decode graphs left out.

    It gives ``fraction`` of ``base`` to weights and KV cache and keeps the rest free. ``covers`` names the budget
    terms that the part kept free is meant to hold; what is not covered comes out of the fraction. ``setting`` is the
    name of the option that changes the fraction, ``bytes_setting`` of one that sizes the KV cache outright.

    ``own_fraction`` is the engine's own, guesses included, and ``own_covers`` what the part it keeps free then has to
    hold. ``chunk_tokens`` are the most tokens of one prefill, ``rows`` the most requests that a step samples for.
    """

    fraction: float
    base: Literal["total", "free_before_load", "free_after_load"]
    covers: frozenset[str]
    setting: str
    own_fraction: float
    own_covers: frozenset[str]
    chunk_tokens: int
    rows: int
    bytes_setting: str | None = None


@dataclass(frozen=True)
class Edit:
    """One change of a launch: a capture list (``sizes``), its largest size or the limit of running requests
    (``number``), what runs (``text``), padding (``on`` or off), or the memory fraction (``fraction``)."""

    what: Literal["sizes", "largest", "limit", "mode", "padding", "fraction"]
    phase: Literal["decode", "prefill"] = "decode"
    sizes: tuple[int, ...] = ()
    number: int = 0
    text: str = ""
    fraction: float = 0.0
    on: bool = True


@dataclass(frozen=True)
class GraphPlan:
    """What to tell an engine. For each phase None leaves the engine's own list and ``()`` turns graphs off; a backend
    of None leaves the engine's. ``mem_fraction`` is the fraction of ``MemoryRule``; ``kv_cache_bytes`` sizes the KV
    cache outright, where the engine can."""

    decode: tuple[int, ...] | None = None
    prefill: tuple[int, ...] | None = None
    decode_backend: str | None = None
    prefill_backend: str | None = None
    mem_fraction: float | None = None
    kv_cache_bytes: int | None = None


class Engine(ABC):
    """One serving engine at a stated version. Sizes are requests for decode and tokens for prefill unless the
    engine's dispatch says otherwise."""

    name: str
    version: str
    dispatch: Dispatch
    padding_is_optional: ClassVar[bool] = False

    @abstractmethod
    def default_decode_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        """The engine's own decode capture list, ascending, as it is captured (after the engine's run-time rules)."""

    @abstractmethod
    def decode_flags(self, sizes: tuple[int, ...], serving: Serving) -> Flags:
        """Flags that make the engine capture exactly ``sizes`` for decode; an empty tuple turns decode graphs off."""

    @abstractmethod
    def reserve_bytes(self, device: DeviceFacts, serving: Serving) -> int:
        """Bytes of the device the engine itself keeps from weights and KV cache by its own rule, graphs included.

        Raises InputError when the rule needs the device's memory and it is not known."""

    @abstractmethod
    def memory_rule(self, device: DeviceFacts, serving: Serving) -> MemoryRule:
        """The engine's default division of the device, with no guess at decode graphs in it: they are measured."""

    @abstractmethod
    def default_prefill_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        """The engine's own prefill capture list in tokens, ascending; empty when it captures none by default."""

    @abstractmethod
    def flags(self, plan: GraphPlan, serving: Serving, device: DeviceFacts | None = None) -> Flags:
        """Flags that make the engine do what ``plan`` says, written for the engine's version.

        ``warnings`` say what the engine would still change, found by reading the flags back as the engine does.
        Raises InputError when a size is no whole number of at least 1, or the version has no way to say it.
        """

    @abstractmethod
    def resolve(self, launch: Launch, device: DeviceFacts) -> Resolution:
        """What a launch comes to on a device: captured lists, reachable batches, modes, refusals."""

    @abstractmethod
    def edit(self, launch: Launch, edit: Edit) -> Launch | None:
        """The launch with one edit, in the spelling it already uses; None when this engine has no such edit."""

    def request_pool(self, kv_tokens: int, serving: Serving) -> int | None:
        """The most running requests that the engine allows with a KV cache of ``kv_tokens``, by which it then cuts its
        decode list; None for an engine whose limit does not depend on it."""
        return None

    def unpadded(self) -> Engine | None:
        """The same engine told not to pad decode steps, so that only equal sizes are replayed; None where that cannot
        be told or is told."""
        if not self.padding_is_optional or self.dispatch.decode == "exact":
            return None
        own = self.dispatch.decode_by_default or self.dispatch.decode
        dispatch = replace(self.dispatch, decode="exact", decode_by_default=None if own == "exact" else own)
        return replace(self, dispatch=dispatch)  # type: ignore[type-var]

    def at_version(self, version: str) -> Engine:
        """The same engine at another version, such as ``0.5.23``."""
        version_tuple(version)
        return replace(self, version=version)  # type: ignore[type-var]


def version_tuple(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, for comparison. Raises InputError when there are not at least two."""
    match = re.match(r"v?(\d{1,6}(?:\.\d{1,6})+)", version)
    if match is None:
        raise InputError(f"{version!r} is not a version", action="Write for example 0.5.23.")
    return tuple(int(part) for part in match[1].split("."))


def checked_sizes(sizes: tuple[int, ...], phase: str) -> list[int]:
    """Sizes sorted, each once. Raises InputError for anything but whole numbers of at least 1: engines do not check."""
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"{size!r} is no {phase} capture size", action="Whole numbers of at least 1 are accepted.")
    return sorted(set(sizes))
