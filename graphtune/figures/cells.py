"""With what and where a sweep ran, cell by cell, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from graphtune.figures.base import Column, NamedTable, Table, setting_words
from graphtune.results import CellResult
from graphtune.store import Sweep
from graphtune.units import format_bytes

WRITTEN = {"nvml": "NVML", "cuda": "CUDA", "kv": "KV", "mhz": "in MHz", "us": "in µs", "flashinfer": "FlashInfer"}


def environment_tables(cells: Sequence[CellResult]) -> tuple[NamedTable, ...]:
    environment = next((cell.environment for cell in cells if cell.environment is not None), None)
    if environment is None:
        return ()
    says = "With what and where the first cell ran; clocks are read before and after its measurements."
    tables = [NamedTable("Software and device", says, _facts(asdict(environment)))]
    facts = next((cell.model for cell in cells if cell.model is not None), None)
    if facts is not None:
        tables.append(NamedTable("Model as loaded", "Sizes that the budget starts from.", _facts(asdict(facts))))
    return tuple(tables)


def _facts(of: dict[str, Any]) -> Table:
    rows = tuple((_label(name), _fact(name, value)) for name, value in of.items())
    return Table((Column("what", numeric=False), Column("value", numeric=False)), rows)


def _label(name: str) -> str:
    """A field's name in words; the value carries the unit."""
    words = [WRITTEN.get(word, word) for word in name.removesuffix("_bytes").split("_")]
    return " ".join(words)


def _fact(name: str, value: Any) -> str:
    if value is None:
        return "torch's own" if name == "allocator_settings" else "not known"
    if name.endswith("_bytes"):
        return f"{format_bytes(value)} ({value:,} bytes)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def cell_tables(sweep: Sweep) -> tuple[NamedTable, ...]:
    columns = (
        Column("cell", numeric=False),
        Column("purpose", numeric=False),
        Column("process"),
        Column("lists"),
        Column("points"),
        Column("result", numeric=False),
    )
    rows = tuple(
        (
            cell.cell_id,
            str(cell.cell.get("purpose", "main")),
            f"{cell.cell.get('process', 1)}",
            f"{len(cell.captured_lists)}",
            f"{len(cell.points)}",
            cell.status if cell.reason is None else f"{cell.status}: {cell.reason}",
        )
        for cell in sweep.cells
    )
    says = "Each cell is one process. A cell that failed costs only what it would have measured."
    tables = [NamedTable("Cells", says, Table(columns, rows))] if rows else []
    lost = [
        (cell.cell_id, setting_words(of.list), of.list.name, of.reason or of.status)
        for cell in sweep.cells
        for of in cell.captured_lists
        if of.status != "ok"
    ]
    if lost:
        head = tuple(Column(name, numeric=False) for name in ("cell", "setting", "list", "reason"))
        tables.append(
            NamedTable("Lists that were not captured whole", "Their bytes are not used.", Table(head, tuple(lost)))
        )
    if sweep.skips:
        head = (Column("left out", numeric=False), Column("reason", numeric=False))
        skipped = tuple((skip.what, skip.reason) for skip in sweep.skips)
        tables.append(
            NamedTable("Left out", "What the recipe asked for and the sweep did not measure.", Table(head, skipped))
        )
    notes = [*sweep.notes, *(f"{cell.cell_id}: {text}" for cell in sweep.cells for text in cell.warnings)]
    if notes:
        table = Table((Column("note", numeric=False),), tuple((note,) for note in notes))
        tables.append(NamedTable("Notes", "What the sweep said while it ran.", table))
    return tuple(tables)
