"""Bytes and seconds of capture lists: as measured, else as predicted from their sizes, else by bound.

The driver keeps the memory of destroyed executables, so the bytes outside torch of a list that was not the first of its
process are composed: those of the first list with the same sizes. A list that was not measured is predicted where the
sweep captured every size alone (``memory_prediction``); where it did not, its bytes are known only as at most those of
a measured list that contains it.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from graphtune.results import CapturedList, CaptureList, CellResult, Phase
from graphtune.tune.memory_prediction import MemoryPredictor, memory_predictor, setting_of

Provenance = Literal["measured", "composed", "predicted", "bound"]

PREDICTED = "predicted"
"""Name of a list that was not measured."""


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
    """One list over all processes that captured it whole.

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
    """What capturing some sizes costs, under the setting that takes the fewest bytes.

    ``graph_bytes`` is the most measured, ``interval`` the least and the most; a prediction has the interval in which
    it is expected, a bound has none. ``activation_peak_bytes`` is what capturing needs on top of what it keeps.
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
    """All lists of one phase that a sweep captured whole, the control measurements among them, and the predictor.

    ``size_seconds`` is how long each size took to capture; ``evidence`` names the cells that predictions rest on.
    ``adjust`` turns what the sweep says into what a certain server needs.
    """

    lists: tuple[MeasuredList, ...]
    controls: tuple[ControlDifference, ...]
    predictor: MemoryPredictor | None = None
    size_seconds: Mapping[int, float] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    adjust: Callable[[GraphCost], GraphCost] | None = None

    def cost(self, sizes: tuple[int, ...], *, checked: bool = True) -> GraphCost | None:
        """The cost of capturing exactly ``sizes``; None when no measured list contains them and none predicts them.

        ``checked`` asks that the gate was green at every one of them under the list's setting. A list that was measured
        itself counts before a prediction, and that before a list that only contains the sizes.
        """
        found = self._swept_cost(sizes, checked)
        return found if found is None or self.adjust is None else self.adjust(found)

    def _swept_cost(self, sizes: tuple[int, ...], checked: bool) -> GraphCost | None:
        holding = [
            measured
            for measured in self.lists
            if (measured.serves(sizes) if checked else set(sizes) <= set(measured.list.sizes))
        ]
        exact = [measured for measured in holding if measured.list.sizes == sizes]
        if not exact and (predicted := self._predicted(sizes, checked)) is not None:
            return predicted
        if not holding:
            return None
        return _cost(min(exact or holding, key=lambda m: (m.largest_bytes, len(m.list.sizes))), sizes)

    def _predicted(self, sizes: tuple[int, ...], checked: bool) -> GraphCost | None:
        """The prediction under the setting of ``cheapest``."""
        like = self.cheapest
        if self.predictor is None or like is None or not sizes or (checked and not set(sizes) <= self._passed(like)):
            return None
        of = replace(like, name=PREDICTED, sizes=sizes)
        prediction = self.predictor.predict(of)
        if prediction is None:
            return None
        seconds = [self.size_seconds.get(size) for size in sizes]
        return GraphCost(
            of=of,
            provenance="predicted",
            graph_bytes=prediction.graph_bytes,
            interval=prediction.interval,
            capture_peak_bytes=prediction.peak_bytes,
            activation_peak_bytes=prediction.peak_bytes - prediction.graph_bytes,
            capture_s=None if None in seconds else round(sum(one for one in seconds if one is not None), 6),
            cell_ids=self.evidence,
        )

    @property
    def cheapest(self) -> CaptureList | None:
        """The list of fewest bytes among those of the sizes that were captured under most settings."""
        settings = Counter(measured.list.sizes for measured in self.lists)
        ranked = sorted(
            self.lists, key=lambda m: (-settings[m.list.sizes], -len(m.list.sizes), m.list.sizes, m.largest_bytes)
        )
        return ranked[0].list if ranked else None

    def _passed(self, like: CaptureList) -> frozenset[int]:
        """Sizes that passed the gate in some list of this setting, and failed in none."""
        same = [m for m in self.lists if setting_of(m.list) == setting_of(like)]
        passed = {size for measured in same for size in measured.passed}
        return frozenset(passed - {size for measured in same for size in measured.failed})

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


def memory_model(
    cells: Iterable[CellResult],
    phase: Phase = "decode",
    backend: str | None = None,
    predictor: MemoryPredictor | None = None,
) -> MemoryModel:
    """Read the captured lists of one phase, and one backend if named, of a sweep.

    Lists that failed or lack their bytes are left out, and so are those that were captured for memory alone or beside
    another list: predictions stand on the former. ``predictor`` is that of the same cells, where it is there already.
    """
    cells = tuple(cells)
    found: dict[ListKey, list[tuple[CellResult, CapturedList]]] = defaultdict(list)
    for cell in cells:
        for captured in cell.captured_lists if cell.purpose in ("main", "control") else ():
            asked = captured.list.phase == phase and backend in (None, captured.list.backend)
            if asked and captured.status == "ok" and captured.graph_bytes is not None:
                found[key_of(captured.list)].append((cell, captured))
    lists = tuple(_measured(pairs) for pairs in found.values())
    captured_lists = [of for pairs in found.values() for _, of in pairs]
    return MemoryModel(
        lists,
        tuple(filter(None, map(_control, found.values()))),
        predictor or memory_predictor(cells),
        _size_seconds(captured_lists),
        tuple(cell.cell_id for cell in cells if cell.purpose == "memory" and cell.captured_lists),
    )


def _size_seconds(captured_lists: Iterable[CapturedList]) -> dict[int, float]:
    """Median seconds of capturing each size."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for of in captured_lists:
        for capture in of.captures:
            parts = (capture.warmup_s, capture.record_s, capture.instantiate_s)
            if capture.status == "ok" and None not in parts:
                seconds[capture.size].append(sum(part for part in parts if part is not None))
    return {size: statistics.median(samples) for size, samples in seconds.items()}


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


def context_bytes(cell: CellResult) -> int | None:
    """Device bytes once everything ran eagerly that are not weights, KV pool, workspace or static buffers: context,
    modules, libraries and their workspaces, tables of the model, and what an allocator adds by rounding.

    Taken at the eager warm-up, before any graph; None where the device was not read (a CPU, a failed cell).
    """
    of = cell.model
    mark = next((mark for mark in cell.ledger.marks if mark.stage == "eager_warmup"), None) if cell.ledger else None
    if of is None or mark is None or mark.free_delta_bytes is None:
        return None
    return mark.free_delta_bytes - of.weights_bytes - of.kv_pool_bytes - of.workspace_bytes - of.static_buffer_bytes
