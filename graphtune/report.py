"""The page of a sweep: one self-contained HTML file, no network, no scripts from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtune import __version__
from graphtune.errors import Finding
from graphtune.figures import (
    agreement,
    breaks,
    capture,
    host,
    latency,
    launches,
    ledger,
    lists,
    memory,
    padding,
    timeline,
    wall_time,
)
from graphtune.figures import prefill as prefill_figure
from graphtune.figures import traffic as traffic_figure
from graphtune.figures.base import Drawing, NamedTable
from graphtune.figures.cells import cell_tables, environment_tables
from graphtune.figures.glossary import Word, section_text, words_in
from graphtune.figures.phases import of_phase
from graphtune.figures.predicted import draw_predicted, predicted_lists
from graphtune.figures.shown_lists import captured_prefill_lists, decode_lists, prefill_lists
from graphtune.html_page import render_page
from graphtune.results import CellResult, Environment, Phase
from graphtune.store import PAGE_FILE, Sweep, read_sweep, write_atomically
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.memory_model import MemoryModel, memory_model
from graphtune.tune.prefill_model import prefill_models
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation import EngineAnswer, ListAnswer, Recommendation
from graphtune.tune.recommendation_text import (
    EAGER,
    NAMES,
    ROWS,
    TOLERANCE,
    alternatives,
    bucket_words,
    decode_rows,
    flag_lines,
    how_to_ask,
    prefill_words,
    traffic,
    with_overhead,
)

TEMPLATE = "report.html.j2"
CPU_BANNER = (
    "A check of the machinery, not advice. This sweep ran on a CPU, where replaying a recording saves no time: the "
    "figures show that capture, padding, admission and the ledger work, not what a GPU would gain."
)


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

    @property
    def words(self) -> tuple[Word, ...]:
        """What the words of this section mean."""
        return words_in(section_text(self.drawings, self.tables))


@dataclass(frozen=True)
class ComparedLists:
    """A list beside the engine's own and no graphs: ``rows`` are a label and one value per column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class EngineCard:
    """One engine's answer as shown at the head of the page.

    ``tables`` compare lists, one for each phase; ``others`` says what else there is, ``more`` what a reader may want to
    know of the buckets; ``flags`` are the pieces that a line may be broken between.
    """

    name: str
    version: str
    headline: str
    message: str
    tables: tuple[ComparedLists, ...]
    others: str
    more: tuple[str, ...]
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
    return render_page(TEMPLATE, page(sweep, question or Question()))


def page(sweep: Sweep, question: Question) -> dict[str, Any]:
    """Everything that the template shows, as plain data."""
    answer, reason = _answer(sweep, question)
    on_cpu = sweep.device == "cpu"
    sections = _sections(sweep, answer)
    fine_print = _fine_print(answer) if answer else ()
    cards = tuple(_card(one) for one in answer.engines) if answer else ()
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
        "how_to_ask": how_to_ask(answer) if answer else "",
        "fine_print": fine_print,
        "cards": cards,
        "answer_words": words_in(
            "\n".join([*fine_print, *(label for card in cards for table in card.tables for label, _ in table.rows)])
        ),
        "warnings": answer.warnings if answer else (),
        "sections": tuple(section for section in sections if not section.empty),
    }


def _fine_print(answer: Recommendation) -> tuple[str, ...]:
    """What the figures of the answer are, a sentence each."""
    facts = answer.sweep
    return (
        f"Step times: {facts.statistic}, {facts.attention} attention.",
        TOLERANCE,
        sentence(answer.noise.words),
        "≈ interpolated between measured points; ≤ at most, the figure of a longer list that was measured.",
        f"No graphs: {EAGER}{with_overhead(answer)}.",
    )


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


