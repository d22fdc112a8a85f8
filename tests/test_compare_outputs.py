"""What `compare` and `baseline` print, write and exit with."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from graphtune.cli.app import app
from graphtune.compare.exchange import annotation, as_github, as_json, as_junit, not_compared_json
from graphtune.compare.model import Comparison
from graphtune.compare.page import render
from graphtune.compare.sweeps import compare_sweeps
from graphtune.compare.text import as_markdown, as_table, escaped
from graphtune.compare.thresholds import parse_thresholds
from graphtune.store import CELLS_FILE, Sweep, read_sweep
from tests.synthetic import cpu_sweep, h200_sweep, small_sweep, write_sweep
from tests.test_compare import changed, noisy, timed

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "comparison.schema.json").read_text())
EVIL = '<script>alert(1)</script> | `x` & "q" @all\n::error::no'


def validate(text: str) -> dict[str, object]:
    values: dict[str, object] = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(values)
    return values


def slower() -> tuple[Sweep, Sweep]:
    return timed(noisy(1, own=0.001), 4), timed(noisy(2, own=0.001, factor=1.1), 4)


def pairs() -> dict[str, Comparison]:
    base, new = slower()
    evil = replace(new, path=Path(EVIL), model_name=EVIL, device_name=EVIL)
    evil = changed(evil, torch=EVIL, device_name=EVIL)
    return {
        "slower": compare_sweeps(base, new),
        "itself": compare_sweeps(h200_sweep(), h200_sweep()),
        "alone": compare_sweeps(timed(noisy(1), 1), timed(noisy(2), 1)),
        "lost": compare_sweeps(h200_sweep(), timed(noisy(1), 2), allow=["model"]),
        "evil": compare_sweeps(base, evil, allow=["device"]),
        "cpu": compare_sweeps(cpu_sweep(), cpu_sweep()),
    }


@pytest.fixture(params=["slower", "itself", "alone", "lost", "evil", "cpu"])
def comparison(request: pytest.FixtureRequest) -> Comparison:
    return pairs()[request.param]


def test_the_terminal_gets_80_columns_and_no_control_characters(comparison: Comparison) -> None:
    text = as_table(comparison)
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


def test_sweeps_without_a_difference_give_a_line_and_what_to_note() -> None:
    of = small_sweep(processes=2)
    assert as_table(compare_sweeps(of, of)).startswith(f"No difference in {len(compare_sweeps(of, of).rows)} rows: ")
    cut = as_table(compare_sweeps(of, replace(of, finished_at=None)))
    assert "No difference" in cut and "note: the candidate is not finished" in cut
    everything = parse_thresholds("rows: [{match: '*', ignore: true}]", "all.yaml")
    nothing = as_table(compare_sweeps(of, of, everything))
    assert nothing.startswith("Nothing compared, ") and "rows ignored by the thresholds" in nothing


def test_the_summary_comes_first() -> None:
    lines = as_table(pairs()["slower"]).splitlines()
    worst, means = lines.index("Worst"), lines.index("Geometric means (new over base)")
    assert lines[4] == "8 slower, 6 same" and 4 < worst < means
    ratios = [float(line.split()[-3]) for line in lines[worst + 1 : means] if line.endswith("slower")]
    assert len(ratios) == 5 and ratios == sorted(ratios, reverse=True) and ratios[-1] == pytest.approx(1.1, abs=0.01)
    assert "(Bonferroni)" in " ".join(lines)


def test_json_follows_its_schema(comparison: Comparison) -> None:
    values = validate(as_json(comparison, "any"))
    assert values["status"] == ("findings" if comparison.findings("any") else "ok")
    validate(not_compared_json("no GPU"))
    broken = json.loads(as_json(comparison, "any"))
    broken["rows"][0]["verdict"] = "worse"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(broken)


def test_junit_has_a_case_per_row_and_counts_that_agree(comparison: Comparison) -> None:
    root = ElementTree.fromstring(as_junit(comparison, "any"))
    (suite,) = root.findall("testsuite")
    cases = suite.findall("testcase")
    assert int(suite.attrib["tests"]) == len(cases) == len(comparison.rows)
    failures = [case for case in cases if case.find("failure") is not None]
    assert int(suite.attrib["failures"]) == len(failures) == len(comparison.findings("any"))
    assert int(suite.attrib["skipped"]) == sum(case.find("skipped") is not None for case in cases)


def test_github_gets_an_error_per_finding_and_one_notice(comparison: Comparison) -> None:
    lines = as_github(comparison, "any").splitlines()
    assert sum(line.startswith("::error ") for line in lines) == min(10, len(comparison.findings("any")))
    assert [line.partition(" ")[0] for line in lines[-1:]] == ["::notice"]
    assert all(line.startswith(("::error ", "::notice ")) for line in lines)


@given(title=st.text(max_size=40), message=st.text(max_size=80))
@settings(max_examples=80)
def test_annotations_are_one_command_that_gives_the_texts_back(title: str, message: str) -> None:
    line = annotation("error", title, message)
    assert "\n" not in line and "\r" not in line
    head, _, shown = line.removeprefix("::error title=").partition("::")
    assert ":" not in head and "," not in head

    def plain(text: str) -> str:
        for code, sign in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            text = text.replace(code, sign)
        return text

    assert plain(head) == title and plain(shown) == message


@given(text=st.text(max_size=80))
@settings(max_examples=80)
def test_markdown_text_holds_no_markup_and_one_line(text: str) -> None:
    safe = escaped(text)
    assert "\n" not in safe and "<" not in safe and ">" not in safe and "@" not in safe
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_\[\]|~]", safe)


def test_markdown_tables_keep_their_columns(comparison: Comparison) -> None:
    text = as_markdown(comparison)
    assert "<script" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in rows}
    assert columns <= {4, 7}


class Words(html.parser.HTMLParser):
    """Tags, attributes and words of a page; nesting must be right."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "br", "hr", "img", "input", "wbr"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def test_the_page_is_one_file_that_loads_and_runs_nothing(comparison: Comparison) -> None:
    text = render(comparison)
    assert len(text.encode()) < 2_000_000
    parsed = Words(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in parsed.tags}
    targets = [attrs[name] for _, attrs in parsed.tags for name in ("src", "href", "xlink:href") if attrs.get(name)]
    assert all(target and target.startswith(("#", "data:text/csv;")) for target in targets)
    assert not re.search(r"https?://|@import|url\((?!#)", re.sub(r'xmlns(:\w+)?="[^"]*"', "", text))
    ids = [attrs["id"] for _, attrs in parsed.tags if attrs.get("id")]
    assert len(ids) == len(set(ids)) and {f"#{name}" for name in ids} >= {t for t in targets if t and "#" in t}


