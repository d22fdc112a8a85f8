from __future__ import annotations

import csv
import html
import html.parser
import io
import re
import shlex
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.errors import InputError
from graphtune.figures.base import Drawing
from graphtune.html_page import file_name
from graphtune.plan import Skip
from graphtune.report import page, render, write_report
from graphtune.results import CaptureList
from graphtune.store import Sweep
from graphtune.tune.recommend import Question, recommend
from tests.synthetic import (
    captured_list,
    cell_result,
    cpu_sweep,
    failed_cell,
    h200_sweep,
    small_sweep,
    sweep,
    write_sweep,
)

LIMIT_BYTES = 2_000_000
CSS = (Path(__file__).parents[1] / "graphtune" / "templates" / "report.css").read_text()


@pytest.fixture(scope="module")
def rich() -> str:
    return render(h200_sweep(), Question(gpu_mem="80"))


class Page(html.parser.HTMLParser):
    """Checks nesting and collects tags, attributes and text."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style", "script"}:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    sections = page(h200_sweep(), Question(gpu_mem="80"))["sections"]
    return [drawing for section in sections for drawing in section.drawings]


def body(text: str) -> str:
    """The words of the page's main part."""
    return Page(text[text.index("<main>") : text.index("</main>")]).text


def test_the_page_is_one_file_that_loads_nothing(rich: str) -> None:
    assert len(rich.encode()) < LIMIT_BYTES
    for tag, attributes in Page(rich).tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            target = attributes.get(name)
            assert target is None or target.startswith(("#", "data:text/csv;")), f"{tag} {name}={target}"
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", rich)
    assert not re.search(r"https?://|@import|url\((?!#)", without_namespaces)
    assert "default-src 'none'" in rich


def test_the_page_is_well_formed(rich: str) -> None:
    parsed = Page(rich)
    assert not parsed.open
    anchors = {a["href"] for tag, a in parsed.tags if tag == "a"}
    ids = [a["id"] for _, a in parsed.tags if a.get("id")]
    assert {f"#{name}" for name in ids} >= {anchor for anchor in anchors if anchor and anchor.startswith("#")}
    assert len(ids) == len(set(ids)), "ids repeat"


def test_the_answer_and_the_flags_come_first(rich: str) -> None:
    text = body(rich)
    assert text.index("What to capture") < text.index("Warnings") < text.index("Memory of the card")
    for name in ("SGLang", "vLLM", "TensorRT-LLM"):
        assert text.index(name) < text.index("Warnings")
    assert "--cuda-graph-config" in text and "cudagraph_capture_sizes" in text and "enable_padding: true" in text
    assert sum(tag == "button" for tag, _ in Page(rich).tags) == 3
    assert text.count("Copy the flags for") == 3


def test_copied_flags_are_the_recommended_flags(rich: str) -> None:
    blocks = re.findall(r"<pre[^>]*><code>(.*?)</code></pre>", rich, re.DOTALL)
    copied = [html.unescape(block.replace("<wbr>", "")) for block in blocks]
    answer = recommend(h200_sweep(), Question(gpu_mem="80"))
    sglang, _, tensorrt = (one.flags for one in answer.engines)
    assert sglang is not None and tensorrt is not None and tensorrt.yaml is not None
    assert tuple(shlex.split(copied[0].replace("\\\n", " "))) == sglang.args
    assert copied[2].strip() == tensorrt.yaml.strip()


def test_every_section_of_a_gpu_sweep_is_there(rich: str) -> None:
    text = body(rich)
    for words in (
        "Memory of the card",
        "Traffic",
        "Step time against requests",
        "Speed-up over eager",
        "Graph memory over decode captures",
        "All captured lists",
        "Controls",
        "How far the processes agree",
        "Capture time",
        "Launches and idle time",
        "A decode step kernel by kernel",
        "The host's part of a replayed step",
        "Steps waited for and overlapped",
        "Replay against eager",
        "Ledger",
        "Time of the sweep",
        "Software and device",
        "Cells",
        "Left out",
    ):
        assert words in text, words
    assert "not advice" not in text


