"""What a launch comes to: per phase the list that is captured, the batches that are reachable, and the mode."""

from __future__ import annotations

from dataclasses import dataclass

from graphtune.engines.base import Edit, Padding, Unit
from graphtune.engines.options import Refusal
from graphtune.engines.rules import Change, EffectiveList, GraphCount
from graphtune.results import Phase


@dataclass(frozen=True)
class Reach:
    """The largest batch the settings allow: requests for decode, tokens for prefill. ``stated`` when the user set it,
    else it is the engine's default; ``most`` is None when the settings do not tell, and ``text`` says why."""

    most: int | None
    unit: Unit
    stated: bool
    text: str


@dataclass(frozen=True)
class PhaseRun:
    """One phase under one runner (None: all of them).

    ``asked`` are the sizes the user listed; ``chosen`` is True when the user set the list or its largest size.
    ``shared``: the list also serves mixed batches, and the run of those judges its sizes. ``changes`` are what lint
    reports of what the engine alters. Decode batches above the largest graph, up to ``rest_top`` requests, replay
    graphs of mixed batches, whose mode is ``rest_mode``.
    """

    phase: Phase
    graphs: bool
    effective: EffectiveList
    reach: Reach
    padding: Padding
    count: GraphCount
    asked: tuple[int, ...] | None = None
    chosen: bool = False
    cap_factor: float | None = None
    runner: str | None = None
    shared: bool = False
    changes: tuple[Change, ...] = ()
    rest_top: int | None = None
    rest_mode: str | None = None

    @property
    def top(self) -> int:
        """Largest batch with a graph, in the unit of ``reach``."""
        if not self.graphs:
            return 0
        return self.effective.top_requests if self.phase == "decode" else max(self.effective.sizes, default=0)

    @property
    def reach_in_sizes(self) -> int | None:
        """``reach`` in the unit of the sizes."""
        if self.reach.most is None or self.effective.unit == self.reach.unit:
            return self.reach.most
        return self.reach.most * self.effective.width


@dataclass(frozen=True)
class ModeRun:
    """What was asked and what runs, where the two differ."""

    phase: str
    asked: str
    runs: str
    reason: str
    explicit: bool
    runner: str | None = None


@dataclass(frozen=True)
class Note:
    """A risk the settings carry, with the option that causes it and the edit that would mend it."""

    message: str
    where: str | None = None
    mend: Edit | None = None


@dataclass(frozen=True)
class Resolution:
    """Everything lint looks at. ``assumptions`` are facts that the launch did not tell. ``parsed`` is False when the
    engine's parser already stops, so that the rest describes a launch that never happens. ``ranks`` are those of tensor
    parallelism."""

    phases: tuple[PhaseRun, ...] = ()
    modes: tuple[ModeRun, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    risks: tuple[Note, ...] = ()
    assumptions: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    parsed: bool = True
    ranks: int = 1
