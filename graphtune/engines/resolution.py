"""What a launch comes to: per phase the list that is captured, the batches that are reachable, and the mode."""

from __future__ import annotations

from dataclasses import dataclass

from graphtune.engines.base import Padding, Unit
from graphtune.engines.options import Refusal
from graphtune.engines.rules import EffectiveList, GraphCount
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
    """One phase under one runner. ``asked`` are the sizes the user listed; None when the engine made the list.

    ``listed`` is the list before run-time rules; ``top_setting`` names the option that sets the largest size.
    """

    phase: Phase
    graphs: bool
    effective: EffectiveList
    reach: Reach
    padding: Padding
    asked: tuple[int, ...] | None = None
    cap_factor: float | None = None
    count: GraphCount | None = None
    runner: str | None = None
    note: str | None = None

    @property
    def top(self) -> int:
        """Largest batch with a graph, in the unit of ``reach``."""
        if not self.graphs:
            return 0
        return self.effective.top_requests if self.phase == "decode" else max(self.effective.sizes, default=0)


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
    """A risk the settings carry, with the option that causes it."""

    message: str
    where: str | None = None


@dataclass(frozen=True)
class Resolution:
    """Everything lint looks at. ``assumptions`` are facts that the launch did not tell."""

    phases: tuple[PhaseRun, ...] = ()
    modes: tuple[ModeRun, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    risks: tuple[Note, ...] = ()
    assumptions: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