def test_every_figure_has_a_sentence_a_table_and_two_drawings(drawings: list[Drawing]) -> None:
    assert len(drawings) == 14
    assert len({drawing.slug for drawing in drawings}) == 14
    for drawing in drawings:
        assert drawing.says.endswith(".") and len(drawing.says) > 60
        assert drawing.table.rows
        for row in drawing.table.rows:
            assert len(row) == len(drawing.table.columns)
        for svg in (drawing.wide, drawing.narrow):
            assert svg.startswith("<svg ") and 'role="img"' in svg and "aria-label=" in svg
            assert "#0a0a" not in svg, "a placeholder colour is left"
            colors = set(re.findall(r"(?:fill|stroke): ?([^;\"]+)", svg)) - {"none"}
            assert all(c.startswith("var(--") for c in colors), colors


def test_every_table_can_be_saved_as_csv(rich: str, drawings: list[Drawing]) -> None:
    saved = {a["download"]: a["href"] for tag, a in Page(rich).tags if tag == "a" and "download" in a}
    assert len(saved) == rich.count('class="csv"'), "two files of one name"
    for drawing in drawings:
        head, _, data = (saved[file_name(drawing.title)] or "").partition(",")
        assert head == "data:text/csv;charset=utf-8"
        rows = list(csv.reader(io.StringIO(unquote(data))))
        assert rows[0] == [column.title for column in drawing.data.columns]
        assert len(rows) == len(drawing.data.rows) + 1


def test_words_are_explained_in_the_section_that_uses_them(rich: str) -> None:
    for section in re.split(r"<section ", rich)[1:]:
        if (said := re.search(r"<dl>(.*?)</dl>", section, re.DOTALL)) is None:
            continue
        explained = set(re.findall(r"<dt>(.*?)</dt>", said[1]))
        tips = set(re.findall(r'<dfn title="(.*?)">', section))
        means = set(re.findall(r"<dd>(.*?)</dd>", said[1]))
        assert explained and tips <= means
    assert "KV tokens" in rich and "Share of computed rows that are padding" in rich


def test_columns_of_times_name_their_statistic(drawings: list[Drawing]) -> None:
    for drawing in drawings:
        if drawing.slug in {"step-time", "speed-up", "host-split", "launches", "overlap"}:
            for column in drawing.table.columns:
                if "µs" in column.title or "at " in column.title:
                    assert "median" in column.title or "mean" in column.title, column.title


def test_drawings_are_the_same_every_time(rich: str, drawings: list[Drawing]) -> None:
    for drawing in drawings:
        assert drawing.wide in rich and drawing.narrow in rich


def test_a_cpu_page_is_headed_as_no_advice() -> None:
    text = Page(render(cpu_sweep())).text
    assert "A check of the machinery, not advice" in text
    assert text.index("not advice") < text.index("What this check would capture")
    assert "Speed-up over eager" not in text and "recommended" not in text.split("Step time", 1)[0]


HOSTILE = '<script>alert("x")</script>&\'"`$a^2$'


def test_all_text_of_a_sweep_is_escaped(tmp_path: Path) -> None:
    of = small_sweep((1, 2, 4), processes=2)
    cells = [replace(cell, warnings=(HOSTILE,)) for cell in of.cells]
    cells[0] = replace(
        cells[0],
        captured_lists=tuple(replace(one, list=replace(one.list, name=HOSTILE)) for one in cells[0].captured_lists),
    )
    cells.append(failed_cell(HOSTILE))
    of = replace(
        of,
        cells=tuple(cells),
        model_name=HOSTILE,
        device_name=HOSTILE,
        recipe_name=HOSTILE,
        notes=(HOSTILE,),
        skips=(Skip(HOSTILE, HOSTILE),),
        path=tmp_path / "a<b>&",
    )
    text = render(of, Question(gpu_mem="80"))
    parsed = Page(text)
    assert not parsed.open
    assert sum(tag == "script" for tag, _ in parsed.tags) == 1
    assert "alert(" in parsed.text and "<script>alert" not in text


