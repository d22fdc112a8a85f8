"""The ledger of one process: device memory by cause, each moment read twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import Column, Drawing, Key, Role, Table, color, drawing, mib, quiet_grid
from graphtune.results import CellResult, MemoryLedger
from graphtune.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LedgerStage:
    """Device bytes at one mark, divided by owner, and both readings of the whole."""

    name: str
    torch_bytes: int
    pool_bytes: int
    outside_bytes: int
    free_reading_bytes: int
    second_reading_bytes: int | None


def ledger_stages(ledger: MemoryLedger) -> tuple[LedgerStage, ...]:
    """The marks of a process up to its first list torn down; of the captures only the first and the last."""
    stages = []
    captures = [mark for mark in ledger.marks if mark.stage == "capture" and mark.list_index in (0, None)]
    for mark in ledger.marks:
        if mark.free_delta_bytes is None or mark.torch_reserved_bytes is None or (mark.list_index or 0) > 0:
            continue
        name = mark.stage.replace("_", " ")
        if mark.stage == "capture":
            if mark not in (captures[0], captures[-1]):
                continue
            name = f"capture {mark.size}"
        second = mark.nvml_process_bytes if ledger.second_reading == "nvml_process" else mark.nvml_device_bytes
        stages.append(
            LedgerStage(
                name,
                mark.torch_reserved_bytes - mark.pool_bytes,
                mark.pool_bytes,
                mark.free_delta_bytes - mark.torch_reserved_bytes,
                mark.free_delta_bytes,
                second,
            )
        )
    return tuple(stages)


@dataclass(frozen=True)
class LedgerPart:
    """Bytes that one cause holds once a list is captured."""

    label: str
    role: Role
    size_bytes: int


LEDGER_PARTS: dict[str, tuple[str, Role]] = {
    "context": ("context", "c7"),
    "weights": ("weights", "c1"),
    "kv cache": ("KV cache", "c3"),
    "workspace": ("workspace", "c6"),
    "buffers": ("static buffers", "c5"),
    "eager warmup": ("loaded by eager warm-up", "c4"),
}
LARGE_PARTS = ("weights", "KV cache")


def ledger_parts(stages: Sequence[LedgerStage]) -> tuple[LedgerPart, ...]:
    """Growth of the device's bytes in each interval up to the first captured list, graphs split by owner.

    Empty when the marks do not reach a captured list.
    """
    by_name = {stage.name: stage for stage in stages}
    last = by_name.get("captured")
    warm = by_name.get("eager warmup")
    if last is None or warm is None:
        return ()
    parts, before = [], 0
    for name, (label, role) in LEDGER_PARTS.items():
        if name in by_name:
            parts.append(LedgerPart(label, role, by_name[name].free_reading_bytes - before))
            before = by_name[name].free_reading_bytes
    executables = last.free_reading_bytes - before - (last.pool_bytes - warm.pool_bytes)
    parts.append(LedgerPart("graph pool", "c2", last.pool_bytes - warm.pool_bytes))
    parts.append(LedgerPart("graph executables, outside torch", "soft", executables))
    return tuple(parts)


SECOND: dict[str, str] = {
    "nvml_process": "the process's bytes from NVML",
    "nvml_device": "the growth of the device's used bytes from NVML (this machine hides a process's own bytes)",
    "none": "no second reading",
}


def draw_ledger(stages: Sequence[LedgerStage], ledger: MemoryLedger) -> Drawing:
    """The whole as one bar, and below it the part that weights and KV cache would hide."""
    parts = ledger_parts(stages)
    small = [part for part in parts if part.label not in LARGE_PARTS]
    captured = next(stage for stage in stages if stage.name == "captured")

    def bar(axes: Axes, shown: Sequence[LedgerPart], unit: int, letters: int) -> None:
        quiet_grid(axes, "x")
        total = sum(max(part.size_bytes, 0) for part in shown)
        left = 0.0
        for part in shown:
            width = max(part.size_bytes, 0) / unit
            axes.barh(0, width, 0.6, left=left, color=color(part.role), edgecolor=color("page"), linewidth=0.6)
            text = format_bytes(part.size_bytes)
            if letters * width * unit > len(text) * total:
                ink = color("ink" if part.role == "soft" else "page")
                axes.text(left + width / 2, 0, text, ha="center", va="center", color=ink, fontsize=12)
            left += width
        axes.set_yticks([])
        axes.set_xlim(0, left)

    def draw(figure: Figure, narrow: bool) -> None:
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        whole, rest = figure.subplots(2, 1)
        layout = figure.get_layout_engine()
        assert isinstance(layout, ConstrainedLayoutEngine)
        layout.set(hspace=0.12)
        letters = 46 if narrow else 130
        bar(whole, parts, GIB, letters)
        bar(rest, small, MIB, letters)
        whole.set_title("everything, GiB")
        rest.set_title("without weights and KV cache, MiB")

    apart = "not known" if ledger.disagreement_bytes is None else format_bytes(ledger.disagreement_bytes)
    unexplained = "not known" if ledger.unexplained_bytes is None else format_bytes(ledger.unexplained_bytes)
    readings = f"{format_bytes(captured.free_reading_bytes)} by the fall of free bytes"
    if captured.second_reading_bytes is not None:
        readings += f", {format_bytes(captured.second_reading_bytes)} by {SECOND[ledger.second_reading]}"
    says = (
        "Device memory of the process that timed steps, with its first list captured, by the stage in which it grew. "
        f"Each mark is read twice, this one as {readings}; over all marks the two differ by {apart} at most. "
        f"Unexplained, that is growth while nothing listed happened, plus that difference: {unexplained}."
    )
    columns = ("torch", "graph pool", "outside torch", "free-bytes reading", "second reading", "difference")
    rows = tuple(
        (
            stage.name,
            mib(stage.torch_bytes),
            mib(stage.pool_bytes),
            mib(stage.outside_bytes),
            mib(stage.free_reading_bytes),
            mib(stage.second_reading_bytes),
            mib(None if stage.second_reading_bytes is None else stage.free_reading_bytes - stage.second_reading_bytes),
        )
        for stage in stages
    )
    table = Table((Column("stage", numeric=False), *(Column(f"{name}, MiB") for name in columns)), rows)
    keys = [Key(part.label, part.role, "box") for part in parts]
    return drawing("ledger", "Memory ledger", says, draw, table, keys, (260, 270))


def first_ledger(cells: Iterable[CellResult]) -> tuple[MemoryLedger, tuple[LedgerStage, ...]] | None:
    """The ledger of the process that timed steps, where the device was read."""
    for cell in sorted(cells, key=lambda cell: -len(cell.points)):
        if cell.ledger is not None and ledger_parts(stages := ledger_stages(cell.ledger)):
            return cell.ledger, stages
    return None