def _card(one: EngineAnswer) -> EngineCard:
    _, *both_phases = prefill_words(one) or ("",)  # the first sentence is what the table of prefill shows
    return EngineCard(
        name=NAMES[one.engine],
        version=one.version,
        headline=_headline(one),
        message=sentence(one.message),
        tables=_compared_lists(one),
        others=_value(" ".join(map(sentence, filter(None, (alternatives(one), *both_phases))))),
        more=tuple(_value(sentence(text)) for text in bucket_words(one)) if one.decode is not None else (),
        flags=tuple(re.findall(r"[^,]*,|[^,]+$", "\n".join(flag_lines(one.flags)))) if one.flags is not None else (),
        found=one.decode is not None,
    )


def _headline(one: EngineAnswer) -> str:
    if one.decode is None:
        return "No answer" if one.status == "partial" else "Nothing fits"
    sizes = one.decode.capture_sizes
    if not sizes:
        return "No decode graphs" if one.prefill is not None and one.prefill.capture_sizes else "No graphs"
    return f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"Size {sizes[0]}"


def _compared_lists(one: EngineAnswer) -> tuple[ComparedLists, ...]:
    """Decode, and prefill where the traffic has some."""
    if one.decode is None:
        return ()
    prefill = one.prefill is not None
    tables = [_compared("decode, in requests" if prefill else "", decode_rows(one), one.decode, one.default, one.eager)]
    if one.prefill is not None:
        backend = "" if one.prefill.is_eager else f", {one.prefill.backend}"
        rows = [(label, cell) for label, cell in ROWS if label not in ("recommended is", "KV tokens")]
        title = f"prefill, in tokens{backend}"
        tables.append(_compared(title, rows, one.prefill, one.prefill_default, one.prefill_eager))
    return tuple(tables)


def _compared(
    title: str,
    rows: Sequence[tuple[str, Callable[[ListAnswer], str]]],
    ours: ListAnswer,
    default: ListAnswer | None,
    eager: ListAnswer | None,
) -> ComparedLists:
    shown = [("this list", ours), ("its default", default), ("no graphs", eager)]
    known = [(column, of) for column, of in shown if of is not None]
    return ComparedLists(
        title,
        tuple(column for column, _ in known),
        tuple((_narrow(label), tuple(_narrow(_value(cell(of))) for _, of in known)) for label, cell in rows),
    )


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _value(text: str) -> str:
    """A value of the text output, in the signs of the page."""
    for written, shown in (("<= ", "≤ "), ("~", "≈ ")):
        text = text.replace(written, shown)
    return text


def _narrow(text: str) -> str:
    """A table cell in little width."""
    for written, shown in ((" sizes, ", ": "), (" to ", "–"), ("1 size, ", "1: "), ("recommended is", "this list is")):
        text = text.replace(written, shown)
    text = text.replace("–", "\N{WORD JOINER}–\N{WORD JOINER}")
    return re.sub(r"(?<=[≈≤\d:]) (?=[\dmµsGKM])", "\N{NARROW NO-BREAK SPACE}", text)


def _sections(sweep: Sweep, answer: Recommendation | None) -> list[Section]:
    cells = sweep.cells
    decode, prefill = of_phase(cells, "decode"), of_phase(cells, "prefill")
    model = _model(decode)
    of_decode = memory_model(cells, "decode")
    measured = (of_decode, memory_model(cells, "prefill", predictor=of_decode.predictor))
    on_cpu = sweep.device == "cpu"
    shares = memory.divisions(answer) if answer else ()
    first = ledger.first_ledger(cells)
    walls = wall_time.wall_times(cells)
    times = agreement.table(cells)
    timed = [of for of in map(capture.timed_list, (decode, prefill)) if of is not None]
    return [
        Section("memory", "Memory of the card", (memory.draw_divisions(shares),) if shares else ()),
        Section("traffic", "Traffic", _traffic_figures(answer, "captured here" if on_cpu else "recommended")),
        Section("time", "Step time", _latency_figures(decode, model, answer, on_cpu=on_cpu), _known(times)),
        Section("prefill", "Prefill", _prefill_figures(prefill, answer, on_cpu=on_cpu)),
        Section(
            "graphs",
            "Graph memory",
            (*_growth(decode, "decode"), *_growth(prefill, "prefill"), *_predicted(measured[0])),
            _known(lists.list_totals(*measured), lists.control_table(*measured), lists.joint_table(cells, *measured)),
        ),
        Section("capture", "Capture time", tuple(map(capture.draw_capture_seconds, timed))),
        Section("why", "Host time" if on_cpu else "Why graphs help here", _why(decode, model)),
        Section("gate", "Correctness", (), lists.gate_tables(cells)),
        Section("ledger", "Ledger", (ledger.draw_ledger(first[1], first[0]),) if first else ()),
        Section("sweep", "Time of the sweep", (wall_time.draw_wall_times(walls),) if walls else ()),
        Section("environment", "Environment", (), environment_tables(cells)),
        Section("cells", "Cells and gaps", (), cell_tables(sweep)),
    ]


