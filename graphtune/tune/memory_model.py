"""Bytes and seconds of capture lists as measured, and of their prefixes by bound.

A list is captured as a whole, so the bytes of a shorter list are known only as "at most those of a measured list that
contains it". The driver keeps the memory of destroyed executables, so the bytes outside torch of a list that was not
the first of its process are composed: those of the first list with the same sizes. Nothing is fitted.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphtune.results import CapturedList, CaptureList, CellResult, MemoryLedger

Provenance = Literal["measured", "composed", "bound"]


class ListKey(NamedTuple):
    """What makes two captured lists the same list, whatever they are called."""

    backend: str
    sizes: tuple[int, ...]
    order: str
    output: str
    workspace: str


def key_of(of: CaptureList) -> ListKey:
    return ListKey(of.backend, of.sizes, of.order, of.output, of.workspace)


@dataclass(frozen=True)
class MeasuredList:
    """One decode list over all processes that captured it whole.

    ``graph_bytes`` = ``torch_bytes`` + ``outside_bytes``, one of each per process, the latter two where they were told
    apart. ``composed``: no process measured the bytes outside torch of this very list. ``passed`` and ``failed`` are
    the sizes whose outputs were checked in some process; a size that failed once is failed.
    """

    list: CaptureList
    graph_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    capture_s: tuple[float, ...]
    passed: frozenset[int]
    failed: frozenset[int]
    cell_ids: tuple[str, ...]
    torch_bytes: tuple[int, ...] = ()
    outside_bytes: tuple[int, ...] = ()
    composed: bool = False

    @property
    def largest_bytes(self) -> int:
        """The most that any process measured: a budget must hold for it."""
        return max(self.graph_bytes)

    def serves(self, sizes: Iterable[int]) -> bool:
        """True when every size is in the list, was checked and passed."""
        wanted = set(sizes)
        return wanted <= set(self.list.sizes) and wanted <= self.passed and not wanted & self.failed


@dataclass(frozen=True)
class GraphCost:
    """What capturing some sizes costs, from the measured list that contains them with the fewest bytes.

    ``graph_bytes`` is the most measured, ``interval`` the least and the most; a bound has no least.
    ``activation_peak_bytes`` is what capturing needed on top of what it kept.
    """

    of: CaptureList
    provenance: Provenance
    graph_bytes: int
    interval: tuple[int, int] | None
    capture_peak_bytes: int | None
    activation_peak_bytes: int | None
    capture_s: float | None
    cell_ids: tuple[str, ...]


@dataclass(frozen=True)
class ControlDifference:
    """A list measured again alone in a fresh process: how far its bytes are from those of the shared process."""

    list: CaptureList
    shared_bytes: int
    alone_bytes: int
    shared_composed: bool = False

    @property
    def difference_bytes(self) -> int:
        return self.alone_bytes - self.shared_bytes


@dataclass(frozen=True)
class MemoryModel:
    """All decode lists of a sweep that were captured whole, and the control measurements among them."""

    lists: tuple[MeasuredList, ...]
    controls: tuple[ControlDifference, ...]

    def cost(self, sizes: tuple[int, ...], *, checked: bool = True) -> GraphCost | None:
        """The cost of capturing exactly ``sizes``; None when no measured list contains them.

        ``checked`` asks that the gate was green at every one of them in that list. A list that was measured itself
        counts before one that only contains the sizes with as many bytes.
        """
        holding = [
            measured
            for measured in self.lists
            if (measured.serves(sizes) if checked else set(sizes) <= set(measured.list.sizes))
        ]
        if not holding:
            return None
        return _cost(min(holding, key=lambda m: (m.largest_bytes, m.list.sizes != sizes, len(m.list.sizes))), sizes)

    def failed_sizes(self) -> tuple[int, ...]:
        """Sizes whose replay differed from eager in some list."""
        return tuple(sorted({size for measured in self.lists for size in measured.failed}))


def _cost(measured: MeasuredList, sizes: tuple[int, ...]) -> GraphCost:
    whole = measured.list.sizes == sizes
    peak = max(measured.peak_bytes) if measured.peak_bytes else None
    return GraphCost(
        of=measured.list,
        provenance="bound" if not whole else "composed" if measured.composed else "measured",
        graph_bytes=measured.largest_bytes,
        interval=(min(measured.graph_bytes), measured.largest_bytes) if whole else None,
        capture_peak_bytes=peak,
        activation_peak_bytes=None if peak is None else max(0, peak - measured.largest_bytes),
        capture_s=statistics.fmean(measured.capture_s) if measured.capture_s else None,
        cell_ids=measured.cell_ids,
    )


def memory_model(cells: Iterable[CellResult]) -> MemoryModel:
    """Read the captured decode lists of a sweep. Lists that failed or lack their bytes are left out."""
    found: dict[ListKey, list[tuple[CellResult, CapturedList]]] = defaultdict(list)
    for cell in cells:
        for captured in cell.captured_lists:
            if captured.list.phase == "decode" and captured.status == "ok" and captured.graph_bytes is not None:
                found[key_of(captured.list)].append((cell, captured))
    lists = tuple(_measured(pairs) for pairs in found.values())
    return MemoryModel(lists, tuple(filter(None, map(_control, found.values()))))


def _measured(pairs: list[tuple[CellResult, CapturedList]]) -> MeasuredList:
    captured = [of for _, of in pairs]
    checks = [check for of in captured for check in of.gate]
    return MeasuredList(
        list=captured[0].list,
        graph_bytes=tuple(of.graph_bytes for of in captured if of.graph_bytes is not None),
        peak_bytes=tuple(peak for of in captured if (peak := peak_bytes(of)) is not None),
        capture_s=tuple(of.capture_s for of in captured if of.capture_s is not None),
        passed=frozenset(check.size for check in checks if check.passed),
        failed=frozenset(check.size for check in checks if not check.passed),
        cell_ids=tuple(dict.fromkeys(cell.cell_id for cell, _ in pairs)),
        torch_bytes=tuple(of.torch_bytes for of in captured if of.torch_bytes is not None),
        outside_bytes=tuple(of.outside_torch_bytes for of in captured if of.outside_torch_bytes is not None),
        composed=all(of.outside_source == "composed" for of in captured),
    )


def peak_bytes(of: CapturedList) -> int | None:
    """Device bytes at their highest while capturing. A reading taken later in a process lacks the executables' bytes
    that the driver had kept, so the composed ones are added."""
    if of.peak_bytes is None or of.outside_source != "composed":
        return of.peak_bytes
    return of.peak_bytes + (of.outside_torch_bytes or 0)


def _control(pairs: list[tuple[CellResult, CapturedList]]) -> ControlDifference | None:
    alone = [of for cell, of in pairs if cell.cell.get("purpose") == "control" and of.graph_bytes]
    shared = [of for cell, of in pairs if cell.cell.get("purpose") != "control" and of.graph_bytes]
    if not alone or not shared:
        return None
    return ControlDifference(
        pairs[0][1].list,
        max(of.graph_bytes or 0 for of in shared),
        max(of.graph_bytes or 0 for of in alone),
        shared_composed=all(of.outside_source == "composed" for of in shared),
    )


def context_bytes(ledger: MemoryLedger | None) -> int | None:
    """Device bytes that torch does not own once everything ran eagerly: context, modules and libraries.

    Taken at the eager warm-up, before any graph; None where the device was not read (a CPU, a failed cell).
    """
    for mark in ledger.marks if ledger else ():
        if mark.stage == "eager_warmup" and mark.free_delta_bytes is not None and mark.torch_reserved_bytes is not None:
            return mark.free_delta_bytes - mark.torch_reserved_bytes
    return None
