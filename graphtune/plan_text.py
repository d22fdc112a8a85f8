"""A plan as text for people: what each process captures and times, and about how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from graphtune.plan import Cell, Plan
from graphtune.results import CaptureList
from graphtune.terminal import wrapped
from graphtune.units import format_bytes, format_duration_s

INDENT = "    "


def describe(cell: Cell) -> str:
    """One line for a person: what the process captures and times."""
    if cell.purpose == "memory":
        alone = sum(len(one.sizes) == 1 for one in cell.lists)
        kind = f"{cell.lists[0].phase}{_backend(cell.lists[0])}"
        return f"memory of {kind}: {alone} sizes alone and {len(cell.lists) - alone} random lists"
    names = ", ".join(dict.fromkeys(_name(one) for one in cell.lists))
    captures = sum(len(one.sizes) for one in cell.lists)
    points = sum(len(at.sizes) * len(at.executions) for at in cell.latency)
    points += sum(len(at.tokens) * len(at.executions) for at in cell.prefill_latency)
    purpose = f"process {cell.process}" if cell.purpose == "main" else cell.purpose
    settings = "" if len(cell.lists) < 2 else " in one pool" if cell.purpose == "joint" else _settings_count(cell.lists)
    timed = f", {points} step times" if points else ""
    return f"{purpose}: {names}{settings}, {captures} captures{timed}"


def _settings_count(lists: tuple[CaptureList, ...]) -> str:
    return f" under {len({_setting(one) for one in lists})} settings"


def _name(one: CaptureList) -> str:
    return one.name if one.phase == "decode" else f"{one.phase}{_backend(one)} {one.name}"


def _backend(one: CaptureList) -> str:
    """The backend in words, where the phase has another one that is usual."""
    return "" if one.backend == {"decode": "full", "prefill": "breakable"}[one.phase] else f" {one.backend}"


def plan_lines(
    plan: Plan,
    model_name: str,
    device_name: str,
    folder: str,
    expected_s: Callable[[Cell], float],
    expected_bytes: Callable[[Cell], int],
) -> list[str]:
    """The plan for a terminal, with expected seconds and bytes of each process."""
    lines = wrapped(f"{model_name} on {device_name}, to {folder}", following=INDENT)
    total_s = 0.0
    for number, cell in enumerate(plan.cells, start=1):
        seconds = expected_s(cell)
        total_s += seconds
        lines += wrapped(f"[{number}/{len(plan.cells)}] {describe(cell)}", following=INDENT)
        lines += wrapped(f"about {format_duration_s(seconds)}, {format_bytes(expected_bytes(cell))}; {cell.id}", INDENT)
        if cell.purpose != "memory":
            lines += _list_lines(cell.lists)
        for at in cell.latency:
            text = f"context {at.context_tokens}: {len(at.sizes)} sizes, {' and '.join(at.executions)}"
            if padded := sum(len(one.buckets) for one in at.padded):
                text += f"; {padded} padded replays"
            lines += wrapped(text, INDENT)
        for prefill in cell.prefill_latency:
            requests = f"{prefill.requests} request{'s' if prefill.requests > 1 else ''}"
            prefix = f" after {prefill.prefix_tokens} cached tokens" if prefill.prefix_tokens else ""
            text = f"prefill of {requests}{prefix}: {len(prefill.tokens)} sizes, {' and '.join(prefill.executions)}"
            lines += wrapped(text, INDENT)
    whole = f"{len(plan.cells)} processes, about {total_s / 60:.1f} minutes."
    return [*lines, *wrapped(f"{whole} Expected figures are estimates.")]


def _list_lines(lists: Iterable[CaptureList]) -> list[str]:
    """A line per list; settings of equal lists stand together."""
    settings: dict[tuple[str, str, str, tuple[int, ...]], list[str]] = {}
    for one in lists:
        settings.setdefault((one.name, one.phase, one.backend, one.sizes), []).append(_setting(one))
    lines = []
    for (name, phase, backend, sizes), some in settings.items():
        unit = "" if phase == "decode" else f" {phase} tokens"
        how = "" if backend == "full" else f", {backend}"
        several = f"{len(sizes)} sizes {sizes[0]}…{sizes[-1]}" if len(sizes) > 1 else f"size {sizes[0]}"
        lines += wrapped(f"{name}: {several}{unit}{how}, {'; '.join(some)}", INDENT, 2 * INDENT)
    return lines


def _setting(one: CaptureList) -> str:
    """Order and sharing in words."""
    output, workspace = (sharing.replace("_", " ") for sharing in (one.output, one.workspace))
    if output == workspace:
        return f"{one.order}, output and workspace {output}"
    return f"{one.order}, output {output}, workspace {workspace}"
