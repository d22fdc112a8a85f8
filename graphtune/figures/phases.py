"""The part of a sweep that a figure is about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from graphtune.results import CellResult, Phase


def of_phase(cells: Iterable[CellResult], phase: Phase) -> tuple[CellResult, ...]:
    """The cells with only what they captured and timed in one phase.

    Left out are cells that captured for memory alone, or lists of both phases into one pool.
    """
    return tuple(
        replace(
            cell,
            captured_lists=tuple(of for of in cell.captured_lists if of.list.phase == phase),
            points=tuple(point for point in cell.points if point.phase == phase),
            launch_profiles=tuple(one for one in cell.launch_profiles if one.phase == phase),
            timelines=tuple(line for line in cell.timelines if line.phase == phase),
        )
        for cell in cells
        if cell.purpose in ("main", "control")
    )
