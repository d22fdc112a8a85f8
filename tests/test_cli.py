"""The commands as a user meets them: exit codes, what goes to stdout, one message per error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from graphtune import __version__
from graphtune.cli.app import app
from graphtune.console import LiveProgress, PlainProgress, progress_on
from graphtune.plan import STEP_TOKENS
from graphtune.recipe import load_recipe
from graphtune.store import read_sweep

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sweeps use the fake worker; returns the folder of its behaviours."""
    folder = tmp_path / "behaviour"
    folder.mkdir()
    monkeypatch.setenv("FAKE_WORKER", str(folder))
    monkeypatch.setattr("graphtune.cell_run.WORKER", (sys.executable, str(ROOT / "tests" / "fake_worker.py")))
    page = types.ModuleType("graphtune.report")
    page.write_report = lambda sweep, out: out.write_text("page")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graphtune.report", page)
    return folder


def test_version_help_and_unknown_commands() -> None:
    assert run("--version").stdout == f"graphtune {__version__}\n"
    shown = run("--help")
    assert shown.exit_code == 0
    for command in ("recipe", "sweep", "recommend", "report", "log", "lint", "doctor"):
        assert f"\n  {command}" in shown.stdout
    assert run("sweeep").exit_code == 2
    assert run("sweep").exit_code == 2