def _growth(cells: Sequence[CellResult], phase: Phase) -> tuple[Drawing, ...]:
    found = memory.growths(cells)
    return (memory.draw_growths(*found, phase),) if found else ()


def _predicted(of: MemoryModel) -> tuple[Drawing, ...]:
    held_out = predicted_lists(of.predictor)
    return (draw_predicted(held_out),) if held_out else ()


def _traffic_figures(answer: Recommendation | None, ours: str) -> tuple[Drawing, ...]:
    if answer is None:
        return ()
    asked = next((one.workload for one in answer.engines if one.workload is not None), answer.workload)
    found = (
        traffic_figure.decode_traffic(asked, decode_lists(answer)),
        traffic_figure.prefill_traffic(asked, prefill_lists(answer)),
    )
    return tuple(traffic_figure.draw_traffic(one, ours) for one in found if one is not None)


def _prefill_figures(
    cells: Sequence[CellResult], answer: Recommendation | None, *, on_cpu: bool
) -> tuple[Drawing, ...]:
    models = prefill_models(cells, answer.eager_overhead_us if answer else 0.0)
    if not models:
        return ()
    shown = (prefill_lists(answer) if answer else ()) or captured_prefill_lists(cells)
    drawings = [prefill_figure.draw_prefill_times(models, shown)]
    if not on_cpu and (crossovers := prefill_figure.crossovers(models)):
        drawings.append(prefill_figure.draw_crossovers(crossovers, prefill_figure.waste_cap(cells)))
    if launched := breaks.prefill_launches(cells):
        drawings.append(breaks.draw_prefill_launches(launched, breaks.head_bytes(cells)))
    if (pair := timeline.timeline_pair(cells, "prefill")) is not None:
        drawings.append(timeline.draw_timeline(pair))
    return tuple(drawings)


def _known(*tables: NamedTable | None) -> tuple[NamedTable, ...]:
    return tuple(table for table in tables if table is not None)


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
    if model.padded is not None and not on_cpu:
        drawings.append(padding.draw_padding(model.padded))
    best = next((one.engine for one in answer.engines if one.decode is not None), None)
    if best is not None and not on_cpu and (trades := capture.trades(answer, best)):
        drawings.append(capture.draw_trades(trades, best))
    return tuple(drawings)


def _why(cells: Sequence[CellResult], model: LatencyModel | None) -> tuple[Drawing, ...]:
    drawings: list[Drawing | None] = []
    profiles = launches.step_profiles(cells, model)
    if profiles:
        drawings.append(launches.draw_step_profiles(profiles, launches.launch_cost_us(cells)))
    if (pair := timeline.timeline_pair(cells)) is not None:
        drawings.append(timeline.draw_timeline(pair))
    rows = host.host_rows(cells, model) if model is not None else ()
    if rows:
        drawings += [host.draw_host_split(rows), host.draw_overlap(rows)]
    return tuple(drawing for drawing in drawings if drawing is not None)
