"""The GPU's memory as it is divided, and how graph memory grows over captures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import (
    Column,
    Drawing,
    Key,
    Role,
    Table,
    color,
    drawing,
    mib,
    quiet_grid,
    setting_words,
)
from graphtune.results import CapturedList, CellResult, Phase
from graphtune.tune.recommendation import Recommendation
from graphtune.tune.recommendation_text import NAMES
from graphtune.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TERMS: tuple[tuple[str, str, Role], ...] = (
    ("weights_bytes", "weights", "c1"),
    ("context_bytes", "context and libraries", "c7"),
    ("workspace_bytes", "workspace", "c6"),
    ("static_buffer_bytes", "static buffers", "c5"),
    ("activation_peak_bytes", "activation peak", "c4"),
    ("graph_bytes", "graphs", "c2"),
    ("reserve_bytes", "engine's reserve", "soft"),
    ("kv_bytes", "KV cache", "c3"),
)
BAR_LETTERS = 112
"""Letters that fit a whole bar on a wide page."""
SETTING_ROLES: tuple[Role, ...] = ("c1", "c2", "c3", "c4", "c5", "c6")


@dataclass(frozen=True)
class Division:
    """One engine's budget as (term, bytes); null bytes are not known."""

    engine: str
    terms: tuple[tuple[str, int | None], ...]
    total_bytes: int


def divisions(answer: Recommendation) -> tuple[Division, ...]:
    """Budgets of the recommended lists; engines without one are left out."""
    found = []
    for one in answer.engines:
        if one.memory is not None and one.decode is not None:
            terms = tuple((label, getattr(one.memory, name)) for name, label, _ in TERMS)
            found.append(Division(NAMES[one.engine], terms, one.memory.cuda_total_bytes))
    return tuple(found)


def draw_divisions(data: Sequence[Division]) -> Drawing:
    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes, "x")
        for row, division in enumerate(data):
            left = 0.0
            for (label, size), (_, _, role) in zip(division.terms, TERMS, strict=True):
                width = (size or 0) / GIB
                axes.barh(row, width, 0.58, left=left, color=color(role), edgecolor=color("page"), linewidth=0.6)
                text = f"{label.split()[-1] if role == 'soft' else label} {format_bytes(size or 0)}"
                if not narrow and width * GIB * BAR_LETTERS > len(text) * division.total_bytes:
                    ink = color("ink" if role == "soft" else "page")
                    axes.text(left + width / 2, row, text, ha="center", va="center", color=ink, fontsize=12)
                left += width
        axes.set_yticks(range(len(data)), [division.engine for division in data])
        axes.tick_params(axis="y", labelcolor=color("ink"))
        axes.set_ylim(len(data) - 0.5, -0.5)
        axes.set_xlim(0, max(division.total_bytes for division in data) / GIB)
        axes.set_xlabel("GiB of the device")

    columns = (Column("term", numeric=False), *(Column(f"{division.engine}, bytes") for division in data))
    rows = [
        (label, *("not measured" if (size := division.terms[index][1]) is None else f"{size:,}" for division in data))
        for index, (_, label, _) in enumerate(TERMS)
    ]
    rows.append(("total for a process", *(f"{division.total_bytes:,}" for division in data)))
    shares = {
        f"{format_bytes(size)} ({size / division.total_bytes:.2%})"
        for division in data
        for label, size in division.terms
        if label == "graphs" and size is not None
    }
    says = (
        "What a process has of the card, divided by each engine's rule with the recommended list captured. Graphs take "
        f"{' or '.join(sorted(shares))}; what they take is not there for the KV cache."
    )
    keys = [Key(label, role, "box") for _, label, role in TERMS]
    height = 90 + 62 * len(data)
    return drawing("gpu-memory", "GPU memory", says, draw, Table(columns, tuple(rows)), keys, (height, height))


@dataclass(frozen=True)
class Growth:
    """Graph memory after each capture of one list under one setting, and the peak up to then.

    ``kept_bytes`` are those of executables that the driver had kept from an earlier list of the process: the readings
    do not show them. A peak is null where none was sampled.
    """

    setting: str
    sizes: tuple[int, ...]
    total_bytes: tuple[int, ...]
    peak_bytes: tuple[int | None, ...]
    kept_bytes: int


