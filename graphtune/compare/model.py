"""What a comparison holds. Plain frozen data: exporters turn it into text and know nothing of sweeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

SCHEMA = 1

Kind = Literal["time", "capture", "memory"]
Verdict = Literal["faster", "slower", "smaller", "larger", "same", "undecided", "missing"]
FailOn = Literal["slower", "memory", "any", "none"]

KINDS: tuple[Kind, ...] = ("time", "capture", "memory")
UNITS: dict[Kind, str] = {"time": "us", "capture": "s", "memory": "bytes"}
VERDICTS: tuple[Verdict, ...] = ("slower", "larger", "faster", "smaller", "same", "undecided", "missing")
PURPOSES = ("main", "joint first", "joint second", "memory")
"""What lists that are compared were captured for. Controls are not compared: they run alone in a process, which other
captures do not."""
WORSE: tuple[Verdict, ...] = ("slower", "larger")
BETTER: tuple[Verdict, ...] = ("faster", "smaller")


@dataclass(frozen=True)
class What:
    """What a row measured; two sweeps are matched by equality of this.

    Points (kind ``time``) carry sizes, context and execution, those of prefill the number of requests too; captured
    lists carry their sizes and settings; figures of the loaded model (weights, workspace) carry neither. The name of a
    list is no part of it: its sizes are. ``purpose`` tells how a list was captured: ``main`` (first in its process or
    after others were torn down), ``joint first`` and ``joint second`` (into one pool with the other phase's) or
    ``memory`` (for its bytes alone).
    """

    kind: Kind
    phase: str
    quantity: str
    attention: str
    page_size: int
    execution: str | None = None
    raw_size: int | None = None
    padded_size: int | None = None
    context_tokens: int | None = None
    backend: str | None = None
    sizes: tuple[int, ...] = ()
    order: str | None = None
    output: str | None = None
    workspace: str | None = None
    requests: int | None = None
    purpose: str = "main"

    @property
    def group(self) -> str:
        """The rows whose noise is pooled: one phase, execution and quantity."""
        return " ".join(part for part in (self.phase, self.execution, self.quantity) if part)

    @property
    def sort_key(self) -> tuple[int | str, ...]:
        """Times first, then by group, backend, context, requests and size."""
        place = (KINDS.index(self.kind), self.group, PURPOSES.index(self.purpose), self.backend or "")
        sizes = (self.raw_size or 0, len(self.sizes), self.sizes[-1] if self.sizes else 0)
        return (*place, self.context_tokens or 0, self.requests or 0, *sizes)


@dataclass(frozen=True)
class Row:
    """One thing measured in both sweeps, or in one of them (``missing``).

    ``base`` and ``new`` are geometric means over processes, of each process's median for times. ``ratio`` is new over
    base; ``low`` and ``high`` bound it at the confidence of the whole comparison, corrected for the number of rows.
    ``flagged`` counts readings left out because their samples carry a flag.
    """

    what: What
    name: str
    base: float | None
    new: float | None
    base_processes: int
    new_processes: int
    base_flagged: int
    new_flagged: int
    ratio: float | None
    low: float | None
    high: float | None
    tolerance: float
    verdict: Verdict
    reason: str | None = None

    @property
    def worse(self) -> bool:
        return self.verdict in WORSE

    @property
    def lost(self) -> bool:
        """Measured in the baseline, not in the candidate."""
        return self.verdict == "missing" and self.base is not None


@dataclass(frozen=True)
class Side:
    """One of the two sweeps, or logs. ``commit`` is that of the code under test, where it is known. A log states no
    recipe and no device (empty); its ``model_name`` is the engine's name and version, its ``processes`` are starts."""

    path: str
    recipe_name: str
    model_name: str
    device_name: str
    driver: str | None
    date: str
    processes: int
    commit: str | None = None


class Change(NamedTuple):
    """Something about the two sides that differs and may be the cause."""

    what: str
    base: str
    new: str


class Mean(NamedTuple):
    """Geometric mean of the ratios of one group over ``rows`` rows."""

    group: str
    rows: int
    ratio: float


@dataclass(frozen=True)
class Comparison:
    """Rows with verdicts, and what else differs between the two sweeps, or server logs.

    ``tested`` rows share the error probability ``1 - confidence``. ``growth`` says how graphs differ in nodes, launches
    or kernels; ``flagged`` counts readings left out, ``ignored`` rows that the thresholds leave out.
    """

    base: Side
    new: Side
    confidence: float
    tested: int
    rows: tuple[Row, ...]
    changes: tuple[Change, ...] = ()
    growth: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    flagged: int = 0
    ignored: int = 0
    compared: Literal["sweeps", "logs"] = "sweeps"

    @property
    def unit(self) -> str:
        """What counts once: a process of a sweep, or a server's start in a log."""
        return "process" if self.compared == "sweeps" else "start"

    @property
    def method(self) -> str:
        """How intervals came about, in one sentence."""
        each, units = "geometric mean over starts", "starts"
        if self.compared == "sweeps":
            each, units = "median per process, geometric mean over processes", "processes"
        return (
            f"The {self.unit} is the unit: {each}, variance between {units} pooled over the rows of a phase, "
            "execution and quantity (Student's t). Intervals hold for all "
            f"{self.tested} tested rows together with {self.confidence:.0%} (Bonferroni)."
        )

    @property
    def counts(self) -> dict[Verdict, int]:
        """Rows by verdict, in the order of ``VERDICTS``; verdicts without rows are left out."""
        found = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in VERDICTS}
        return {verdict: count for verdict, count in found.items() if count}

    @property
    def quiet(self) -> bool:
        """True when every row is the same and nothing else differs."""
        return not self.changes and not self.growth and all(row.verdict == "same" for row in self.rows)

    def findings(self, fail_on: FailOn) -> tuple[Row, ...]:
        """Rows for which ``fail_on`` asks to fail. ``slower`` covers step and capture times, ``memory`` bytes, ``any``
        both and what the candidate did not measure."""
        if fail_on == "none":
            return ()
        kinds: Sequence[Kind] = KINDS if fail_on == "any" else ("memory",) if fail_on == "memory" else KINDS[:2]
        return tuple(
            row for row in self.rows if row.what.kind in kinds and (row.worse or (fail_on == "any" and row.lost))
        )

    def worst(self, count: int = 5) -> tuple[Row, ...]:
        """Rows above their tolerance: those called worse first, then by ratio."""
        above = [row for row in self.rows if row.ratio is not None and row.ratio > 1 + row.tolerance]
        return tuple(sorted(above, key=lambda row: (not row.worse, -(row.ratio or 0.0)))[:count])

    def means(self) -> tuple[Mean, ...]:
        """Geometric mean of the ratios of every group, in row order."""
        logs: dict[str, list[float]] = {}
        for row in self.rows:
            if row.ratio is not None:
                logs.setdefault(row.what.group, []).append(math.log(row.ratio))
        return tuple(Mean(group, len(some), math.exp(math.fsum(some) / len(some))) for group, some in logs.items())