def test_the_page_shows_a_script_in_a_name_as_text() -> None:
    assert "<script>alert(1)</script>" in " ".join(Words(render(pairs()["evil"])).words)


def test_the_page_shows_every_row() -> None:
    comparison = pairs()["slower"]
    words = Words(render(comparison)).words
    assert all(row.name in words for row in comparison.rows)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    base, new = slower()
    return write_sweep(base, tmp_path / "base"), write_sweep(new, tmp_path / "new")


@pytest.mark.parametrize(("fail_on", "code"), [("any", 1), ("slower", 1), ("memory", 0), ("none", 0)])
def test_fail_on_decides_the_exit_code(folders: tuple[Path, Path], fail_on: str, code: int) -> None:
    assert run("compare", *folders, "--fail-on", fail_on).exit_code == code


def test_itself_exits_0_with_one_sentence(folders: tuple[Path, Path]) -> None:
    done = run("compare", folders[0], folders[0])
    assert done.exit_code == 0 and done.stdout.startswith("No difference in 14 rows:")
    assert len(done.stdout.splitlines()) <= 4 and not done.stderr


@pytest.mark.parametrize("format_", ["table", "markdown", "junit", "json", "github"])
def test_every_format_goes_to_stdout_and_the_page_to_its_file(
    folders: tuple[Path, Path], tmp_path: Path, format_: str
) -> None:
    page = tmp_path / "page.html"
    done = run("compare", *folders, "--format", format_, "-o", page)
    assert done.exit_code == 1 and done.stdout and str(page) in done.stderr
    assert page.read_text().startswith("<!doctype html>")
    if format_ == "json":
        validate(done.stdout)
        assert run("compare", *folders, "--json").stdout == done.stdout