def growths(cells: Iterable[CellResult]) -> tuple[str, tuple[Growth, ...]] | None:
    """Growth curves of the list that was captured under the most settings, with its name; None without captures."""
    by_list: dict[tuple[int, ...], dict[str, CapturedList]] = {}
    names: dict[tuple[int, ...], str] = {}
    for cell in cells:
        for captured in cell.captured_lists:
            if captured.status == "ok" and captured.captures:
                of = captured.list
                settings = by_list.setdefault(of.sizes, {})
                seen = settings.setdefault(setting_words(of), captured)
                if seen.outside_source == "composed" and captured.outside_source == "measured":
                    settings[setting_words(of)] = captured
                names.setdefault(of.sizes, of.name)
    if not by_list:
        return None
    sizes = max(by_list, key=lambda key: (len(by_list[key]), len(key)))
    curves = [_growth(setting, captured) for setting, captured in by_list[sizes].items()]
    return names[sizes], tuple(sorted(curves, key=lambda curve: curve.total_bytes[-1]))


def _growth(setting: str, of: CapturedList) -> Growth:
    totals = itertools.accumulate(capture.retained_bytes or 0 for capture in of.captures)
    peaks: list[int | None] = []
    for capture in of.captures:
        known = [peak for peak in (*peaks[-1:], capture.peak_bytes) if peak is not None]
        peaks.append(max(known, default=None))
    kept = (of.outside_torch_bytes or 0) if of.outside_source == "composed" else 0
    return Growth(setting, tuple(capture.size for capture in of.captures), tuple(totals), tuple(peaks), kept)


def draw_growths(name: str, curves: Sequence[Growth], phase: Phase = "decode") -> Drawing:
    roles = dict(zip((curve.setting for curve in curves), SETTING_ROLES, strict=False))
    small = max(curve.total_bytes[-1] for curve in curves) < MIB
    unit, word = (KIB, "KiB") if small else (MIB, "MiB")

    def draw(figure: Figure, narrow: bool) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        quiet_grid(axes)
        for curve in curves:
            at = range(1, len(curve.sizes) + 1)
            role = roles.get(curve.setting, "muted")
            axes.plot(at, [size / unit for size in curve.total_bytes], color=color(role))
            peaks = [(n, peak / unit) for n, peak in zip(at, curve.peak_bytes, strict=True) if peak is not None]
            if peaks:
                axes.plot(*zip(*peaks, strict=True), color=color(role), linewidth=1.2, linestyle=(0, (1, 2)))
        axes.set_xlim(1, max(2, max(len(curve.sizes) for curve in curves)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0)
        axes.set_xlabel("captures done")
        axes.set_ylabel(f"graph memory, {word}")

    rows = []
    for index in range(max(len(curve.sizes) for curve in curves)):
        cells = []
        for curve in curves:
            known = index < len(curve.sizes)
            values = (curve.total_bytes[index], curve.peak_bytes[index]) if known else (None, None)
            cells += [f"{curve.sizes[index]}" if known else "–", *map(mib, values)]
        rows.append((f"{index + 1}", *cells))
    titles = [f"{what} ({curve.setting})" for curve in curves for what in ("size", "retained, MiB", "peak so far, MiB")]
    table = Table((Column("captures done"), *map(Column, titles)), tuple(rows))
    keys = [Key(curve.setting, roles.get(curve.setting, "muted")) for curve in curves]
    says = (
        f"Device bytes that the {phase} list “{name}” retains after each capture (line), and the peak while "
        "capturing up to then (dotted), which must be free when the server starts. Shared output and workspace, "
        "captured from large to small, let later graphs reuse what the first one needed; a curve that keeps climbing "
        "pays for every size again."
    )
    if kept := max(curve.kept_bytes for curve in curves):
        says += (
            f" Lists that were not the first of their process lack {format_bytes(kept)} here: the driver had kept that "
            "much memory of destroyed executables. The table of all lists adds it."
        )
    title = f"Graph memory over {phase} captures"
    return drawing(f"graph-growth-{phase}", title, says, draw, table, keys, (320, 300))
