"""Recipe to Plan: the cells that a sweep runs, each one process, with content-hash ids."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from graphtune.results import CaptureList, Execution, Phase

UNION = "union"
"""Name of the list that latency is measured on: all sizes of all lists."""

STEP_TOKENS = 16
"""Tokens by which every request may grow while its steps are timed; the KV pool has room for them."""


@dataclass(frozen=True)
class Measure:
    """When sampling of one quantity stops: at ``noise`` (relative) with ``min_samples``, or after ``max_seconds``."""

    min_samples: int = 7
    noise: float = 0.02
    max_seconds: float = 0.3


@dataclass(frozen=True)
class PaddedTo:
    """Replays of ``raw_size`` requests in larger ``buckets``, for their device time."""

    raw_size: int
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class LatencyAt:
    """Steps to time on the cell's first list: every size at one context (mean KV tokens per request), and ``padded``
    ones."""

    sizes: tuple[int, ...]
    context_tokens: int
    executions: tuple[Execution, ...] = ("graph", "eager")
    padded: tuple[PaddedTo, ...] = ()


@dataclass(frozen=True)
class PrefillAt:
    """Prefills to time on the cell's prefill list: ``tokens`` new ones, in ``requests`` equal parts, each behind
    ``prefix_tokens`` cached ones."""

    tokens: tuple[int, ...]
    requests: int = 1
    prefix_tokens: int = 0
    executions: tuple[Execution, ...] = ("graph", "eager")


@dataclass(frozen=True)
class CaptureLimit:
    """Device bytes that a process may use, and those that its captures are expected to need at their peak."""

    device_bytes: int
    needed_bytes: int


@dataclass(frozen=True)
class Cell:
    """One process. It captures ``lists`` in turn and times ``latency`` while the first is live, or ``prefill_latency``
    when that is a prefill list. ``phase`` is the phase of the lists; a joint cell holds both.

    ``model_config`` is the content of the Hugging Face config.json, so that an id names what was measured;
    ``weights`` is a folder of safetensors, or null for random weights. ``process`` counts repeats (1, 2, ...).
    ``purpose`` is ``main``, ``control`` (a list measured again alone) or ``memory`` (lists captured for their memory
    alone; those of one size record what they ask of the allocator), or ``joint`` (two lists of different phases that
    are captured one after the other into one pool, with nothing torn down in between), or ``verify`` (a recommended
    list captured for real).
    With ``capture_limit`` nothing is captured where that would take the process beyond it.
    """

    model_name: str
    model_config: dict[str, Any]
    weights: str | None
    dtype: str
    shard: int
    seed: int
    phase: Phase
    attention: str
    page_size: int
    kv_tokens: int
    lists: tuple[CaptureList, ...]
    latency: tuple[LatencyAt, ...]
    measure: Measure
    profile_sizes: tuple[int, ...] = ()
    gate: bool = True
    purpose: str = "main"
    process: int = 1
    prefill_latency: tuple[PrefillAt, ...] = ()
    capture_limit: CaptureLimit | None = None

    @property
    def id(self) -> str:
        """First 16 hex digits of SHA-256 over the canonical JSON; GPU and versions are not part of it."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Repeats:
    """How many processes measure the same: all of it (``whole``), or after the first only what tells the noise."""

    processes: int
    whole: bool


@dataclass(frozen=True)
class Skip:
    """Something the recipe asked for that is not measured, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Everything one sweep does. ``device`` is ``cuda`` or ``cpu``."""

    recipe_name: str
    device: str
    cells: tuple[Cell, ...]
    skips: tuple[Skip, ...]
    notes: tuple[str, ...] = ()
