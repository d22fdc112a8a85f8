"""The worker as a process: a complete result, a partial one after a kill, and no life after its parent's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from graphtune.plan import Cell, LatencyAt, PaddedTo
from graphtune.results import CellResult
from graphtune.worker.measurement import Measurement
from graphtune.worker.memory import Ledger
from tests.worker import tiny

ROOT = Path(__file__).parents[2]
RESULT = TypeAdapter(CellResult)


def command(folder: Path, cell: Cell) -> list[str]:
    (folder / "cell.json").write_text(json.dumps(asdict(cell)))
    worker = [sys.executable, "-m", "graphtune.worker"]
    return [*worker, str(folder / "cell.json"), str(folder / "result.json"), "--device", "cpu"]


def run(folder: Path, cell: Cell) -> tuple[CellResult, str]:
    ended = subprocess.run(command(folder, cell), cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr
    return RESULT.validate_json((folder / "result.json").read_text()), ended.stdout


def long_cell() -> Cell:
    return tiny.cell(measure=replace(tiny.cell().measure, min_samples=150, noise=1e-9, max_seconds=60.0))


def test_a_result_holds_everything_the_cell_asked_for(tmp_path: Path) -> None:
    lists = (tiny.capture_list(1, 2, 4, 8), tiny.capture_list(1, 2, 4, 8, output="per_size", order="ascending"))
    padded = (PaddedTo(1, (2, 8)), PaddedTo(2, (4, 16)))  # 16 is not captured
    cell = tiny.cell(lists=lists, latency=(LatencyAt((1, 4), 100, padded=padded), LatencyAt((2,), 60)))
    result, output = run(tmp_path, cell)
    assert (result.status, result.reason, result.unmeasured) == ("ok", None, ())
    assert result.cell_id == cell.id
    assert [captured.list for captured in result.captured_lists] == list(lists)
    assert [captured.position_in_process for captured in result.captured_lists] == [1, 2]
    assert all(captured.gate_green and captured.leftover_bytes == 0 for captured in result.captured_lists)
    assert result.captured_lists[0].graph_bytes == result.captured_lists[0].pool_bytes
    assert [capture.size for capture in result.captured_lists[0].captures] == [8, 4, 2, 1]
    full = [point for point in result.points if point.raw_size == point.padded_size]
    points = {(p.raw_size, p.context_tokens, p.execution) for p in full}
    assert points == {(n, c, e) for n, c in ((1, 100), (4, 100), (2, 60)) for e in ("graph", "eager")}
    in_larger = [point for point in result.points if point not in full]
    assert [(p.raw_size, p.padded_size, p.context_tokens) for p in in_larger] == [(1, 2, 100), (1, 8, 100), (2, 4, 100)]
    assert all(p.gpu_us and p.host_us is None and p.step_us is None for p in in_larger)
    for point in full:
        assert point.gpu_us and point.host_us and point.step_us
        assert (point.overlap_us is not None) == (point.execution == "graph")
        assert point.gpu_us.taken >= 3 and point.gpu_us.stop in ("noise", "time", "count")
    stages = [mark.stage for mark in result.ledger.marks] if result.ledger else []
    assert stages[:6] == ["context", "weights", "kv_cache", "workspace", "buffers", "eager_warmup"]
    assert stages[6:13] == ["before_list", *["capture"] * 4, "captured", "replayed"]
    assert result.environment and result.environment.graph_mechanism == "tape"
    assert result.admission["graph"] > 0
    assert all(json.loads(line)["stage"] for line in output.splitlines())
    assert not (tmp_path / "result.json.partial").exists()


def test_what_was_measured_survives_a_kill(tmp_path: Path) -> None:
    cell = replace(long_cell(), latency=(LatencyAt((1, 2, 4, 8), 100),))
    worker = subprocess.Popen(command(tmp_path, cell), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    for line in worker.stdout:
        stage = json.loads(line)
        if stage["stage"].startswith("latency") and stage["done"] == 1:
            break
    worker.kill()
    worker.wait(10)
    partial = RESULT.validate_json((tmp_path / "result.json.partial").read_text())
    assert partial.status == "failed" and "before its last list" in str(partial.reason)
    assert {point.raw_size for point in partial.points} >= {1}
    assert not (tmp_path / "result.json").exists()


def test_a_failure_is_a_result_with_its_reason(tmp_path: Path) -> None:
    result, _ = run(tmp_path, tiny.cell(attention="nothing"))
    assert result.status == "failed" and "'nothing'" in str(result.reason)
    assert result.unmeasured == result_lists(result)


def result_lists(result: CellResult):  # type: ignore[no-untyped-def]
    return TypeAdapter(Cell).validate_python(result.cell).lists


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the parent's death is signalled on Linux only")
def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    starter = (
        "import os, subprocess, sys, time\n"
        "os.environ['GRAPHTUNE_PARENT_PID'] = str(os.getpid())\n"
        f"worker = subprocess.Popen({command(tmp_path, long_cell())!r}, cwd={str(ROOT)!r}, stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived its parent by ten seconds")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def measure_with(cell: Cell, change) -> Measurement:  # type: ignore[no-untyped-def]
    engine = tiny.engine(cell)
    change(engine)
    measurement = Measurement(cell, engine, Ledger(None), None, lambda stage, done, total: None)
    with torch.inference_mode():
        engine.eager.warm_up((1, 2, 4))
        measurement.run()
    return measurement


def test_a_capture_that_fails_sends_the_other_lists_to_a_fresh_process() -> None:
    def breaks_size_two(engine) -> None:  # type: ignore[no-untyped-def]
        forward = engine.eager.forward

        def reads_the_host(batch):  # type: ignore[no-untyped-def]
            logits = forward(batch)
            return logits + float(logits[0, 0].item()) if batch.padded_size == 2 else logits

        engine.eager.forward = reads_the_host

    cell = tiny.cell(lists=(tiny.capture_list(1, 2, 4), tiny.capture_list(1, 4)), latency=())
    measurement = measure_with(cell, breaks_size_two)
    (captured,) = measurement.captured_lists
    assert captured.status == "capture_failed" and captured.graph_bytes is None
    assert "size 2" in str(captured.reason) and "not a memory problem" in str(captured.reason)
    assert [check.size for check in captured.gate] == [1, 4] and not captured.gate_green
    assert measurement.unmeasured == cell.lists[1:]


def test_memory_that_stays_sends_the_other_lists_to_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphtune.worker.measurement.LEFTOVER_LIMIT_BYTES", -1)
    cell = tiny.cell(lists=(tiny.capture_list(1, 2), tiny.capture_list(1, 4)), latency=())
    measurement = measure_with(cell, lambda engine: None)
    assert [captured.list for captured in measurement.captured_lists] == [cell.lists[0]]
    assert measurement.unmeasured == cell.lists[1:]
