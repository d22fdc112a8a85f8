"""How far the processes of a sweep agree, time by time, and how many medians were disturbed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from graphtune.figures.base import Column, NamedTable, Table
from graphtune.figures.phases import of_phase
from graphtune.results import CellResult, Execution, Phase
from graphtune.stats import Time, differences, disturbances, nine_of_ten

SHOWN: tuple[tuple[str, Time, Execution], ...] = (
    ("replay, gpu_us", "gpu_us", "graph"),
    ("replay, overlapped step", "overlap_us", "graph"),
    ("replay, step_us", "step_us", "graph"),
    ("eager, step_us", "step_us", "eager"),
)


def table(cells: Sequence[CellResult]) -> NamedTable | None:
    """None where no point was measured by two processes."""
    rows = [*_rows(of_phase(cells, "decode"), "decode"), *_rows(of_phase(cells, "prefill"), "prefill")]
    if not rows:
        return None
    columns = (
        Column("time", numeric=False),
        Column("points"),
        Column("median difference"),
        Column("nine of ten below"),
        Column("largest"),
        Column("medians disturbed"),
        Column("of them left out"),
    )
    says = (
        "Difference of the processes' medians at the same point, relative to their mean, over points that two of them "
        "measured undisturbed. Times with host work in them move with whatever else the machine does, mostly for all "
        "lists alike: lists are compared within one process."
    )
    return NamedTable("How far the processes agree", says, Table(columns, tuple(rows)))


def _rows(cells: Sequence[CellResult], phase: Phase) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for label, time, execution in SHOWN:
        apart = differences(cells, time, execution)
        flagged = disturbances(cells, time, execution)
        if not apart:
            continue
        rows.append(
            (
                f"{phase} {label}",
                f"{len(apart)}",
                f"{statistics.median(apart):.1%}",
                f"{nine_of_ten(apart):.1%}",
                f"{apart[-1]:.1%}",
                f"{flagged.disturbed} of {flagged.medians}",
                f"{flagged.disturbed - flagged.used}",
            )
        )
    return rows
