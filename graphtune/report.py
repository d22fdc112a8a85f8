"""The page of a sweep: one self-contained HTML file, no network, no scripts from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphtune import __version__
from graphtune.errors import Finding
from graphtune.figures import capture, latency, memory
from graphtune.figures.base import Column, Drawing, Table
from graphtune.results import CellResult, Environment
from graphtune.store import PAGE_FILE, Sweep, read_sweep, write_atomically
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.memory_model import memory_model
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation import EngineAnswer, Recommendation
from graphtune.tune.recommendation_text import NAMES, ROWS, flag_lines, traffic
from graphtune.units import format_bytes, format_duration_s

TEMPLATE = "report.html.j2"
CPU_BANNER = (
    "A check of the machinery, not advice. This sweep ran on a CPU, where replaying a recording saves no time: the "
    "figures show that capture, padding, admission and the ledger work, not what a GPU would gain."
)


@dataclass(frozen=True)
class NamedTable:
    """A table with its own heading and a sentence that says what it shows."""

    title: str
    says: str
    table: Table


@dataclass(frozen=True)
class Section:
    """A part of the page, reachable from its head."""

    slug: str
    title: str
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[NamedTable, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.drawings and not self.tables


@dataclass(frozen=True)
class EngineCard:
    """One engine's answer as shown at the head of the page.

    ``rows`` are a label and one value per column; ``flags`` are the pieces that a line may be broken between.
    """

    name: str
    version: str
    headline: str
    message: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    flags: tuple[str, ...]
    found: bool


def write_report(sweep_path: Path, out_path: Path | None = None, **options: Any) -> Path:
    """Write the page of the sweep in ``sweep_path`` and return where it is (default: report.html in that folder).

    ``options`` are fields of ``Question``. Raises InputError where the sweep cannot be read or the options make no
    sense; a sweep in which nothing was measured gets a page that says so.
    """
    sweep = read_sweep(Path(sweep_path))
    target = Path(out_path) if out_path is not None else Path(sweep_path) / PAGE_FILE
    write_atomically(target, render(sweep, Question(**options)))
    return target


def render(sweep: Sweep, question: Question | None = None) -> str:
    """The page as text."""
    from jinja2 import Environment as Templates
    from jinja2 import PackageLoader

    templates = Templates(
        loader=PackageLoader("graphtune"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template(TEMPLATE).render(**page(sweep, question or Question()))


def page(sweep: Sweep, question: Question) -> dict[str, Any]:
    """Everything that the template shows, as plain data."""
    answer, reason = _answer(sweep, question)
    on_cpu = sweep.device == "cpu"
    sections = _sections(sweep, answer)
    environment = next((cell.environment for cell in sweep.cells if cell.environment is not None), None)
    return {
        "version": __version__,
        "sweep": sweep,
        "date": (sweep.finished_at or sweep.started_at)[:10],
        "chips": _chips(sweep, environment),
        "on_cpu": on_cpu,
        "cpu_banner": CPU_BANNER,
        "answer": answer,
        "no_answer": reason,
        "traffic": traffic(answer) if answer else "",
        "cards": tuple(_card(one, "this check" if on_cpu else "recommended") for one in answer.engines)
        if answer
        else (),
        "warnings": answer.warnings if answer else (),
        "sections": tuple(section for section in sections if not section.empty),
    }


def _answer(sweep: Sweep, question: Question) -> tuple[Recommendation | None, str]:
    try:
        return recommend(sweep, question), ""
    except Finding as finding:
        return None, str(finding)


def _chips(sweep: Sweep, environment: Environment | None) -> tuple[str, ...]:
    if environment is None:
        return (f"recipe {sweep.recipe_name}",)
    parts = [f"torch {environment.torch}"]
    parts += [f"FlashInfer {environment.flashinfer}"] if environment.flashinfer else []
    parts += [f"CUDA {environment.cuda}"] if environment.cuda else []
    return (*parts, f"recipe {sweep.recipe_name}")


def _card(one: EngineAnswer, ours: str) -> EngineCard:
    shown = [(ours, one.decode), ("its default", one.default)]
    known = [(title, of) for title, of in shown if of is not None] if one.decode is not None else []
    headline = "Nothing fits"
    if one.decode is not None:
        sizes = one.decode.capture_sizes
        headline = (
            f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"Size {sizes[0]}" if sizes else ""
        )
        headline = headline or "No graphs"
    elif one.status == "partial":
        headline = "No answer"
    return EngineCard(
        name=NAMES[one.engine],
        version=one.version,
        headline=headline,
        message=one.message[:1].upper() + one.message[1:] + ".",
        columns=tuple(title for title, _ in known),
        rows=tuple((label, tuple(_value(cell(of)) for _, of in known)) for label, cell in ROWS) if known else (),
        flags=tuple(re.findall(r"[^,]*,|[^,]+$", "\n".join(flag_lines(one.flags)))) if one.flags is not None else (),
        found=one.decode is not None,
    )


def _value(text: str) -> str:
    """A value of the text output, in the signs and the width of the page."""
    for written, shown in (("<= ", "≤ "), ("~", "≈ "), (" sizes, ", ": "), (" to ", "–")):
        text = text.replace(written, shown)
    return text


def _sections(sweep: Sweep, answer: Recommendation | None) -> list[Section]:
    cells = sweep.cells
    model = _model(cells)
    lists = memory_model(cells)
    on_cpu = sweep.device == "cpu"
    figures = _latency_figures(cells, model, answer, on_cpu=on_cpu)
    shares = memory.divisions(answer) if answer else ()
    growth = memory.growths(cells)
    first = memory.first_ledger(cells)
    timed = capture.timed_list(cells)
    totals = memory.list_totals(lists)
    controls = memory.control_table(lists)
    graph_tables = []
    if totals.rows:
        graph_tables.append(
            NamedTable(
                "All captured lists", "Device bytes after all captures minus device bytes before the first.", totals
            )
        )
    if controls is not None:
        says = (
            "A tenth of the lists is captured again alone in a fresh process: the difference bounds what sharing hides."
        )
        graph_tables.append(NamedTable("Control captures", says, controls))
    return [
        Section("memory", "Memory of the card", (memory.draw_divisions(shares),) if shares else ()),
        Section("time", "Step time", figures),
        Section("graphs", "Graph memory", (memory.draw_growths(*growth),) if growth else (), tuple(graph_tables)),
        Section("capture", "Capture time", (capture.draw_capture_seconds(timed),) if timed else ()),
        Section("why", "Host time" if on_cpu else "Why graphs help here", _why(cells, model)),
        Section("gate", "Correctness", (), _gate(cells)),
        Section("ledger", "Ledger", (memory.draw_ledger(first[1], first[0]),) if first else ()),
        Section("environment", "Environment", (), _environment(cells)),
        Section("cells", "Cells and gaps", (), _cells(sweep)),
    ]


def _model(cells: Sequence[CellResult]) -> LatencyModel | None:
    try:
        return latency_model(cells)
    except Finding:
        return None


def _latency_figures(
    cells: Sequence[CellResult], model: LatencyModel | None, answer: Recommendation | None, *, on_cpu: bool
) -> tuple[Drawing, ...]:
    if model is None or answer is None:
        return ()
    drawings = [latency.draw_step_times(latency.step_times(model, answer), on_cpu=on_cpu)]
    ratios = latency.speed_ups(model)
    if ratios is not None and not on_cpu:
        drawings.append(latency.draw_speed_ups(ratios))
    best = next((one.engine for one in answer.engines if one.decode is not None), None)
    if best is not None and not on_cpu and (trades := capture.trades(answer, best)):
        drawings.append(capture.draw_trades(trades, best))
    return tuple(drawings)


def _why(cells: Sequence[CellResult], model: LatencyModel | None) -> tuple[Drawing, ...]:
    drawings = []
    profiles = capture.step_profiles(cells)
    if profiles:
        costs = [c.environment.launch_cost_us for c in cells if c.environment and c.environment.launch_cost_us]
        drawings.append(capture.draw_step_profiles(profiles, costs[0] if costs else None))
    rows = latency.host_rows(cells, model) if model is not None else ()
    if rows:
        drawings.append(latency.draw_host_split(rows))
    return tuple(drawings)


def _gate(cells: Sequence[CellResult]) -> tuple[NamedTable, ...]:
    columns = (
        Column("list", numeric=False),
        Column("setting", numeric=False),
        Column("process"),
        Column("sizes passed"),
        Column("bit for bit at the padded shape"),
        Column("largest error at the raw shape"),
        Column("tolerance"),
        Column("KV outside written slots", numeric=False),
    )
    rows, failures = [], []
    for cell in cells:
        for of in cell.captured_lists:
            if not of.gate:
                continue
            errors = [check.error_at_raw for check in of.gate if check.error_at_raw is not None]
            rows.append(
                (
                    of.list.name,
                    memory.setting_words(of.list),
                    f"{cell.cell.get('process', 1)}",
                    f"{sum(check.passed for check in of.gate)} of {len(of.list.sizes)}",
                    f"{sum(check.equal_at_padded is True for check in of.gate)}",
                    f"{max(errors):.2g}" if errors else "–",
                    f"{max(check.tolerance_at_raw for check in of.gate):.0e}",
                    "untouched" if all(check.kv_untouched for check in of.gate) else "changed",
                )
            )
            failures += [(of.list.name, f"{c.size}", c.reason or "no reason stored") for c in of.gate if not c.passed]
    if not rows:
        return ()
    says = (
        "Every captured size is replayed with fewer live requests than rows, poisoned padding and lengths that cross a "
        "page, and compared with eager. A size that fails is not recommended."
    )
    tables = [NamedTable("Replay against eager", says, Table(columns, tuple(rows)))]
    if failures:
        head = (Column("list", numeric=False), Column("size"), Column("reason", numeric=False))
        tables.append(NamedTable("Sizes that failed", "These are not recommended.", Table(head, tuple(failures))))
    return tuple(tables)


def _environment(cells: Sequence[CellResult]) -> tuple[NamedTable, ...]:
    environment = next((cell.environment for cell in cells if cell.environment is not None), None)
    if environment is None:
        return ()
    rows = []
    for name, value in asdict(environment).items():
        if name.endswith("_bytes") and value is not None:
            value = f"{format_bytes(value)} ({value:,} bytes)"
        if isinstance(value, bool):
            value = "yes" if value else "no"
        if isinstance(value, list | tuple):
            value = ", ".join(value) or "none"
        rows.append((name.replace("_", " "), "not known" if value is None else str(value)))
    columns = (Column("what", numeric=False), Column("value", numeric=False))
    says = "With what and where the first cell ran; clocks are read before and after its measurements."
    tables = [NamedTable("Software and device", says, Table(columns, tuple(rows)))]
    facts = next((cell.model for cell in cells if cell.model is not None), None)
    if facts is not None:
        shown = [
            (
                name.replace("_", " "),
                f"{format_bytes(v)} ({v:,} bytes)"
                if name.endswith("_bytes")
                else f"{v:,}"
                if isinstance(v, int)
                else str(v),
            )
            for name, v in asdict(facts).items()
        ]
        tables.append(NamedTable("Model as loaded", "Sizes that the budget starts from.", Table(columns, tuple(shown))))
    return tuple(tables)


def _cells(sweep: Sweep) -> tuple[NamedTable, ...]:
    columns = (
        Column("cell", numeric=False),
        Column("purpose", numeric=False),
        Column("process"),
        Column("lists"),
        Column("points"),
        Column("result", numeric=False),
        Column("wall time by part", numeric=False),
    )
    rows = tuple(
        (
            cell.cell_id,
            str(cell.cell.get("purpose", "main")),
            f"{cell.cell.get('process', 1)}",
            f"{len(cell.captured_lists)}",
            f"{len(cell.points)}",
            cell.status if cell.reason is None else f"{cell.status}: {cell.reason}",
            ", ".join(f"{name.replace('_', ' ')} {format_duration_s(s)}" for name, s in cell.phase_seconds.items()),
        )
        for cell in sweep.cells
    )
    says = "Each cell is one process. A cell that failed costs only what it would have measured."
    tables = [NamedTable("Cells", says, Table(columns, rows))] if rows else []
    lost = [
        (cell.cell_id, memory.setting_words(of.list), of.list.name, of.reason or of.status)
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
