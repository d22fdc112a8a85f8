"""A sweep's figures fitted to what a server's log says of its own graphs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.errors import Finding, InputError
from graphtune.tune.calibrate import Calibration, Line, calibrate, step_readings
from graphtune.tune.latency_model import latency_model
from graphtune.tune.memory_model import GraphCost, memory_model
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation_text import as_text
from graphtune.units import GIB, MIB
from tests.synthetic import write_sweep
from tests.tune.answers import SPARSE, checked

MEMORY, LATENCY = memory_model(SPARSE.cells), latency_model(SPARSE.cells)
POWERS, COARSE = (1, 2, 4, 8, 16, 32, 64), (1, 8, 24, 64)
STAMP = "[2026-07-01 10:00:00 TP0]"


def cost(sizes: tuple[int, ...]) -> GraphCost:
    found = MEMORY.cost(sizes, checked=False)
    assert found is not None
    return found


def capture(sizes: Sequence[int], used_bytes: float, seconds: float) -> list[str]:
    gib = used_bytes / GIB
    return [
        f"{STAMP} Capture cuda graph begin. This can take up to several minutes. avail mem=40.00 GB",
        f"{STAMP} Capture cuda graph bs {list(sizes)}",
        f"{STAMP} Capture cuda graph end. Time elapsed: {seconds:.2f} s. mem usage={gib:.2f} GB. avail mem=30.00 GB.",
    ]


def decode(requests: int, us: float, graph: bool, context: int = 1024) -> str:
    return (
        f"{STAMP} Decode batch. #running-req: {requests}, #token: {requests * context}, token usage: 0.10, "
        f"cuda graph: {graph}, gen throughput (token/s): {requests / us * 1e6:.2f}, #queue-req: 0"
    )


def log(folder: Path, lines: list[str]) -> str:
    file = folder / "server.log"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_one_list_gives_an_offset_in_bytes_and_a_slope_in_seconds(tmp_path: Path) -> None:
    of = cost(POWERS)
    assert of.capture_s is not None
    said = of.graph_bytes + 512 * MIB
    found = calibrate(log(tmp_path, capture(POWERS, said, 3 * of.capture_s)), None, MEMORY, LATENCY)
    assert found.engine == "sglang" and found.lists == 1
    assert found.bytes_line is not None and found.bytes_line.slope == 1
    assert found.bytes_line.offset == pytest.approx(512 * MIB, abs=0.006 * GIB)
    assert found.seconds_line is not None and found.seconds_line.offset == 0
    assert found.seconds_line.slope == pytest.approx(3, abs=0.05)
    assert "were predicted" in found.sentence


def test_two_lists_give_offset_and_slope(tmp_path: Path) -> None:
    lines = []
    for sizes in (POWERS, COARSE):
        lines += capture(sizes, 300 * MIB + 50 * cost(sizes).graph_bytes, 1 + 2 * (cost(sizes).capture_s or 0))
    found = calibrate(log(tmp_path, lines), "sglang", MEMORY, LATENCY)
    assert found.lists == 2
    assert found.bytes_line is not None
    assert found.bytes_line.offset == pytest.approx(300 * MIB, abs=100 * MIB)
    assert found.bytes_line.slope == pytest.approx(50, rel=0.1)


def test_steps_off_graph_give_the_eager_overhead_and_steps_on_one_the_ratio(tmp_path: Path) -> None:
    eager, graph = LATENCY.eager(16, 1024), LATENCY.graph(8, 1024)
    assert eager is not None and graph is not None
    lines = [decode(16, eager.us + 5000, False)] * 4 + [decode(8, graph.us * 1.5, True)] * 4
    found = calibrate(log(tmp_path, lines), None, MEMORY, LATENCY)
    assert found.eager_overhead_us == pytest.approx(5000, rel=0.01)
    assert found.graph_ratio == pytest.approx(1.5, rel=0.01)
    assert (found.bytes_line, found.seconds_line) == (None, None)


def test_a_throughput_over_steps_of_several_sizes_or_with_a_prefill_between_says_nothing() -> None:
    lines = [
        decode(4, 100.0, True),
        decode(8, 100.0, True),
        decode(8, 100.0, True),
        f"{STAMP} Prefill batch. #new-seq: 1, #new-token: 100, cuda graph: False",
        decode(8, 100.0, True),
    ]
    assert len(list(step_readings(line.encode() for line in lines))) == 1  # type: ignore[arg-type]


@given(st.floats(-1e9, 1e10), st.floats(0.1, 10), st.integers(0, 10**10))
def test_a_cost_is_moved_with_its_interval(offset: float, slope: float, graph_bytes: int) -> None:
    of = GraphCost(cost(POWERS).of, "measured", graph_bytes, (graph_bytes, graph_bytes), graph_bytes, 0, 1.0, ())
    made = Calibration("sglang", "log", 1, Line(offset, slope), Line(0.5, 2.0), None, None, "").cost(of)
    assert made.graph_bytes == round(offset + slope * graph_bytes) and made.provenance == "predicted"
    assert made.interval is not None and made.interval[0] <= max(0, made.graph_bytes) and made.capture_s == 2.5


def test_only_the_engine_of_the_log_is_calibrated(tmp_path: Path) -> None:
    eager = LATENCY.eager(16, 1024)
    assert eager is not None
    lines = capture(POWERS, cost(POWERS).graph_bytes + GIB, 9.0) + [decode(16, eager.us + 5000, False)] * 3
    file = log(tmp_path, lines)
    plain, fitted = (recommend(SPARSE, Question(gpu_mem="80", calibrate=source)) for source in (None, file))
    before, after = checked(plain), checked(fitted)
    assert after["calibration"]["engine"] == "sglang" and before["calibration"] is None
    assert after["engines"]["vllm"] == before["engines"]["vllm"]
    for data, least in ((before, 0), (after, GIB)):
        assert data["engines"]["sglang"]["decode"]["graph_bytes"] >= least
    moved = (
        after["engines"]["sglang"]["eager"]["expected_step_us"]
        - before["engines"]["sglang"]["eager"]["expected_step_us"]
    )
    assert moved == pytest.approx(5000, rel=0.01)
    assert "Calibrated: figures of SGLang" in as_text(fitted)


def test_files_that_cannot_calibrate(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        calibrate(str(tmp_path / "none.log"), None, MEMORY, LATENCY)
    with pytest.raises(Finding, match="--calibrate"):
        calibrate(log(tmp_path, capture((3, 5, 500), GIB, 1.0)), None, MEMORY, LATENCY)


def test_the_command(tmp_path: Path) -> None:
    folder = str(write_sweep(SPARSE, tmp_path / "sweep"))
    file = log(tmp_path, capture(POWERS, GIB, 3.0))
    done = CliRunner().invoke(app, ["recommend", folder, "--gpu-mem", "80", "--calibrate", file, "--json"])
    data: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == 0 and data["calibration"]["lists"] == 1
    done = CliRunner().invoke(app, ["recommend", folder, "--gpu-mem", "80", "--calibrate", str(tmp_path / "x")])
    assert done.exit_code == 2 and "Traceback" not in done.output
