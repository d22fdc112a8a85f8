"""Why a graph grew: nodes, launches and kernel names that differ, where a sweep stores them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from graphtune.results import Capture, CapturedList, CellResult, LaunchProfile

_Setting = tuple[str, str, tuple[int, ...], str, str, str]
_Step = tuple[str, str | None, int, int, str]

MOST_KERNELS = 6
"""Kernels named in one sentence, those with the most nodes gained or lost first."""
MOST_WAYS = 3
"""Sentences on one list, where its sizes differ in several ways."""
NAME_WIDTHS = (60, 120, 240)
"""A kernel's name with its template arguments can fill a page; it is cut where it still differs from the others."""


def graph_growth(base: Sequence[CellResult], new: Sequence[CellResult]) -> tuple[str, ...]:
    """One sentence per captured list and per profiled size that differs, equal ones once; empty where nothing does."""
    return tuple(dict.fromkeys((*_nodes(base, new), *_launches(base, new))))


def _nodes(base: Sequence[CellResult], new: Sequence[CellResult]) -> Iterable[str]:
    before, after = _first_lists(base), _first_lists(new)
    for key, of in before.items():
        other = after.get(key)
        if other is not None:
            yield from _list_growth(f"{of.list.phase} list {of.list.name}", of, other)


_Changes = tuple[tuple[str, int], ...]


def _list_growth(name: str, base: CapturedList, new: CapturedList) -> Iterable[str]:
    """Sentences on one list, one per set of kernels that came and went, the one at the most sizes first."""
    old = {capture.size: capture for capture in base.captures}
    now = {capture.size: capture for capture in new.captures}
    shared = [size for size in sorted(old.keys() & now.keys()) if None not in (old[size].nodes, now[size].nodes)]
    ways: dict[_Changes, list[int]] = {}
    for size in shared:
        changes = _kernel_changes(old[size], now[size])
        if changes or old[size].nodes != now[size].nodes:
            ways.setdefault(changes, []).append(size)
    for changes, sizes in sorted(ways.items(), key=lambda way: (-len(way[1]), way[1]))[:MOST_WAYS]:
        counts = {(old[size].nodes or 0, now[size].nodes or 0) for size in sizes}
        moved = {pair for pair in counts if pair[0] != pair[1]}
        what = f"nodes per graph went from {_span(moved)}" if moved else "other kernels in as many nodes"
        where = f"at all {len(shared)} sizes" if sizes == shared else f"at {len(sizes)} of {len(shared)} sizes"
        yield f"{name}: {what} {where}" + (f": {_named(changes)}" if changes else "")
    if len(ways) > MOST_WAYS:
        yield f"{name}: {len(ways) - MOST_WAYS} more ways in which its sizes differ"


def _kernel_changes(base: Capture, new: Capture) -> _Changes:
    """Nodes gained (above 0) or lost by kernel, the largest change first; empty where a side does not store them."""
    if base.kernels is None or new.kernels is None:
        return ()
    counts = Counter({kernel.name: kernel.nodes for kernel in new.kernels})
    counts.subtract({kernel.name: kernel.nodes for kernel in base.kernels})
    changed = [(name, nodes) for name, nodes in counts.items() if nodes]
    return tuple(sorted(changed, key=lambda change: (-abs(change[1]), change[0])))


def _named(changes: _Changes) -> str:
    shown = changes[:MOST_KERNELS]
    names = _shortened([name for name, _ in shown])
    told = [
        f"{abs(nodes)} {'more' if nodes > 0 else 'fewer'} {short}"
        for (_, nodes), short in zip(shown, names, strict=True)
    ]
    more = len(changes) - len(shown)
    return ", ".join([*told, f"{more} other names"] if more else told)


def _shortened(names: Sequence[str]) -> list[str]:
    """Names without return type and arguments, each cut to the first width at which all of them differ."""
    plain = [re.sub(r"^void ", "", name).partition("(")[0] for name in names]
    if len(set(plain)) < len(names):
        plain = list(names)
    for width in NAME_WIDTHS:
        cut = [name if len(name) <= width else f"{name[: width - 1]}…" for name in plain]
        if len(set(cut)) == len(names):
            return cut
    return plain


def _span(steps: set[tuple[int, int]]) -> str:
    old, now = [a for a, _ in steps], [b for _, b in steps]
    before, after = (f"{min(some)}–{max(some)}" if len(set(some)) > 1 else f"{some[0]}" for some in (old, now))
    return f"{before} to {after}"


def _first_lists(cells: Sequence[CellResult]) -> dict[_Setting, CapturedList]:
    found: dict[_Setting, CapturedList] = {}
    for cell in cells:
        for of in cell.captured_lists:
            if of.status == "ok" and cell.purpose != "memory":
                one = of.list
                key = (one.phase, one.backend, one.sizes, one.order, one.output, one.workspace)
                found.setdefault(key, of)
    return found


def _launches(base: Sequence[CellResult], new: Sequence[CellResult]) -> Iterable[str]:
    before, after = _first_profiles(base), _first_profiles(new)
    for key, was in before.items():
        now = after.get(key)
        if now is None:
            continue
        backend = f" ({was.backend})" if was.backend else ""
        name = f"{was.phase} {was.execution} step of {was.size} at {was.context_tokens}{backend}"
        for what, old, count in (
            ("kernel launches", was.launches, now.launches),
            ("segments", was.segments, now.segments),
            ("launches in the breaks between segments", was.launches_in_breaks, now.launches_in_breaks),
        ):
            if None not in (old, count) and old != count:
                yield f"{name}: {what} went from {old} to {count}"


def _first_profiles(cells: Sequence[CellResult]) -> dict[_Step, LaunchProfile]:
    found: dict[_Step, LaunchProfile] = {}
    for cell in cells:
        for one in cell.launch_profiles:
            found.setdefault((one.phase, one.backend, one.size, one.context_tokens, one.execution), one)
    return found
