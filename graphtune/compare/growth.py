"""Why a graph grew: nodes, launches and kernel names that differ, where a sweep stores them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphtune.results import CapturedList, CellResult

_Setting = tuple[str, str, tuple[int, ...], str, str, str]


def graph_growth(base: Sequence[CellResult], new: Sequence[CellResult]) -> tuple[str, ...]:
    """One sentence per captured list and per profiled size that differs, equal ones once; empty where nothing does."""
    return tuple(dict.fromkeys((*_nodes(base, new), *_launches(base, new))))


def _nodes(base: Sequence[CellResult], new: Sequence[CellResult]) -> Iterable[str]:
    before, after = _first_lists(base), _first_lists(new)
    for key, of in before.items():
        other = after.get(key)
        if other is None:
            continue
        old = {capture.size: capture.nodes for capture in of.captures if capture.nodes is not None}
        now = {capture.size: capture.nodes for capture in other.captures if capture.nodes is not None}
        shared = sorted(old.keys() & now.keys())
        grown = [size for size in shared if old[size] != now[size]]
        if not grown:
            continue
        steps = {(old[size], now[size]) for size in grown}
        counts = f"{old[grown[0]]} to {now[grown[0]]}" if len(steps) == 1 else _span(steps)
        where = f"at all {len(shared)} sizes" if grown == shared else f"at {len(grown)} of {len(shared)} sizes"
        yield f"{of.list.phase} list {of.list.name}: nodes per graph went from {counts} {where}"


def _span(steps: set[tuple[int, int]]) -> str:
    old, now = [a for a, _ in steps], [b for _, b in steps]
    before, after = (f"{min(some)}–{max(some)}" if len(set(some)) > 1 else f"{some[0]}" for some in (old, now))
    return f"{before} to {after}"


def _first_lists(cells: Sequence[CellResult]) -> dict[_Setting, CapturedList]:
    found: dict[_Setting, CapturedList] = {}
    for cell in cells:
        for of in cell.captured_lists:
            if of.status == "ok":
                one = of.list
                key = (one.phase, one.backend, one.sizes, one.order, one.output, one.workspace)
                found.setdefault(key, of)
    return found


def _launches(base: Sequence[CellResult], new: Sequence[CellResult]) -> Iterable[str]:
    before, after = _first_profiles(base), _first_profiles(new)
    for key, launches in before.items():
        now = after.get(key)
        if now is not None and now != launches:
            size, context, execution = key
            yield f"{execution} step of {size} at {context}: kernel launches went from {launches} to {now}"


def _first_profiles(cells: Sequence[CellResult]) -> dict[tuple[int, int, str], int]:
    found: dict[tuple[int, int, str], int] = {}
    for cell in cells:
        for profile in cell.launch_profiles:
            found.setdefault((profile.size, profile.context_tokens, profile.execution), profile.launches)
    return found
