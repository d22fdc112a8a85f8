"""The GPU's memory as it is divided, the ledger of a process, and how graph memory grows over captures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import Column, Drawing, Key, Role, Table, color, drawing, quiet_grid
from graphtune.results import CapturedList, CaptureList, CellResult, MemoryLedger
from graphtune.tune.memory_model import MemoryModel
from graphtune.tune.recommendation import Recommendation
from graphtune.tune.recommendation_text import NAMES
from graphtune.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def mib(size_bytes: float | None) -> str:
    """A table cell in MiB: one decimal, more where that would say too little."""
    if size_bytes is None:
        return "–"
    size = size_bytes / MIB
    if abs(size) >= 10 or size == 0:
        return f"{size:,.1f}"
    return f"{size:.2f}" if abs(size) >= 0.1 else f"{size:.2g}"


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


def draw_ledger(stages: Sequence[LedgerStage], ledger: MemoryLedger) -> Drawing:
    """The whole as one bar, and beside it the part that weights and KV cache would hide."""
    parts = ledger_parts(stages)
    small = [part for part in parts if part.label not in LARGE_PARTS]

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
        whole, rest = figure.subplots(2, 1)
        letters = 46 if narrow else 130
        bar(whole, parts, GIB, letters)
        bar(rest, small, MIB, letters)
        whole.set_title("everything, GiB")
        rest.set_title("without weights and KV cache, MiB")

    second = {
        "nvml_process": "the process's bytes from NVML",
        "nvml_device": "the growth of the device's used bytes from NVML (this machine hides a process's own bytes)",
        "none": "no second reading",
    }[ledger.second_reading]
    apart = "not known" if ledger.disagreement_bytes is None else format_bytes(ledger.disagreement_bytes)
    unexplained = "not known" if ledger.unexplained_bytes is None else format_bytes(ledger.unexplained_bytes)
    says = (
        "Device memory of the process that timed steps, with its first list captured, by the interval in which it "
        f"grew. Each mark is read twice: by the fall of free bytes, and by {second}. The readings differ by {apart} at "
        f"most; {unexplained} have no listed cause."
    )
    columns = ("torch", "graph pool", "outside torch", "free-bytes reading", "second reading")
    rows = tuple(
        (
            stage.name,
            mib(stage.torch_bytes),
            mib(stage.pool_bytes),
            mib(stage.outside_bytes),
            mib(stage.free_reading_bytes),
            mib(stage.second_reading_bytes),
        )
        for stage in stages
    )
    table = Table((Column("stage", numeric=False), *(Column(f"{name}, MiB") for name in columns)), rows)
    keys = [Key(part.label, part.role, "box") for part in parts]
    return drawing("ledger", "Memory ledger", says, draw, table, keys, (230, 240))


@dataclass(frozen=True)
class Growth:
    """Graph memory after each capture of one list under one setting."""

    setting: str
    sizes: tuple[int, ...]
    total_bytes: tuple[int, ...]


def growths(cells: Iterable[CellResult]) -> tuple[str, tuple[Growth, ...]] | None:
    """Growth curves of the list that was captured under the most settings, with its name; None without captures."""
    by_list: dict[tuple[int, ...], dict[str, CapturedList]] = {}
    names: dict[tuple[int, ...], str] = {}
    for cell in cells:
        for captured in cell.captured_lists:
            if captured.status == "ok" and captured.captures:
                of = captured.list
                by_list.setdefault(of.sizes, {}).setdefault(setting_words(of), captured)
                names.setdefault(of.sizes, of.name)
    if not by_list:
        return None
    sizes = max(by_list, key=lambda key: (len(by_list[key]), len(key)))
    curves = []
    for setting, captured in by_list[sizes].items():
        total, totals = 0, []
        for capture in captured.captures:
            total += capture.retained_bytes or 0
            totals.append(total)
        curves.append(Growth(setting, tuple(capture.size for capture in captured.captures), tuple(totals)))
    return names[sizes], tuple(sorted(curves, key=lambda curve: curve.total_bytes[-1]))


def setting_words(of: CaptureList) -> str:
    """``output shared, workspace shared, descending``, shortened where both are the same."""
    shared = of.output.replace("_", " ")
    if of.output == of.workspace:
        return f"both {shared}, {of.order}"
    return f"output {shared}, workspace {of.workspace.replace('_', ' ')}, {of.order}"


def draw_growths(name: str, curves: Sequence[Growth]) -> Drawing:
    roles = dict(zip((curve.setting for curve in curves), SETTING_ROLES, strict=False))
    small = max(curve.total_bytes[-1] for curve in curves) < MIB
    unit, word = (KIB, "KiB") if small else (MIB, "MiB")

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes)
        for curve in curves:
            at = range(1, len(curve.sizes) + 1)
            axes.plot(at, [size / unit for size in curve.total_bytes], color=color(roles.get(curve.setting, "muted")))
        axes.set_xlim(1, max(2, max(len(curve.sizes) for curve in curves)))
        axes.set_ylim(0)
        axes.set_xlabel("captures done")
        axes.set_ylabel(f"graph memory, {word}")

    count = max(len(curve.sizes) for curve in curves)
    rows = []
    for index in range(count):
        cells = []
        for curve in curves:
            known = index < len(curve.sizes)
            cells += [f"{curve.sizes[index]}", mib(curve.total_bytes[index])] if known else ["–", "–"]
        rows.append((f"{index + 1}", *cells))
    titles = [title for curve in curves for title in (f"size ({curve.setting})", f"total, MiB ({curve.setting})")]
    table = Table((Column("captures done"), *(Column(title) for title in titles)), tuple(rows))
    keys = [Key(curve.setting, roles.get(curve.setting, "muted")) for curve in curves]
    says = (
        f"Device bytes that the list “{name}” holds after each capture. Shared output and workspace, captured from "
        "large to small, let later graphs reuse what the first one needed; a curve that keeps climbing pays for every "
        "size again."
    )
    return drawing("graph-growth", "Graph memory over captures", says, draw, table, keys, (320, 300))


def list_totals(memory: MemoryModel) -> Table:
    """Bytes and seconds of every list that was captured whole."""
    columns = (
        Column("list", numeric=False),
        Column("setting", numeric=False),
        Column("graphs"),
        Column("graph memory, MiB, most of all processes"),
        Column("peak while capturing, MiB"),
        Column("per graph, MiB, mean"),
        Column("capture, s, mean of processes"),
        Column("processes"),
    )
    rows = []
    for one in sorted(memory.lists, key=lambda one: (one.list.name, one.largest_bytes)):
        count = len(one.list.sizes)
        rows.append(
            (
                one.list.name,
                setting_words(one.list),
                f"{count}",
                mib(one.largest_bytes),
                mib(max(one.peak_bytes, default=None)),
                mib(one.largest_bytes / count),
                f"{sum(one.capture_s) / len(one.capture_s):.2f}" if one.capture_s else "–",
                f"{len(one.graph_bytes)}",
            )
        )
    return Table(columns, tuple(rows))


def control_table(memory: MemoryModel) -> Table | None:
    """Lists measured again alone, with the difference; None without controls."""
    if not memory.controls:
        return None
    columns = (
        Column("list", numeric=False),
        Column("setting", numeric=False),
        Column("with others, MiB"),
        Column("alone, MiB"),
        Column("difference, MiB"),
    )
    rows = tuple(
        (
            one.list.name,
            setting_words(one.list),
            mib(one.shared_bytes),
            mib(one.alone_bytes),
            ("+" if one.difference_bytes > 0 else "") + mib(one.difference_bytes),
        )
        for one in memory.controls
    )
    return Table(columns, rows)


def first_ledger(cells: Iterable[CellResult]) -> tuple[MemoryLedger, tuple[LedgerStage, ...]] | None:
    """The ledger of the process that timed steps, where the device was read."""
    for cell in sorted(cells, key=lambda cell: -len(cell.points)):
        if cell.ledger is not None and ledger_parts(stages := ledger_stages(cell.ledger)):
            return cell.ledger, stages
    return None