def test_a_sweep_without_measurements_gets_a_page_that_says_so() -> None:
    text = Page(render(sweep([failed_cell("out of memory")]))).text
    assert "no decode step on a graph was measured" in text
    assert "oom: out of memory" in text


def test_an_empty_sweep_gets_a_page() -> None:
    assert "this sweep holds no results" in Page(render(sweep([]))).text


def odd(kind: str) -> Sweep:
    of = small_sweep((3,) if kind == "one size" else (1, 2, 4))
    cell = of.cells[0]
    points, lists = cell.points, cell.captured_lists
    if kind == "no eager steps":
        cell = replace(cell, points=tuple(p for p in points if p.execution == "graph"))
    elif kind == "step times only":
        cell = replace(cell, points=tuple(replace(p, gpu_us=None, host_us=None) for p in points), ledger=None)
    elif kind == "no captures stored":
        cell = replace(cell, captured_lists=tuple(replace(one, captures=(), capture_s=None) for one in lists))
    elif kind == "no bytes read":
        bare = (replace(c, retained_bytes=None, pool_growth_bytes=None, peak_bytes=None) for c in lists[0].captures)
        cell = replace(cell, captured_lists=(replace(lists[0], captures=tuple(bare), graph_bytes=None),))
    return replace(of, cells=(cell,))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "kind", ["one size", "no eager steps", "step times only", "no captures stored", "no bytes read"]
)
def test_sweeps_that_lack_something_get_a_page_of_the_rest(kind: str) -> None:
    parsed = Page(render(odd(kind)))
    assert not parsed.open
    assert "Step time" in parsed.text or "captured whole" in parsed.text
    assert "nan" not in parsed.text.split() and "None" not in parsed.text


def test_lists_that_failed_are_shown_with_their_reason() -> None:
    of = small_sweep((1, 2, 4), failing=(4,))
    broken = replace(
        captured_list(CaptureList("broken", "decode", "full", (1, 2))),
        status="capture_failed",
        reason="aten::item copies to the host",
        graph_bytes=None,
        gate=(),
    )
    extra = cell_result([broken], [], with_ledger=False, process=7)
    text = Page(render(replace(of, cells=(*of.cells, extra)))).text
    assert "aten::item copies to the host" in text
    assert "replay differs from eager at the padded shape" in text


def test_nothing_fits_is_shown_with_what_is_short() -> None:
    text = Page(render(h200_sweep(), Question(gpu_mem="16"))).text
    assert "Nothing fits" in text and "short by" in text


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast_on_every_ground(theme: int) -> None:
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[theme]))
    for ink in ("ink", "muted", "accent"):
        for ground in ("page", "panel"):
            assert contrast(colors[ink], colors[ground]) >= 4.5, (ink, ground)
    for ink in ("ink", "warn"):
        assert contrast(colors[ink], colors["warn-panel"]) >= 4.5
    for role in ("c1", "c2", "c3", "c4", "c5", "c6", "c7"):
        assert contrast(colors[role], colors["page"]) >= 4.5, "bars carry text in the page's colour"
    assert contrast(colors["ink"], colors["soft"]) >= 4.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(small_sweep((1, 2, 4)), tmp_path_factory.mktemp("sweep"))


def test_the_page_is_written_where_asked(folder: Path, tmp_path: Path) -> None:
    assert write_report(folder) == folder / "report.html"
    target = tmp_path / "page.html"
    assert write_report(folder, target, gpu_mem="80") == target
    assert "81559 MiB" in target.read_text(encoding="utf-8")


def test_the_command_prints_where_the_page_is(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(target), "--gpu-mem", "80"])
    assert (done.exit_code, done.stdout) == (0, f"{target}\n")
    assert target.stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments", [["no/such/folder"], ["FOLDER", "-o", "no/such/folder/page.html"], ["FOLDER", "--gpu-mem", "big"]]
)
def test_bad_input_is_one_message(folder: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["report", *(str(folder) if a == "FOLDER" else a for a in arguments)])
    assert done.exit_code == 2 and not done.stdout and done.stderr.startswith("graphtune: ")


def test_a_folder_that_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_report(tmp_path)
