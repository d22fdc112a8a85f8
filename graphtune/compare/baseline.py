"""Baselines: sweeps kept in a repository, in a form whose changes can be read there."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, fields, replace
from pathlib import Path

from graphtune.compare.observation import names, observe
from graphtune.compare.sweeps import read_comparable
from graphtune.errors import InputError
from graphtune.results import SCHEMA
from graphtune.store import CELLS_FILE, RUN_FILE, Run, Sweep, encode_result, write_atomically

VALUES_FILE = "values.csv"
ATTRIBUTES_FILE = ".gitattributes"
ATTRIBUTES = f"{CELLS_FILE} -diff\n"


def update_baseline(sweep_path: Path, baseline: Path) -> Sweep:
    """Make ``baseline`` hold the sweep in ``sweep_path``; returns that sweep.

    Four files: ``run.json``; ``cells.jsonl`` with the newest result of every cell, in the order of process and id and
    without paths of logs, so that equal results give equal bytes; ``values.csv`` with one figure per line for git to
    show; ``.gitattributes``, which keeps git from showing the long lines. Raises InputError for a sweep that is
    damaged, not finished or holds failed cells: a gap in a baseline would hide a regression.
    """
    sweep = read_comparable(sweep_path)
    if sweep.finished_at is None:
        action = "Run the same `graphtune sweep` again: it measures what is missing."
        raise InputError("the sweep is not finished", where=str(sweep_path), action=action)
    failed = [cell for cell in sweep.cells if cell.status != "ok"]
    if failed:
        raise InputError(
            f"cell {failed[0].cell_id} is {failed[0].status}: {failed[0].reason}",
            where=str(sweep_path),
            action="Mend it and run `graphtune sweep … --retry-failed`, or leave it out of the recipe.",
        )
    head = Run(**{field.name: getattr(sweep, field.name) for field in fields(Run)})
    ordered = sorted(sweep.cells, key=lambda cell: (int(cell.cell.get("process", 1)), cell.cell_id))
    lines = [encode_result(replace(cell, log_path=None)) for cell in ordered]
    contents = {
        CELLS_FILE: "".join(f"{line}\n" for line in lines),
        VALUES_FILE: values_csv(sweep),
        ATTRIBUTES_FILE: ATTRIBUTES,
        RUN_FILE: json.dumps({"schema": SCHEMA, **asdict(head)}, indent=1) + "\n",
    }
    try:
        baseline.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(baseline / name, content)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(baseline)) from error
    return sweep


def values_csv(sweep: Sweep) -> str:
    """One line per measured thing and process, with the unit in the name of the quantity."""
    found = observe(sweep.cells)
    whats = sorted(found, key=lambda what: what.sort_key)
    shown = names([(what, found[what].label) for what in whats])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("what", "process", "value"))
    for what, name in zip(whats, shown, strict=True):
        for process, value in found[what].by_process.items():
            writer.writerow((name, process, f"{value:.0f}" if what.kind == "memory" else f"{value:.6g}"))
    return out.getvalue()
