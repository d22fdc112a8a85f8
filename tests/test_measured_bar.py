"""The script that replays recommended lists: what it prepares, and that it runs on a tape."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.measured_bar import STEPS_OF_A_DRAW, prepare, report, run_case
from graphtune.tune.latency_model import latency_model
from graphtune.tune.recommend import Question
from graphtune.worker.runners.decode import GraphDecode
from tests.synthetic import h200_sweep
from tests.tune.test_trace_traffic import trace
from tests.worker.tiny import capture_list, cell


def test_a_case_predicts_the_steps_that_it_draws() -> None:
    of = h200_sweep()
    case = prepare(of, Question(workload=trace(400, 0.02), prefill_tokens_per_s=30_000.0), steps=400)
    assert len(case["draws"]) == 400 // STEPS_OF_A_DRAW and case["names"][0] == "recommended"
    model = latency_model(of.cells)
    sizes = case["lists"][0]["sizes"]
    expected = []
    for requests, context in case["draws"]:
        bucket = next((size for size in sizes if size >= requests), None)
        figure = model.step(requests, bucket, context)
        assert figure is not None
        expected.append(figure.us)
    assert case["predicted_us"][0] == pytest.approx(sum(expected) / len(expected))
    assert all(requests * context < case["cell"]["kv_tokens"] for requests, context in case["draws"])


def test_it_runs_on_a_tape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lists = (capture_list(2, 4), capture_list(1, 2, 4))
    case = {
        "model": "tiny",
        "traffic": "made up",
        "draws": [(1, 60), (3, 90), (5, 40)],
        "lists": [asdict(of) for of in lists],
        "names": ["recommended", "sglang default"],
        "predicted_us": [900.0, 900.0],
        "predicted_gpu_us": [800.0, 800.0],
        "cell": asdict(replace(cell(), lists=lists, latency=(replace(cell().latency[0], sizes=(1, 3, 5)),))),
    }
    case = json.loads(json.dumps(case))
    result = run_case(case, "cpu")
    assert result["steps"] == 3 * STEPS_OF_A_DRAW and len(result["measured_us"]) == 2 and min(result["measured_us"]) > 0
    assert report([case], [result])  # a CPU misses no bar
    assert not report([case], [{**result, "on_gpu": True, "measured_us": [2000.0, 1900.0]}])
    assert report([case], [{**result, "on_gpu": True, "measured_us": [905.0, 910.0]}])
    assert capsys.readouterr().out.count("| recommended |") == 3


def test_each_list_pads_to_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = (capture_list(2, 4), capture_list(1, 3))
    like = cell()
    case = {
        "draws": [(1, 60), (3, 90)],
        "cell": asdict(replace(like, lists=lists, latency=(replace(like.latency[0], sizes=(1, 3)),))),
    }
    seen: list[tuple[int, int]] = []
    launch = GraphDecode.launch

    def watched(runner: GraphDecode) -> torch.Tensor:
        assert runner._batch is not None
        seen.append((runner._batch.raw_size, runner._batch.padded_size))
        return launch(runner)

    monkeypatch.setattr(GraphDecode, "launch", watched)
    run_case(json.loads(json.dumps(case)), "cpu")
    assert set(seen) == {(1, 2), (3, 4), (1, 1), (3, 3)}
    assert seen[0] == (1, 2) and seen[-1] == (3, 4)  # the order turns with every draw
