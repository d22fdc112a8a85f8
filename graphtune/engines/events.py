"""What log lines say, typed. A field that a line does not carry is None, never 0 or False.

Events carry the time as written (with the year only where the line has one) and the rank such as ``DP0 TP1`` (empty
when the line names none). They never carry host names, addresses, paths or prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from graphtune.engines.base import Unit

Role = Literal["target", "draft"]
CapturePhase = Literal["decode", "prefill", "verify", "extend", "mixed"]
Weighting = Literal["iterations", "seconds"]


class Running(NamedTuple):
    """One reading of the running batch (a tuple: a log holds millions). ``weight`` is in ``weighting`` units: SGLang
    prints every so many iterations, vLLM every so many seconds. ``aggregated`` sums are over engines: no batch size.
    """

    at: str | None
    rank: str
    requests: int
    tokens: int | None
    graph: bool | None
    weight: float
    weighting: Weighting
    aggregated: bool = False


class Prefill(NamedTuple):
    """One prefill batch: new tokens, and whether a graph served it."""

    at: str | None
    rank: str
    requests: int | None
    tokens: int
    graph: bool | None


class Step(NamedTuple):
    """One row of a per-step table: exact counts since the last table. ``mode`` NONE is eager. Tokens, not requests."""

    rank: str
    tokens: int
    padded_tokens: int
    mode: str
    steps: int


@dataclass(frozen=True)
class Boot:
    """A server starts. ``settings`` are the few settings that concern graphs."""

    at: str | None
    rank: str
    engine: str
    version: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    restart: bool = False


@dataclass(frozen=True)
class Settings:
    """Settings that a line states after start-up began."""

    rank: str
    values: dict[str, Any]


@dataclass(frozen=True)
class CaptureBegin:
    """A capture of one list starts. ``step`` counts the layers of a multi-layer draft."""

    at: str | None
    rank: str
    role: Role
    phase: CapturePhase
    backend: str | None = None
    sizes: tuple[int, ...] | None = None
    unit: Unit = "requests"
    width: int | None = None
    available_bytes: int | None = None
    count: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class CaptureSizes:
    """The list of a capture, printed on a line of its own."""

    rank: str
    sizes: tuple[int, ...]
    unit: Unit


class CaptureProgress(NamedTuple):
    """A capture in progress: the size in work, free memory, and how many of how many are done."""

    rank: str
    mode: str | None
    size: int | None
    unit: Unit
    available_bytes: int | None
    done: int | None
    total: int | None


@dataclass(frozen=True)
class CaptureEnd:
    """A capture ended. ``phase`` None: all captures of the boot together, as vLLM reports them."""

    at: str | None
    rank: str
    role: Role
    phase: CapturePhase | None
    seconds: float | None
    used_bytes: int | None
    available_bytes: int | None
    step: int | None = None


@dataclass(frozen=True)
class Memory:
    """A named amount of memory: weights, activation_peak, available, kv_cache."""

    rank: str
    what: str
    size_bytes: int


@dataclass(frozen=True)
class KVSize:
    """Size of the KV cache. A later one replaces an earlier (an estimate, a dry run)."""

    rank: str
    tokens: int | None
    size_bytes: int | None = None
    blocks: int | None = None


@dataclass(frozen=True)
class GraphEstimate:
    """What the engine expects or measured of graph memory, and graphs per mode: (count, largest size)."""

    rank: str
    estimated_bytes: int | None = None
    actual_bytes: int | None = None
    counts: dict[str, tuple[int, int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Utilization:
    """A notice about the memory fraction: what is set and what the engine suggests."""

    rank: str
    current: float | None
    suggested: float | None


@dataclass(frozen=True)
class ModeChange:
    """Asked for one mode, the engine runs another."""

    rank: str
    asked: str | None
    runs: str
    reason: str | None


@dataclass(frozen=True)
class ListChange:
    """The engine altered the list of capture sizes. ``top`` is the largest size afterwards, where it is said."""

    rank: str
    reason: str
    before: tuple[int, ...] | None = None
    after: tuple[int, ...] | None = None
    top: int | None = None


@dataclass(frozen=True)
class OutOfMemory:
    """An allocation failed: bytes asked for and bytes free."""

    at: str | None
    rank: str
    asked_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True)
class CaptureError:
    """A capture failed on an operation that cannot be recorded: no question of memory."""

    at: str | None
    rank: str
    operation: str


@dataclass(frozen=True)
class CodeLine:
    """A line of code in a traceback that reads the device from the host, such as ``.item()``; only that is kept."""

    rank: str
    operation: str


@dataclass(frozen=True)
class PrefillGraphsOff:
    """The engine disabled prefill graphs at start-up, and why."""

    rank: str
    reason: str


Event = (
    Running
    | Prefill
    | Step
    | Boot
    | Settings
    | CaptureBegin
    | CaptureSizes
    | CaptureProgress
    | CaptureEnd
    | Memory
    | KVSize
    | GraphEstimate
    | Utilization
    | ModeChange
    | ListChange
    | OutOfMemory
    | CaptureError
    | CodeLine
    | PrefillGraphsOff
)
