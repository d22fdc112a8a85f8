"""Figures of a comparison as people read them, the same in every output."""

from __future__ import annotations

import re

from graphtune.compare.model import Comparison, Kind, Row
from graphtune.units import format_bytes, format_duration_s, format_us


def value_text(kind: Kind, value: float | None) -> str:
    """A figure with its unit; an en dash where there is none."""
    if value is None:
        return "–"
    if kind == "time":
        return format_us(value)
    return format_bytes(round(value)) if kind == "memory" else format_duration_s(value)


def ratio_text(ratio: float | None) -> str:
    """Three decimals near one, fewer far from it."""
    if ratio is None:
        return "–"
    if ratio >= 1000:
        return ">1000"
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.0f}"


def interval_text(row: Row) -> str:
    """The corrected interval of a row's ratio."""
    return "–" if row.low is None or row.high is None else f"{ratio_text(row.low)}–{ratio_text(row.high)}"


def headline(comparison: Comparison) -> str:
    """Verdicts counted in one phrase: ``3 slower, 1 larger, 12 same``."""
    return ", ".join(f"{count} {verdict}" for verdict, count in comparison.counts.items()) or "nothing in common"


def title(comparison: Comparison) -> str:
    """What was compared."""
    base, new = comparison.base, comparison.new
    same_model, same_device = base.model_name == new.model_name, base.device_name == new.device_name
    model = new.model_name if same_model else f"{base.model_name} against {new.model_name}"
    device = new.device_name if same_device else f"{base.device_name} against {new.device_name}"
    return f"{model} on {device}" if device else model


def side_text(comparison: Comparison, *, base: bool) -> str:
    """Path, date, number of processes or starts, and commit of a side."""
    side = comparison.base if base else comparison.new
    plural = "" if side.processes == 1 else "es" if comparison.unit.endswith("s") else "s"
    commit = f", commit {short_commit(side.commit)}" if side.commit else ""
    return f"{side.path} ({side.date}, {side.processes} {comparison.unit}{plural}{commit})"


def short_commit(name: str) -> str:
    """Hashes cut to twelve digits; other names as they are."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b", r"\1", name)


def omissions(comparison: Comparison) -> str | None:
    """What was left out, in one phrase."""
    parts = []
    if comparison.flagged:
        parts.append(f"{comparison.flagged} flagged readings left out")
    if comparison.ignored:
        parts.append(f"{comparison.ignored} rows ignored by the thresholds")
    return "; ".join(parts) or None
