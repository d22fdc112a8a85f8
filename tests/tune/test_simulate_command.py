"""`graphtune simulate` on a made-up sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from graphtune.cli.app import app
from tests.synthetic import h200_sweep, write_sweep

STATED = ["--prefill-tokens-per-s", "20000", "--kv-tokens", "200000"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(h200_sweep(), tmp_path_factory.mktemp("sweep") / "made-up")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{at * 0.1:.1f},300,{20 + at % 7}\n" for at in range(200))
    path.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    return path


def run(folder: Path, trace: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["simulate", str(folder), "--workload", str(trace), *more])


def test_a_trace_is_simulated_in_words_and_numbers(folder: Path, trace: Path) -> None:
    words = run(folder, trace, *STATED)
    assert words.exit_code == 0, words.output
    assert "default of sglang" in words.stdout and "200 of 200 finished" in words.stdout
    assert all(len(line) <= 80 or " " not in line.strip() for line in words.stdout.splitlines()[1:])
    assert "as stated with --prefill-tokens-per-s, not measured" in words.stdout
    values = json.loads(run(folder, trace, *STATED, "--sizes", "1,2,4,8,16", "--json").stdout)
    assert values["sizes"] == [1, 2, 4, 8, 16] and values["list"] == "as given"
    assert values["finished"] == values["requests"] == 200 and values["overload"] is None
    assert values["generated_tokens"] == sum(20 + at % 7 for at in range(200))
    assert values["coverage"] == 1.0 and values["ttft"]["count"] == 200


def test_its_steps_are_a_workload_for_recommend(folder: Path, trace: Path, tmp_path: Path) -> None:
    written = tmp_path / "steps.json"
    assert run(folder, trace, *STATED, "-o", str(written)).exit_code == 0
    answer = CliRunner().invoke(
        app, ["recommend", str(folder), "--workload", str(written), "--engine", "sglang", "--json"]
    )
    assert answer.exit_code == 0, answer.output
    stored = tmp_path / "recommendation.json"
    stored.write_text(answer.stdout)
    again = run(folder, trace, "--prefill-tokens-per-s", "20000", "--recommendation", str(stored), "--json")
    assert again.exit_code == 0, again.output
    values = json.loads(again.stdout)
    decode = json.loads(answer.stdout)["engines"]["sglang"]["decode"]
    assert values["sizes"] == decode["capture_sizes"] and values["kv_tokens"] == decode["kv_tokens"]
    stored.write_text(answer.stdout.replace('"model": "synthetic-8b"', '"model": "another-9b"'))
    other = run(folder, trace, "--prefill-tokens-per-s", "20000", "--recommendation", str(stored))
    assert other.exit_code == 2 and "was written for another-9b, and this sweep is of synthetic-8b" in other.stderr


def test_overload_is_a_finding(folder: Path, trace: Path) -> None:
    crowded = run(folder, trace, *STATED, "--max-running", "4", "--load", "180%")
    assert crowded.exit_code == 1, crowded.output
    assert "OVERLOAD: requests wait" in crowded.stdout and "first token: not told" in crowded.stdout
    assert run(folder, trace, *STATED, "--max-running", "4", "--load", "60%").exit_code == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--kv-tokens", "200000"], "--prefill-tokens-per-s: this sweep holds no prefill times"),
        (["--prefill-tokens-per-s", "20000"], "--kv-tokens: how many tokens"),
        ([*STATED, "--load", "fast"], "--load: 'fast' is no load"),
        ([*STATED, "--load", "0"], "--load: '0' is no load"),
        ([*STATED, "--sizes", "1,x"], "--sizes: '1,x' is no list of sizes"),
        ([*STATED, "--max-running", "100000"], "no step time for"),
        ([*STATED, "--recommendation", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
)
def test_what_is_missing_or_senseless_is_refused(folder: Path, trace: Path, given: list[str], says: str) -> None:
    refused = run(folder, trace, *given)
    assert refused.exit_code == 2 and not refused.stdout
    assert says in refused.stderr


def test_a_sweep_alone_is_no_question(folder: Path) -> None:
    refused = CliRunner().invoke(app, ["simulate", str(folder)])
    assert refused.exit_code == 2 and "--workload" in refused.stderr
