"""What a sweep measured, one value per process: the input of a comparison and of a baseline's table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from graphtune.compare.model import What
from graphtune.results import CapturedList, CellResult, Point, Samples
from graphtune.stats import Time, median_us

TIMES: tuple[Time, ...] = ("step_us", "gpu_us")
"""Compared unless asked otherwise: what a server pays per step, and the device's part of it."""
LIST_BYTES = ("graph_bytes", "peak_bytes")
JOINT = ("joint first", "joint second")
WORDS = {
    "joint first": "before the other phase in one pool",
    "joint second": "after the other phase in one pool",
    "memory": "for memory alone",
}
MODEL_BYTES = ("weights_bytes", "workspace_bytes", "static_buffer_bytes")


@dataclass
class Observation:
    """Values of one thing by process number. ``flagged`` counts readings left out; ``failure`` says why one is lacking.

    ``label`` is the name of the captured list, for lists.
    """

    by_process: dict[int, float] = field(default_factory=dict)
    flagged: int = 0
    failure: str | None = None
    label: str = ""


def observe(cells: Iterable[CellResult], times: Sequence[Time] = TIMES) -> dict[What, Observation]:
    """Everything comparable that the cells measured.

    Times are medians of a point's samples; samples that carry a flag are left out and counted. Cells of one process
    number that measured the same thing are averaged. Control captures are left out.
    """
    found: dict[What, Observation] = defaultdict(Observation)
    values: dict[What, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if cell.purpose == "control":
            continue
        process = int(cell.cell.get("process", 1))
        for what, value, flagged, failure, label in _readings(cell, times):
            seen = found[what]
            seen.label = seen.label or label
            seen.flagged += flagged
            seen.failure = seen.failure or failure
            if value is not None:
                values[what][process].append(value)
    for what, by_process in values.items():
        found[what].by_process = {process: fmean(some) for process, some in sorted(by_process.items())}
    return dict(found)


_Reading = tuple[What, float | None, bool, str | None, str]


def _readings(cell: CellResult, times: Sequence[Time]) -> Iterator[_Reading]:
    attention, page = str(cell.cell.get("attention", "")), int(cell.cell.get("page_size", 0))
    phase = str(cell.cell.get("phase", "decode"))
    for point in cell.points:
        yield from _point(point, page, times)
    purpose = cell.purpose
    for of in cell.captured_lists:
        yield from _list(of, attention, page, JOINT[of.position_in_process > 1] if purpose == "joint" else purpose)
    if cell.model is not None and purpose == "main":
        for name in MODEL_BYTES:
            yield What("memory", phase, name, attention, page), float(getattr(cell.model, name)), False, None, ""


def _point(point: Point, page: int, times: Sequence[Time]) -> Iterator[_Reading]:
    for time in times:
        what = What(
            "time",
            point.phase,
            time,
            point.attention,
            page,
            execution=point.execution,
            raw_size=point.raw_size,
            padded_size=point.padded_size,
            context_tokens=point.context_tokens,
            backend=point.backend,
            requests=point.requests,
        )
        samples: Samples | None = getattr(point, time)
        if point.status != "ok":
            yield what, None, False, point.reason or point.status, ""
        elif samples is not None and samples.us:
            flagged = bool(samples.flags)
            yield what, None if flagged else median_us(samples), flagged, None, ""


def _list(of: CapturedList, attention: str, page: int, purpose: str) -> Iterator[_Reading]:
    """Bytes and seconds of a list. Where its bytes outside torch are unknown, as of lists that come later in a process,
    torch's part stands in; lists that were captured for their memory alone have no other figure."""
    of_list = ("torch_bytes" if of.graph_bytes is None and of.torch_bytes is not None else "graph_bytes",)
    for quantity in of_list if purpose == "memory" else (*of_list, *LIST_BYTES[1:], "capture_s"):
        what = What(
            "capture" if quantity == "capture_s" else "memory",
            of.list.phase,
            quantity,
            attention,
            page,
            backend=of.list.backend,
            sizes=of.list.sizes,
            order=of.list.order,
            output=of.list.output,
            workspace=of.list.workspace,
            purpose=purpose,
        )
        if of.status != "ok":
            yield what, None, False, of.reason or of.status, of.list.name
            continue
        value = getattr(of, quantity)
        flagged = quantity == "capture_s" and value is not None and bool(of.flags)
        yield what, None if value is None or flagged else float(value), flagged, None, of.list.name


def names(things: Sequence[tuple[What, str]]) -> list[str]:
    """A short name for each thing and its list's name; settings are named where they vary."""
    several_attentions = len({what.attention for what, _ in things}) > 1
    several_pages = len({what.page_size for what, _ in things}) > 1
    settings = {(what.order, what.output, what.workspace) for what, _ in things if what.order}
    backends = {(what.phase, what.backend) for what, _ in things if what.backend not in (None, "eager")}
    split = {phase for phase, _ in backends if sum(other == phase for other, _ in backends) > 1}

    def name(what: What, label: str) -> str:
        parts = [what.group]
        if what.raw_size is not None:
            padded = "" if what.raw_size == what.padded_size else f" in {what.padded_size}"
            noun = "token" if what.phase == "prefill" else "request"
            noun += "s" if (what.padded_size or 0) != 1 else ""
            several = f" of {what.requests} requests" if (what.requests or 1) > 1 else ""
            parts.append(f"{what.raw_size}{padded} {noun}{several} at {what.context_tokens}")
        if what.sizes:
            words = [label, f"{len(what.sizes)} to {what.sizes[-1]}"]
            if len(settings) > 1:
                words += [f"{what.order}", f"{_short(what.output)}/{_short(what.workspace)}"]
            parts.append(" ".join(words))
        parts += [what.backend] if what.backend not in (None, "eager") and what.phase in split else []
        parts += [] if what.purpose == "main" else [WORDS[what.purpose]]
        parts += [what.attention] if several_attentions else []
        parts += [f"page {what.page_size}"] if several_pages else []
        return ", ".join(parts)

    return [name(what, label) for what, label in things]


def _short(sharing: str | None) -> str:
    return {"shared": "shared", "per_size": "per size"}.get(sharing or "", "–")