def test_thresholds_from_a_file(folders: tuple[Path, Path], tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("time: 0.2\n")
    assert run("compare", *folders, "--thresholds", limits).exit_code == 0
    limits.write_text("time: 0.2\nspeed: 1\n")
    wrong = run("compare", *folders, "--thresholds", limits)
    assert wrong.exit_code == 2 and "limits.yaml:2: speed: unknown key" in wrong.stderr
    absent = run("compare", *folders, "--thresholds", tmp_path / "none.yaml")
    assert absent.exit_code == 2 and "none.yaml" in absent.stderr


def test_bad_input_exits_2_and_says_what(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, new = folders
    other = write_sweep(changed(small_sweep(), device_name="NVIDIA H100"), tmp_path / "other")
    refused = run("compare", base, other)
    assert refused.exit_code == 2 and "NVIDIA H200 against NVIDIA H100" in refused.stderr
    assert run("compare", base, other, "--allow", "device", "--fail-on", "none").exit_code == 0
    assert "none of device" in run("compare", base, new, "--allow", "gpu").stderr
    assert "none of step_us" in run("compare", base, new, "--times", "speed").stderr
    assert run("compare", base, tmp_path / "nothing").exit_code == 2
    lines = (new / CELLS_FILE).read_text().splitlines()
    (new / CELLS_FILE).write_text("\n".join([*lines[:2], "{}", *lines[2:]]) + "\n")
    damaged = run("compare", base, new)
    assert damaged.exit_code == 2 and f"{CELLS_FILE}:3: damaged line" in damaged.stderr


def test_other_times_on_request(folders: tuple[Path, Path]) -> None:
    rows = json.loads(run("compare", *folders, "--json", "--times", "host_us,plan_us").stdout)["rows"]
    assert {row["what"]["quantity"] for row in rows if row["unit"] == "us"} == {"host_us", "plan_us"}


def test_a_runner_without_a_gpu_exits_neutrally_and_says_so(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphtune.device.list_gpus", lambda: ((), "NVML: no driver"))
    on_cpu = write_sweep(cpu_sweep(), tmp_path / "cpu")
    for new in (on_cpu, tmp_path / "never-swept"):
        for format_ in ("table", "markdown", "junit", "json", "github"):
            done = run("compare", folders[0], new, "--neutral-without-gpu", "--format", format_)
            assert done.exit_code == 0 and "this machine has no GPU (NVML: no driver)" in done.stdout
    assert run("compare", folders[0], on_cpu).exit_code == 2, "only when asked for"
    assert run("compare", *folders, "--neutral-without-gpu").exit_code == 1, "a GPU sweep is compared anywhere"
    monkeypatch.setattr("graphtune.device.list_gpus", lambda: (("a card",), None))
    assert run("compare", folders[0], on_cpu, "--neutral-without-gpu").exit_code == 2, "a card that was not used"


def test_a_baseline_is_equal_to_its_sweep_and_the_same_bytes_again(folders: tuple[Path, Path], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert run("baseline", "update", folders[0], "--to", kept).stdout.strip() == str(kept)
    assert sorted(path.name for path in kept.iterdir()) == [".gitattributes", "cells.jsonl", "run.json", "values.csv"]
    first = {path.name: path.read_bytes() for path in kept.iterdir()}
    original = read_sweep(folders[0])
    again = write_sweep(replace(original, cells=original.cells[::-1]), tmp_path / "again")
    assert run("baseline", "update", again, "--to", kept).exit_code == 0
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == first
    assert read_sweep(kept).cells == original.cells
    assert run("compare", kept, folders[0]).exit_code == 0


def test_a_baseline_changes_line_by_line(folders: tuple[Path, Path], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    run("baseline", "update", folders[0], "--to", kept)
    before = (kept / "values.csv").read_text().splitlines()
    run("baseline", "update", folders[1], "--to", kept)
    after = (kept / "values.csv").read_text().splitlines()
    differing = [one for one, other in zip(before, after, strict=True) if one != other]
    assert len(differing) == 32 and all("_us," in line for line in differing)
    assert before[1] == '"decode graph gpu_us, 1 request at 1024",1,' + before[1].rpartition(",")[2]


def test_baselines_lie_in_a_folder_of_their_own_and_few_processes_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_sweep(small_sweep(), tmp_path / "reports" / "mine")
    done = run("baseline", "update", folder)
    assert done.stdout.strip() == "baselines/mine" and "--rounds 3" in done.stderr
    assert read_sweep(tmp_path / "baselines" / "mine").cells


def test_a_sweep_with_gaps_is_no_baseline(tmp_path: Path) -> None:
    unfinished = write_sweep(replace(small_sweep(), finished_at=None), tmp_path / "unfinished")
    failed = write_sweep(h200_sweep(), tmp_path / "failed")
    for folder, told in ((unfinished, "not finished"), (failed, "is oom"), (tmp_path / "none", "no such sweep")):
        done = run("baseline", "update", folder, "--to", tmp_path / "kept")
        assert done.exit_code == 2 and told in done.stderr
    assert not (tmp_path / "kept").exists()
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert run("baseline", "update", write_sweep(small_sweep(), tmp_path / "ok"), "--to", occupied).exit_code == 2
