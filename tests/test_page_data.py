"""What a page carries beside its drawings: CSV, words, the timeline, and the trace for other programs."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.figures import timeline
from graphtune.figures.base import Column, Table
from graphtune.figures.csv_data import csv_text, csv_uri
from graphtune.figures.glossary import WORDS, explained, words_in
from graphtune.html_page import file_name, options
from graphtune.trace_export import trace_events
from tests.synthetic import cpu_sweep, h200_sweep, timelines, write_sweep

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=30)


@pytest.mark.parametrize(
    ("shown", "stored"),
    [
        ("1,234", "1234"),
        ("12.5", "12.5"),
        ("+2.00", "+2.00"),
        ("−3.5", "-3.5"),
        ("97.5%", "0.975"),
        ("1e-05", "1e-05"),
        ("–", '""'),
        ("2 + 3", "2 + 3"),
        ("986 µs", "986 µs"),
        ("=1+1", "'=1+1"),
    ],
)
def test_figures_in_csv_are_figures(shown: str, stored: str) -> None:
    assert csv_text(Table((Column("a, µs"),), ((shown,),))) == f'"a, µs"\n{stored}\n'


@given(st.lists(st.lists(TEXTS, min_size=2, max_size=2).map(tuple), max_size=5))
def test_texts_come_back_from_csv_and_none_is_a_formula(rows: list[tuple[str, ...]]) -> None:
    columns = (Column("what", numeric=False), Column("value", numeric=False))
    uri = csv_uri(Table(columns, tuple(rows)))
    assert escape(uri) == uri and not set(uri) & set(" \n\"'<>#")
    read = list(csv.reader(io.StringIO(unquote(uri.partition(",")[2]), newline="")))
    assert len(read) == len(rows) + 1
    for found, written in zip(read[1:], rows, strict=True):
        for cell, text in zip(found, written, strict=True):
            assert cell in (text, f"'{text}")
            assert not cell or cell[0] not in "=+-@\t"


def test_words_are_found_as_words() -> None:
    assert [word.name for word in words_in("replays of captured sizes")] == ["replay", "capture", "size"]
    assert words_in("eagerness, replan, kernel-like, xpadded") == ()
    assert len({word.name for word in WORDS}) == len(WORDS)
    for word in WORDS:
        assert word.means.endswith(".") and words_in(word.name), word.name


@given(st.lists(st.sampled_from(["replay", "graph pool", "<b>", "&", "a", "padding waste", "'"]), max_size=12))
def test_explained_text_is_the_text_with_each_word_marked_once(pieces: list[str]) -> None:
    text = " ".join(pieces)
    marked = str(explained(text))
    assert marked.count("<dfn ") == len({*pieces} & {"replay", "graph pool", "padding waste"})
    assert "<b>" not in marked
    bare = marked
    for word in WORDS:
        bare = bare.replace(f'<dfn title="{escape(word.means)}">', "")
    assert bare.replace("</dfn>", "") == str(escape(text))


def test_options_and_file_names_are_safe() -> None:
    assert options("<i> --max-running N") == "&lt;i&gt; <b>--max-running</b> N"
    assert file_name("The host's part: 10 %") == "the-host-s-part-10.csv"


def test_gaps_are_what_no_kernel_covers() -> None:
    spans = [(0.0, 4.0), (2.0, 1.0), (6.0, 2.0), (8.0, 1.0)]
    assert timeline.gaps(spans) == [2.0]
    assert timeline.gaps([]) == []


SPANS = st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 10)), max_size=20).map(sorted)


@given(SPANS, st.floats(0, 5))
def test_joined_spans_cover_the_same_but_for_small_gaps(spans: list[tuple[float, float]], least: float) -> None:
    joined = timeline.merged(spans, least)
    assert all(gap >= least - 1e-9 for gap in timeline.gaps(joined))
    lost = sum(timeline.gaps(spans)) - sum(timeline.gaps(joined))
    assert -1e-6 <= lost <= least * max(0, len(spans) - len(joined)) + 1e-6
    if spans:
        assert joined[0][0] == spans[0][0]
        assert max(a + b for a, b in joined) == pytest.approx(max(a + b for a, b in spans))


def test_an_eager_step_stands_against_the_replay_of_the_same_batch() -> None:
    eager, replay = timelines(30)
    cell = h200_sweep().cells[0]
    pair = timeline.timeline_pair([replace(cell, timelines=(replace(replay, size=4), eager, replay))])
    assert pair == timeline.Pair(eager, replay)
    assert timeline.timeline_pair([replace(cell, timelines=(eager,))]) is None
    drawn = timeline.draw_timeline(timeline.Pair(eager, replay))
    assert [row[:3] for row in drawn.table.rows] == [("eager", "30", "30"), ("replay", "30", "1")]
    assert "30 kernels from 30 calls of the host" in drawn.says and "from 1 call of the host" in drawn.says
    assert drawn.table.rows[0][6] == "4.6" and drawn.table.rows[1][6] == "0.9"
    assert len(drawn.data.rows) == 2 * 30 + 31


def test_without_host_calls_the_page_says_that_none_were_seen() -> None:
    bare = [replace(line, call_starts_us=(), call_lengths_us=(), left_out=7) for line in timelines(5)]
    drawn = timeline.draw_timeline(timeline.Pair(*bare))
    assert "saw no host calls" in drawn.says and drawn.table.rows[0][2] == "–" and drawn.table.rows[0][-1] == "7"


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("void gemm<bf16, Tile<128, 64>>(Params)", "gemm"),
        ("ampere_bf16_s16816gemm", "ampere_bf16_s16816gemm"),
        ("void at::native::reduce<512>(float*)", "at::native::reduce"),
        ("k" * 100, "k" * 71 + "…"),
        ("<odd>", "<odd>"),
    ],
)
def test_kernel_names_are_shortened(kernel: str, short: str) -> None:
    assert timeline.short_name(kernel) == short


def test_the_trace_holds_every_span_of_every_step() -> None:
    events = trace_events(h200_sweep().cells)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named[1, 0] == "decode, 1 request, 1024 KV tokens, eager, process 1"
    assert named[2, 0] == "decode, 1 request, 1024 KV tokens, replay, process 1"
    spans = [e for e in events if e["ph"] == "X"]
    assert sum(e["pid"] == 1 for e in spans) == 2 * 427 and sum(e["pid"] == 2 for e in spans) == 428
    assert all(e["dur"] > 0 and e["ts"] >= 0 and (e["pid"], e["tid"]) in named for e in spans)


def test_report_writes_the_trace_where_asked(tmp_path: Path) -> None:
    folder = write_sweep(h200_sweep(), tmp_path / "sweep")
    target = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["report", str(folder), "--trace", str(target)])
    assert done.exit_code == 0 and done.stdout.splitlines() == [str(folder / "report.html"), str(target)]
    content = json.loads(target.read_text())
    assert content["otherData"]["model"] == "synthetic-8b" and len(content["traceEvents"]) > 1000


@pytest.mark.parametrize(("target", "words"), [("trace.json", "holds no timeline"), ("no/trace.json", "holds no")])
def test_a_sweep_without_a_timeline_says_so(tmp_path: Path, target: str, words: str) -> None:
    folder = write_sweep(cpu_sweep(), tmp_path / "sweep")
    done = CliRunner().invoke(app, ["report", str(folder), "--trace", str(tmp_path / target)])
    assert done.exit_code == 2 and words in done.stderr and not (tmp_path / target).exists()


def test_a_trace_that_cannot_be_written_names_its_option(tmp_path: Path) -> None:
    folder = write_sweep(h200_sweep(), tmp_path / "sweep")
    done = CliRunner().invoke(app, ["report", str(folder), "--trace", str(tmp_path / "no" / "trace.json")])
    assert done.exit_code == 2 and "--trace" in done.stderr
