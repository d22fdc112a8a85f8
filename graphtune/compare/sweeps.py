"""Compares two stored sweeps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphtune.compare.growth import graph_growth
from graphtune.compare.model import Change, Comparison, Kind, Side
from graphtune.compare.observation import TIMES, observe
from graphtune.compare.rows import compare_observations
from graphtune.compare.thresholds import Thresholds
from graphtune.errors import InputError
from graphtune.results import CellResult
from graphtune.stats import Time
from graphtune.store import CELLS_FILE, Sweep, read_sweep

ALLOWED = ("device", "driver", "model")
"""What two sweeps must share unless told otherwise."""

ALONE = (
    "one process on each side, so nothing shows how far processes disagree: sweep with --rounds 3 or more on both sides"
)
READINGS = ("clock_mhz_before", "clock_mhz_after", "throttle_reasons", "other_processes", "launch_cost_us")
"""Fields of an environment that are measured, so they differ from process to process."""
OF_SIDES = ("device_name", "driver", "commit")
"""Fields that are told with each side."""


def read_comparable(path: Path) -> Sweep:
    """The sweep in a folder. InputError where it cannot be read whole (naming file and line) or holds no result."""
    sweep = read_sweep(path)
    file = Path(path) / CELLS_FILE
    if sweep.damaged_lines:
        number = sweep.damaged_lines[0]
        fault = next((note for note in sweep.notes if f"{CELLS_FILE}:{number}:" in note), "")
        raise InputError(
            f"damaged line{fault.partition('left out')[2]}",
            where=f"{file}:{number}",
            action="Restore the file, or remove the line and run the same sweep again: it measures what is missing.",
        )
    if not any(cell.points or cell.captured_lists for cell in sweep.cells):
        raise InputError("holds no result to compare", where=str(file), action="Run `graphtune sweep` to its end.")
    return sweep


def compare_sweeps(
    base: Sweep,
    new: Sweep,
    thresholds: Thresholds | None = None,
    *,
    allow: Collection[str] = (),
    times: Sequence[Time] = TIMES,
) -> Comparison:
    """Compare what both sweeps measured.

    Raises InputError when device, driver or model differ and ``allow`` does not name the difference.
    """
    thresholds = thresholds or Thresholds()
    allowed = _differences(base, new, allow)
    on_gpu = "cuda" in (base.device, new.device)
    floors: dict[Kind, float] = {"memory": thresholds.memory_floor_bytes} if on_gpu else {}
    found = compare_observations(
        observe(base.cells, times), observe(new.cells, times), thresholds, floors=floors, alone=ALONE
    )
    return Comparison(
        base=_side(base),
        new=_side(new),
        confidence=thresholds.confidence,
        tested=found.tested,
        rows=found.rows,
        changes=(*allowed, *_environment_changes(base.cells, new.cells)),
        growth=graph_growth(base.cells, new.cells),
        notes=_notes(base, new),
        flagged=found.flagged,
        ignored=found.ignored,
    )


def _side(sweep: Sweep) -> Side:
    processes = {int(cell.cell.get("process", 1)) for cell in sweep.cells if cell.points or cell.captured_lists}
    drivers = sorted(_facts(sweep)["driver"])
    return Side(
        path=str(sweep.path),
        recipe_name=sweep.recipe_name,
        model_name=sweep.model_name,
        device_name=" and ".join(sorted(_facts(sweep)["device"])),
        driver=" and ".join(drivers) if drivers else None,
        date=(sweep.finished_at or sweep.started_at)[:10],
        processes=len(processes),
        commit=" and ".join(sorted(_facts(sweep)["commit"])) or None,
    )


def _facts(sweep: Sweep) -> dict[str, set[str]]:
    environments = [cell.environment for cell in sweep.cells if cell.environment is not None]
    return {
        "device": {environment.device_name for environment in environments} or {sweep.device_name},
        "driver": {environment.driver for environment in environments if environment.driver is not None},
        "model": {_model_text(cell) for cell in sweep.cells},
        "commit": {environment.commit for environment in environments if environment.commit is not None},
    }


def _model_text(cell: CellResult) -> str:
    return json.dumps(_model(cell), sort_keys=True)


def _model(cell: CellResult) -> dict[str, Any]:
    """What of a cell decides how much there is to compute; a name decides nothing."""
    asked = cell.cell
    facts = {name: asked.get(name) for name in ("dtype", "shard")}
    facts["load"] = "random" if asked.get("weights") is None else "safetensors"
    facts |= {f"config.{key}": value for key, value in (asked.get("model_config") or {}).items()}
    return facts


def _differences(base: Sweep, new: Sweep, allow: Collection[str]) -> tuple[Change, ...]:
    """Device, driver and model where they differ; InputError unless each is allowed."""
    before, after = _facts(base), _facts(new)
    found = []
    for name in ALLOWED:
        if before[name] == after[name]:
            continue
        if name == "model":
            changes = _model_changes(base, new)
        else:
            changes = [
                Change(name, " and ".join(sorted(before[name])) or "none", " and ".join(sorted(after[name])) or "none")
            ]
        if name not in allow:
            told = "; ".join(f"{change.what} {change.base} against {change.new}" for change in changes[:4])
            raise InputError(
                f"the sweeps are of different {name}s: {told}",
                where=f"{base.path} and {new.path}",
                action=f"Compare sweeps of one {name}, or add --allow {name}.",
            )
        found += changes
    return tuple(found)


def _model_changes(base: Sweep, new: Sweep) -> list[Change]:
    named = [Change("name", base.model_name, new.model_name)] if base.model_name != new.model_name else []
    sides: list[dict[str, set[str]]] = []
    for sweep in (base, new):
        values: dict[str, set[str]] = defaultdict(set)
        for cell in sweep.cells:
            for key, value in _model(cell).items():
                values[key].add(json.dumps(value, sort_keys=True).strip('"'))
        sides.append(values)
    keys = [key for key in {**sides[0], **sides[1]} if sides[0].get(key) != sides[1].get(key)]
    return named + [
        Change(key.replace("_", " "), *(" and ".join(sorted(side.get(key, {"not set"}))) for side in sides))
        for key in keys
    ]


def _environment_changes(base: Sequence[CellResult], new: Sequence[CellResult]) -> tuple[Change, ...]:
    """Software and kernels that differ; device and driver are told apart elsewhere."""
    sides: list[dict[str, set[str]]] = []
    for cells in (base, new):
        values: dict[str, set[str]] = defaultdict(set)
        for cell in cells:
            facts = asdict(cell.environment) if cell.environment is not None else {}
            facts = {key: value for key, value in facts.items() if key not in (*READINGS, *OF_SIDES)}
            if cell.model is not None:
                facts |= {key: getattr(cell.model, key) for key in ("attention_kernels", "layer_kernels")}
            for key, value in facts.items():
                if value is not None:
                    values[key].add(_plain(value))
        sides.append(values)
    keys = [key for key in {**sides[0], **sides[1]} if sides[0].get(key) != sides[1].get(key)]
    return tuple(
        Change(key.replace("_", " "), *(" and ".join(sorted(side.get(key, {"not known"}))) for side in sides))
        for key in keys
    )


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _notes(base: Sweep, new: Sweep) -> tuple[str, ...]:
    notes = []
    for side, sweep in (("baseline", base), ("candidate", new)):
        if sweep.finished_at is None:
            notes.append(f"the {side} is not finished: {sweep.path}")
        notes += [f"{side}: {note}" for note in sweep.notes if "torn" in note]
        failed = [cell for cell in sweep.cells if cell.status != "ok"]
        notes += [f"{side}: cell {cell.cell_id} {cell.status}: {cell.reason}" for cell in failed]
    if base.device == "cpu" or new.device == "cpu":
        notes.append("a CPU sweep checks the machinery: its times are no advice")
    return tuple(notes)
