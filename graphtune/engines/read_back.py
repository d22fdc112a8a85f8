"""Flags read back as the engine reads them: what it would still change of a plan, in requests."""

from __future__ import annotations

from graphtune.engines.resolution import PhaseRun, Resolution
from graphtune.results import Phase


def warnings(asked: dict[Phase, tuple[int, ...]], resolution: Resolution) -> tuple[str, ...]:
    """One sentence for each size that would be dropped or moved, and for each phase left without full cover.

    ``asked`` are the sizes of the plan per phase; where one list serves both phases they are the same.
    """
    found = [f"the engine refuses this: {refusal.message}" for refusal in resolution.refusals]
    for run in resolution.phases:
        sizes = asked.get(run.phase)
        if not sizes:
            continue
        if not run.graphs:
            found.append(f"{_name(run)} runs without graphs")
            continue
        if not run.shared:
            lost = [size for size in sizes if size not in run.effective.sizes]
            new = [size for size in run.effective.sizes if size not in sizes]
            if lost or new:
                reasons = "; ".join(dict.fromkeys(change.reason for change in run.effective.altered))
                moved = f"{_list(lost)} dropped or moved" if lost else "none dropped"
                added = f", {_list(new)} captured instead" if new else ""
                found.append(f"{_name(run)}: {moved}{added} ({reasons})")
        uncovered = _uncovered(run, sizes)
        if uncovered:
            found.append(uncovered)
    return tuple(dict.fromkeys(found))


def _uncovered(run: PhaseRun, sizes: tuple[int, ...]) -> str | None:
    """Requests that the plan's largest size was to serve and that no graph serves."""
    if run.phase != "decode":
        return None
    wanted = max(sizes) // run.effective.width if run.effective.unit == "tokens" else max(sizes)
    if run.reach.most is not None:
        wanted = min(wanted, run.reach.most)
    covered = max(run.top, run.rest_top or 0)
    if covered >= wanted:
        return None
    return f"{_name(run)}: covers {covered} of {wanted} requests, {wanted - covered} left without a graph"


def _name(run: PhaseRun) -> str:
    return f"{run.phase} (runner {run.runner})" if run.runner else run.phase


def _list(sizes: list[int]) -> str:
    shown = ", ".join(str(size) for size in sizes[:6])
    return f"{shown} and {len(sizes) - 6} more" if len(sizes) > 6 else shown
