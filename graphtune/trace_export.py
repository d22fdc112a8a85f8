"""Stored timelines in the Trace Event Format, which Perfetto and Chrome's tracing page open.

One process row per stored step, with its host calls and its kernels as two threads. Times are in µs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from graphtune.errors import InputError
from graphtune.results import CellResult, Timeline
from graphtune.store import Sweep, write_atomically

HOST, DEVICE = 1, 2
"""Thread numbers of a step's two rows."""


def write_trace(sweep: Sweep, path: Path) -> None:
    """Write every timeline of the sweep. Raises InputError when it holds none."""
    events = trace_events(sweep.cells)
    if not events:
        raise InputError(
            "holds no timeline of a step",
            where=str(sweep.path),
            action="Sweep on a GPU with this version; a timeline is stored with the smallest profiled size.",
        )
    about = {"model": sweep.model_name, "device": sweep.device_name, "recipe": sweep.recipe_name}
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    write_atomically(path, json.dumps(content, separators=(",", ":")) + "\n")


def trace_events(cells: Iterable[CellResult]) -> list[dict[str, Any]]:
    """The events of all timelines, named rows first for each."""
    events: list[dict[str, Any]] = []
    stored = [(cell, line) for cell in cells for line in cell.timelines]
    for number, (cell, line) in enumerate(stored, start=1):
        process = cell.cell.get("process", 1)
        execution = "replay" if line.execution == "graph" else line.execution
        unit = ("token" if line.phase == "prefill" else "request") + ("s" if line.size > 1 else "")
        title = f"{line.phase}, {line.size} {unit}, {line.context_tokens} KV tokens, {execution}, process {process}"
        events.append(_named("process_name", title, number))
        events += [_named("thread_name", "host calls", number, HOST), _named("thread_name", "kernels", number, DEVICE)]
        events += _spans(line, number)
    return events


def _named(what: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _spans(line: Timeline, process: int) -> Iterator[dict[str, Any]]:
    for start, length in zip(line.call_starts_us, line.call_lengths_us, strict=True):
        yield {"name": "launch", "ph": "X", "ts": start, "dur": length, "pid": process, "tid": HOST}
    for at, start, length in zip(line.kernels, line.starts_us, line.lengths_us, strict=True):
        yield {"name": line.names[at], "ph": "X", "ts": start, "dur": length, "pid": process, "tid": DEVICE}
