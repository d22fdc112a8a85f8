"""The workflow of docs/ci.md: its commands exist, and its steps do what they should with and without a GPU."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from graphtune.compare.thresholds import load_thresholds
from tests.synthetic import Sweep, write_sweep
from tests.test_compare import noisy, timed

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "ci"
WORKFLOW: dict[Any, Any] = yaml.safe_load((FOLDER / "graphtune.yml").read_text())
STEPS = {step["name"]: step for step in WORKFLOW["jobs"]["compare"]["steps"] if "name" in step}


def test_the_example_thresholds_can_be_read() -> None:
    thresholds = load_thresholds(FOLDER / "thresholds.yaml")
    assert thresholds.tolerance["capture"] == 0.1
    assert thresholds.rule_for("decode eager step_us, 8 requests at 1024").ignore  # type: ignore[union-attr]
    assert thresholds.tolerance_of("time", "decode graph step_us, 1 request at 1024") == 0.02
    assert thresholds.tolerance_of("time", "decode graph step_us, 2 requests at 1024") == 0.01


def test_the_page_names_only_options_that_exist() -> None:
    text = (ROOT / "docs" / "ci.md").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "graphtune", "compare", "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        check=True,
        capture_output=True,
        text=True,
    )
    named = set(re.findall(r"^\| `(--[a-z-]+)", text, re.MULTILINE))
    assert len(named) >= 5 and all(option in done.stdout for option in named)
    assert re.findall(r"\]\((ci/[\w.]+|comparison.schema.json)\)", text)
    assert all((ROOT / "docs" / link).exists() for link in re.findall(r"\]\(([\w./]+)\)", text))


def run_steps(folder: Path, candidate: Sweep | None, *, gpu: bool) -> tuple[int, str]:
    """Run Sweep and Compare in a repository with a baseline; the sweep is a stand-in that copies ``candidate``."""
    (folder / "graphtune").mkdir()
    write_sweep(timed(noisy(1, own=0.001), 4), folder / "graphtune" / "baseline")
    (folder / "graphtune" / "thresholds.yaml").write_text((FOLDER / "thresholds.yaml").read_text())
    if candidate is not None:
        write_sweep(candidate, folder / "measured")
    tools = folder / "tools"
    (folder / ".graphtune" / "bin").mkdir(parents=True)
    tools.mkdir()
    real = f'exec "{sys.executable}" -m graphtune "$@"'
    sweep = 'if [ "$1" = sweep ]; then cp -r measured candidate; exit 0; fi'
    scripts = {
        folder / ".graphtune" / "bin" / "graphtune": f"#!/bin/sh\n{sweep}\n{real}\n",
        tools / "nvidia-smi": f"#!/bin/sh\nexit {0 if gpu else 9}\n",
    }
    for path, text in scripts.items():
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    environment = {
        **os.environ,
        **WORKFLOW["env"],
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    output, code = "", 0
    for name in ("Sweep", "Compare"):
        command = ["bash", "-e", "-c", STEPS[name]["run"]]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        output, code = output + done.stdout + done.stderr, done.returncode
        if code:
            break
    return code, output


def test_a_regression_fails_with_annotations_a_comment_and_a_page(tmp_path: Path) -> None:
    code, output = run_steps(tmp_path, timed(noisy(2, own=0.001, factor=1.1), 4), gpu=True)
    assert code == 1 and output.count("::error title=graphtune%3A slower") == 8
    assert "8 slower" in (tmp_path / "comparison.md").read_text() == (tmp_path / "summary.md").read_text()
    assert (tmp_path / "comparison.html").read_text().startswith("<!doctype html>")
    assert "<failure" in (tmp_path / "comparison.xml").read_text()


def test_no_regression_passes(tmp_path: Path) -> None:
    code, output = run_steps(tmp_path, timed(noisy(2, own=0.001), 4), gpu=True)
    assert code == 0 and "::error" not in output


def has_gpu() -> bool:
    from graphtune.device import list_gpus

    return bool(list_gpus()[0])


@pytest.mark.skipif(has_gpu(), reason="asks what happens without a GPU")
def test_a_runner_without_a_gpu_passes_and_says_so(tmp_path: Path) -> None:
    code, output = run_steps(tmp_path, None, gpu=False)
    assert code == 0 and "Not compared: this machine has no GPU" in output
    assert "this machine has no GPU" in (tmp_path / "summary.md").read_text()
