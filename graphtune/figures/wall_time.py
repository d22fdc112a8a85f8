"""Where the wall time of a sweep went, process by process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import Column, Drawing, Key, Role, Table, color, drawing, quiet_grid
from graphtune.results import CellResult
from graphtune.units import format_duration_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOTAL, FIRST = "total", "first_measurement"
"""Seconds since the start of the process, not parts of it."""

PARTS: tuple[tuple[str, Role, tuple[str, ...]], ...] = (
    ("start and imports", "c7", ("start", "import", "import_torch", "context", "import_worker")),
    ("weights, KV cache, buffers", "c6", ("load", "weights", "kv_cache", "workspace", "buffers")),
    ("eager warm-up", "c5", ("warm_up", "eager_warmup")),
    ("capture", "c2", ("capture",)),
    ("gate", "c3", ("gate",)),
    ("timing steps", "c1", ("latency",)),
    ("counting launches", "c4", ("profile",)),
)
REST = "ledger readings, tear-down and the rest"


@dataclass(frozen=True)
class WallTime:
    """Seconds of one process by part; ``first_s`` is when it began to capture. The parts add up to the total."""

    label: str
    parts: dict[str, float]
    first_s: float | None

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())


def wall_times(cells: Iterable[CellResult]) -> tuple[WallTime, ...]:
    """One per process that stored its seconds, in the order in which they ran."""
    found = []
    for cell in cells:
        if not cell.phase_seconds:
            continue
        parts = dict.fromkeys((label for label, _, _ in PARTS), 0.0)
        other = 0.0
        for name, seconds in cell.phase_seconds.items():
            if name in (TOTAL, FIRST):
                continue
            label = next((label for label, _, names in PARTS if name in names or name.split("_")[0] in names), None)
            if label is None:
                other += seconds
            else:
                parts[label] += seconds
        known = sum(parts.values()) + other
        parts[REST] = max(0.0, cell.phase_seconds.get(TOTAL, known) - known) + other
        found.append(WallTime(_label(cell), parts, cell.phase_seconds.get(FIRST)))
    return tuple(found)


def _label(cell: CellResult) -> str:
    if cell.purpose == "memory":
        return f"sizes alone and random lists, {cell.cell.get('phase')} · memory"
    names = list(dict.fromkeys(of.list.name for of in cell.captured_lists)) or ["no list"]
    role = "control" if cell.purpose == "control" else f"process {cell.cell.get('process', 1)}"
    return f"{', '.join(names[:2])}{' …' if len(names) > 2 else ''} · {role}"


def draw_wall_times(data: Sequence[WallTime]) -> Drawing:
    roles: dict[str, Role] = {label: role for label, role, _ in PARTS} | {REST: "soft"}

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes, "x")
        for row, one in enumerate(data):
            left = 0.0
            for label, seconds in one.parts.items():
                axes.barh(row, seconds, 0.64, left=left, color=color(roles[label]))
                left += seconds
        axes.set_yticks(range(len(data)), [one.label for one in data], fontsize=10 if narrow else 12)
        axes.set_ylim(len(data) - 0.5, -0.5)
        axes.set_xlabel("seconds")

    total = sum(one.total_s for one in data)
    by_part = {label: sum(one.parts[label] for one in data) for label in roles}
    most = sorted(by_part.items(), key=lambda pair: -pair[1])[:3]
    firsts = [one.first_s for one in data if one.first_s is not None]
    says = (
        f"Every row is one process. All of them ran for {format_duration_s(total)}, most of it "
        + ", ".join(f"{label} ({format_duration_s(seconds)})" for label, seconds in most if seconds)
        + "."
    )
    if firsts:
        says += f" A process takes up to {format_duration_s(max(firsts))} to its first measurement."
    columns = (Column("process", numeric=False), *(Column(f"{label}, s") for label in roles), Column("total, s"))
    rows = tuple((one.label, *(f"{one.parts[label]:.2f}" for label in roles), f"{one.total_s:.2f}") for one in data)
    keys = [Key(label, role, "box") for label, role in roles.items() if by_part[label] > 0]
    height = 76 + 26 * len(data)
    return drawing("wall-time", "Wall time", says, draw, Table(columns, rows), keys, (height, height))
