from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.errors import InputError
from graphtune.store import Sweep
from graphtune.tune import sweep_choice
from graphtune.tune.sweep_choice import choose_sweep
from tests.synthetic import cpu_sweep, small_sweep, write_sweep

CONFIG = {"model_type": "llama", "hidden_size": 4096}


def named(model: str, finished_at: str | None, device: str = "cuda") -> Sweep:
    of = small_sweep((1, 2, 4, 8), processes=2, device=device)
    return replace(
        of, model_name=model, recipe_name=f"{model}-recipe", finished_at=finished_at, recipe={"model": CONFIG}
    )


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with sweeps under ./reports and a shipped one elsewhere."""
    write_sweep(named("old", "2026-01-01T00:00:00+00:00"), tmp_path / "reports" / "old")
    write_sweep(named("new", "2026-02-01T00:00:00+00:00"), tmp_path / "reports" / "a" / "new")
    write_sweep(named("running", None), tmp_path / "reports" / "running")
    write_sweep(replace(cpu_sweep(), finished_at="2026-03-01T00:00:00+00:00"), tmp_path / "reports" / "cpu")
    shipped = write_sweep(named("shipped", "2025-01-01T00:00:00+00:00"), tmp_path / "elsewhere")
    monkeypatch.setattr(sweep_choice, "_shipped", lambda: sweep_choice.read_sweep(shipped))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "reports"


def test_the_newest_finished_cuda_sweep_answers(reports: Path) -> None:
    assert choose_sweep().model_name == "new"
    assert choose_sweep(model="old").model_name == "old"
    assert choose_sweep(model="OLD-recipe").model_name == "old"


def test_without_reports_the_shipped_sweep_answers(reports: Path, tmp_path: Path) -> None:
    assert choose_sweep(reports=tmp_path / "nowhere").model_name == "shipped"
    assert choose_sweep(model="shipped").model_name == "shipped"


def test_a_cpu_sweep_answers_only_when_named(reports: Path) -> None:
    assert choose_sweep(reports / "cpu").device == "cpu"
    with pytest.raises(InputError):
        choose_sweep(model="synthetic-tiny")


def test_a_model_that_was_not_swept_is_refused_naming_those_that_were(reports: Path) -> None:
    with pytest.raises(InputError) as caught:
        choose_sweep(model="llama-70b")
    assert all(name in (caught.value.action or "") for name in ("old", "new", "shipped"))
    with pytest.raises(InputError):
        choose_sweep(reports / "old", model="new")


def test_a_model_can_be_named_by_its_config(reports: Path, tmp_path: Path) -> None:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    assert choose_sweep(reports / "old", model=str(path)).model_name == "old"
    assert choose_sweep(model=str(path.parent)).model_name == "new"
    path.write_text(json.dumps({**CONFIG, "hidden_size": 1}))
    with pytest.raises(InputError):
        choose_sweep(model=str(path))
    path.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        choose_sweep(model=str(path))


def test_a_sweep_is_named_once(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_choice, "_shipped", lambda: sweep_choice.read_sweep((reports / "old").resolve()))
    with pytest.raises(InputError) as caught:
        choose_sweep(model="llama-70b")
    assert (caught.value.action or "").count("old (") == 1


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["recommend", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_data_goes_to_stdout_and_notes_to_stderr(reports: Path) -> None:
    code, out, err = run("--gpu-mem", "80", "--engine", "sglang")
    assert code == 0
    assert out.startswith("new on NVIDIA H200, 2026-02-01, reports/a/new\n")
    assert "warning:" in err and "warning:" not in out


@pytest.mark.parametrize("flags", [["--json"], ["--format", "json"]])
def test_json_is_all_of_stdout(reports: Path, flags: list[str]) -> None:
    code, out, err = run(str(reports / "old"), "--engine", "tensorrt-llm", *flags)
    data = json.loads(out)
    assert code == 0 and not err
    assert list(data["engines"]) == ["tensorrt_llm"] and data["sweep"]["model"] == "old"


def test_nothing_fits_is_a_finding_with_its_reason(reports: Path) -> None:
    code, out, _ = run("--gpu-mem", "16")
    assert code == 1 and "short by" in out
    code, out, _ = run("--gpu-mem", "80", "--max-graph-mem", "1MiB", "--json")
    assert code == 1 and json.loads(out)["status"] == "nothing_fits"


def test_traffic_beyond_every_measured_size_is_a_finding(reports: Path) -> None:
    code, out, _ = run("--workload", "steady 20")
    assert code == 1 and "no step within the measured sizes" in " ".join(out.split())
    code, out, _ = run("--workload", "steady 20", "--json")
    assert code == 1 and json.loads(out)["status"] == "partial"


@pytest.mark.parametrize(
    "flags",
    [
        ["--gpu-mem", "much"],
        ["--max-graph-mem", "5"],
        ["--max-capture-time", "soon"],
        ["--max-running", "0"],
        ["--engine", "tgi"],
        ["--model", "gpt-5"],
        ["--workload", "steady many"],
        ["--objective", "cheap"],
        ["--slo-itl-ms", "0"],
        ["--load", "2"],
        ["no/such/folder"],
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(reports: Path, flags: list[str]) -> None:
    code, out, err = run(*flags)
    assert code == 2 and not out
    assert "Traceback" not in err and err.strip()


def test_limits_reach_the_question(reports: Path) -> None:
    limits = ["--max-graphs", "2", "--max-capture-time", "20s", "--max-graph-mem", "1GiB", "--min-kv-tokens", "5000"]
    code, out, _ = run("--gpu-mem", "80", "--context-len", "1024", "--max-running", "4", *limits, "--json")
    data = json.loads(out)
    assert code == 0
    assert data["limits"] == {
        "context_tokens": 1024,
        "max_running_requests": 4,
        "min_kv_tokens": 5000,
        "max_graph_bytes": 2**30,
        "max_capture_s": 20.0,
        "max_graphs": 2,
        "objective": "step",
        "slo_inter_token_us": None,
    }
    assert all(len(one["decode"]["capture_sizes"]) <= 2 for one in data["engines"].values())
    _, out, _ = run("--eager-overhead-ms", "8", "--json")
    assert json.loads(out)["eager_overhead_us"] == 8000.0


@pytest.mark.parametrize(
    "options",
    [
        ("--load", "4"),
        ("--prefill-tokens-per-s", "9000"),
        ("--chunk-size", "512"),
        ("--eager-overhead-ms", "inf"),
        ("--slo-itl-ms", "nan"),
    ],
    ids=str,
)
def test_options_that_cannot_count_are_refused_by_name(reports: Path, options: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["recommend", *options])
    assert done.exit_code == 2 and f"{options[0]}: " in done.output and "Traceback" not in done.output