def test_a_sweep_prints_its_folder_and_exits_0(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("sweep", QUICKSTART, "--device", "cpu", "--out", out)
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    assert "5 cells measured." in done.stderr
    assert "[1/5] process 1: dense, 4 captures, 8 step times" in done.stderr
    assert read_sweep(out).model_name == "tiny-llama"
    again = run("sweep", QUICKSTART, "--device", "cpu", "--out", out)
    assert "0 cells measured, 5 from before." in again.stderr


def test_the_default_folder_is_named_after_recipe_and_device(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("sweep", QUICKSTART, "--device", "cpu").stdout == "reports/quickstart-cpu\n"
    assert (tmp_path / "reports/quickstart-cpu/cells.jsonl").exists()


def test_a_failed_cell_is_exit_1_with_its_reason(fake: Path, tmp_path: Path) -> None:
    (fake / "main-1-1").write_text("crash")
    done = run("sweep", QUICKSTART, "--device", "cpu", "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "RuntimeError: the model fell over" in done.stderr
    assert "--retry-failed" in done.stderr


def test_rounds_overrides_and_budget_reach_the_sweep(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--device", "cpu", "--out", out, "--set", "measure.min_samples=3")
    done = run("sweep", QUICKSTART, *options, "--rounds", 3, "--time-budget", "0s")
    assert done.exit_code == 0
    assert "1 cells measured, 10 left when the time budget was used up" in done.stderr
    assert read_sweep(out).cells[0].cell["measure"]["min_samples"] == 3
    assert "10 cells measured, 1 from before." in run("sweep", QUICKSTART, *options, "--rounds", 3).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.yaml",), "graphtune: nowhere.yaml: cannot be read"),
        ((QUICKSTART, "--set", "page_size=7"), "graphtune: --set page_size=7: page_size: must be 1, 16 or 64"),
        ((QUICKSTART, "--device", "gpu"), "graphtune: --device: 'gpu' is not a device"),
        ((QUICKSTART, "--time-budget", "10"), "graphtune: --time-budget: '10' is not a duration"),
        ((ROOT / "recipes/llama-3.1-8b.yaml", "--device", "cpu"), "model: a cell takes about "),
        ((QUICKSTART, "--device", "cpu", "--commit", "../secret"), "--commit: '../secret' is not the name of a commit"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(fake: Path, tmp_path: Path, arguments: Any, message: str) -> None:
    done = run("sweep", *arguments, *(("--out", tmp_path / "out")))
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = run("sweep", QUICKSTART, "--device", "cpu", "--out", out, "--dry-run")
    assert shown.exit_code == 0
    assert "5 processes, about" in shown.stdout
    assert "MiB" in shown.stdout
    assert "context 64: 4 sizes, graph and eager" in shown.stdout
    assert "prefill of 1 request: 8 sizes, graph and eager" in shown.stdout
    assert not out.exists()
    plan = json.loads(run("sweep", QUICKSTART, "--device", "cpu", "--dry-run", "--json").stdout)
    assert [cell["purpose"] for cell in plan["cells"]] == ["main", "main", "main", "joint", "joint"]
    assert all(cell["expected_s"] > 0 and cell["expected_bytes"] > 0 for cell in plan["cells"])


def test_a_dry_run_of_what_this_machine_cannot_hold_says_so_below_the_plan(tmp_path: Path) -> None:
    shown = run("sweep", ROOT / "recipes/llama-3.1-8b.yaml", "--device", "cpu", "--out", tmp_path / "out", "--dry-run")
    assert shown.exit_code == 2
    assert "processes, about" in shown.stdout
    assert "model: a cell takes about " in shown.stderr and "this machine has" in shown.stderr


def test_recipe_writes_what_sweep_reads(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    done = run("recipe", ROOT / "recipes/configs/qwen3-8b.json", "-o", file)
    assert (done.exit_code, done.stdout) == (0, "")
    loaded = load_recipe(file)
    assert (loaded.recipe.name, loaded.model.num_layers) == ("qwen3-8b", 36)
    assert [context.tokens for context in loaded.recipe.decode.contexts] == [1024, 512, 2048, 4096, 16384]
    again = run("recipe", ROOT / "recipes/configs/qwen3-8b.json", "-o", file)
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)
    assert run("recipe", ROOT / "recipes/configs/qwen3-8b.json", "-o", file, "--force").exit_code == 0
    assert run("recipe", tmp_path).exit_code == 2
    assert run("recipe", ROOT / "recipes/configs/qwen3-8b.json", "-o", tmp_path / "no" / "my.yaml").exit_code == 2


def test_recipe_takes_a_model_folder_and_stays_within_its_positions(tmp_path: Path) -> None:
    model = tmp_path / "My Model"
    model.mkdir()
    facts = json.loads((ROOT / "recipes/configs/tiny-llama.json").read_text()) | {"max_position_embeddings": 700}
    (model / "config.json").write_text(json.dumps(facts))
    file = tmp_path / "my.yaml"
    assert run("recipe", model, "-o", file).exit_code == 0
    loaded = load_recipe(file)
    assert loaded.recipe.model == "My Model/config.json"
    assert (loaded.recipe.name, loaded.recipe.dtype) == ("my-model", "float32")
    assert [context.tokens for context in loaded.recipe.decode.contexts] == [700 - STEP_TOKENS, 512]
    assert run("sweep", file, "--device", "cpu", "--dry-run").exit_code == 0
    shown = run("recipe", model)
    assert "name: my-model" in shown.stdout


def test_a_terminate_request_stops_a_sweep_as_ctrl_c_does(tmp_path: Path) -> None:
    behaviour = tmp_path / "behaviour"
    behaviour.mkdir()
    (behaviour / "default").write_text("hang")
    arguments = ["graphtune", "sweep", str(QUICKSTART), "--device", "cpu", "--out", str(tmp_path / "out")]
    code = (
        "import sys, graphtune.cell_run\n"
        "from tests import fake_worker\n"
        "graphtune.cell_run.WORKER = (sys.executable, fake_worker.__file__)\n"
        "from graphtune.cli.app import main\n"
        f"sys.argv = {arguments!r}\n"
        "main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAKE_WORKER": str(behaviour)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 20
    while not (behaviour / "pid").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "The same command resumes" in said
    assert "Traceback" not in said


def test_progress_is_plain_lines_unless_a_terminal_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    progress = progress_on()
    assert isinstance(progress, PlainProgress)
    progress.cell_started(1, 2, "process 1: 2 lists", 75.0, 155.0)
    progress.stage("capture", 1, 36)
    progress.stage("capture", 2, 36)
    progress.cell_ended("ok", 61.0, 80.0)
    progress.close()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "[1/2] process 1: 2 lists, about 1 min 15 s of 2 min 35 s left",
        "[1/2]   capture (36)",
        "[1/2] ok after 1 min 01 s, about 1 min 20 s left",
    ]


def test_a_terminal_gets_a_bar_with_stage_and_time_left_and_keeps_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    progress = progress_on(terminal)
    assert isinstance(progress, LiveProgress)
    progress.cell_started(1, 2, "process 1: [2] lists", 75.0, 75.0)
    progress.stage("latency at context 16384", 1, 36)
    progress._bar.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    (bar,) = {line.strip() for line in re.split(r"[\r\n]", shown) if "latency" in line}
    assert bar.startswith("[1/2] latency at context 16384 ") and "1/36" in bar
    assert bar.endswith(("about 1 min 15 s left", "about 1 min 14 s left")) and len(bar) <= 80
    progress.cell_ended("ok", 61.0, 80.0)
    progress.say("a note")
    progress.close()
    assert "[1/2] process 1: [2] lists, about 1 min 15 s" in terminal.getvalue()
    assert "[1/2] ok after 1 min 01 s" in terminal.getvalue()
    assert "a note" in terminal.getvalue()


def test_a_long_error_fits_a_terminal_and_is_one_line_for_a_pipe() -> None:
    from graphtune.cli.app import _message

    text = "graphtune: a/b.yaml: " + "words " * 40 + "\n  Do this instead, " + "more " * 30
    shown = _message(text, True)
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert shown.split() == text.split() and _message(text, False) == text
