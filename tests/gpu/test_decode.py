"""Decode on the GPU with FlashInfer: the gate, a plan that is not renewed, a capture that fails, memory of a list."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graphtune.results import CaptureList
from graphtune.worker.comparison import relative_error
from graphtune.worker.engine import Engine, build
from graphtune.worker.gate import check_list
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.runners.base import CaptureFailure
from graphtune.worker.runners.decode import GraphDecode
from graphtune.worker.runners.series import BatchSeries, make_batches
from tests.worker import tiny

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
CONFIG = {
    **tiny.CONFIG,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture(params=["tensor cores", "cuda cores"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(CONFIG if request.param == "tensor cores" else {**CONFIG, "num_key_value_heads": 4})


def make_engine(config: dict[str, Any]) -> Engine:
    cell = replace(tiny.cell(), model_config=config, dtype="bfloat16", attention="flashinfer", kv_tokens=64 * 1200)
    cell = replace(cell, lists=(tiny.capture_list(1, 2, 4, 8, 16, 32, 256),))
    torch.cuda.set_stream(torch.cuda.Stream())
    with torch.inference_mode():
        made = build(cell, DEVICE, lambda stage: None)
        made.warm_up()
    return made


def captured(engine: Engine, capture_list: CaptureList) -> GraphDecode:
    runner = engine.decode_runner(capture_list)
    with torch.inference_mode():
        outcomes = list(runner.capture())
    assert not any(isinstance(outcome, CaptureFailure) for _, outcome in outcomes)
    return runner


@pytest.mark.parametrize(
    "settings", [{}, {"order": "ascending"}, {"output": "per_size", "workspace": "per_size"}], ids=str
)
def test_the_gate_is_green_bit_for_bit_at_the_padded_size(engine: Engine, settings: dict[str, str]) -> None:
    runner = captured(engine, tiny.capture_list(1, 2, 4, 8, 16, 32, **settings))
    with torch.inference_mode():
        checks = check_list(runner, seed=1)
    assert len(checks) == 6
    for check in checks:
        assert check.passed and check.equal_at_padded and check.kv_untouched, check
    runner.tear_down()


def replay_with_another_sizes_plan() -> None:
    """The same lengths planned for another size: legal values, and the wrong plan for this graph."""
    engine = make_engine(CONFIG)
    runner = captured(engine, tiny.capture_list(8, 32))
    with torch.inference_mode():
        lengths = np.full((1, 32), 40, dtype=np.int32)
        rows = engine.table.admit(lengths[0].tolist())
        (wide,) = make_batches(engine.table, rows=rows, lengths=lengths, vocab_size=32000, seed=1)
        right = runner.run(wide).clone()
        assert torch.equal(runner.run(wide), right)
        runner.fill(wide)
        runner.plan()
        engine.attention.plan(engine.eager.buffers.batch(8, 8), graph_size=8)
        stale = runner.backend.replay(ShapeKey(32)).clone()
        print(f"relative error {relative_error(stale, right)}")


def test_without_a_new_plan_a_replay_is_wrong() -> None:
    """Why FlashInfer's plan runs before each replay: sizes share one integer workspace, which holds one plan.

    In a process of its own: the wrong plan may also read where nothing is, and that ends every CUDA context.
    """
    code = "from tests.gpu.test_decode import replay_with_another_sizes_plan as run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode == 0:
        assert float(done.stdout.split()[-1]) > 1e-2
    else:
        assert "illegal memory access" in done.stderr, done.stderr


def test_a_size_that_cannot_be_recorded_is_named_and_the_others_work(engine: Engine) -> None:
    runner = engine.decode_runner(tiny.capture_list(2, 4, 8))
    forward = engine.eager.forward

    def reads_the_host(batch):  # type: ignore[no-untyped-def]
        logits = forward(batch)
        return logits * float(logits.sum().item()) if batch.padded_size == 4 else logits

    engine.eager.forward = reads_the_host  # type: ignore[method-assign]
    with torch.inference_mode():
        outcomes = dict(runner.capture())
        failure = outcomes[4]
        assert isinstance(failure, CaptureFailure) and "test_decode.py" in failure.reason, failure
        assert runner.sizes == (2, 8)
        engine.eager.forward = forward  # type: ignore[method-assign]
        assert all(check.passed for check in check_list(runner, seed=1))


def test_sharing_and_order_decide_the_pool(engine: Engine) -> None:
    def pool_bytes(**settings: str) -> int:
        runner = captured(engine, tiny.capture_list(*range(32, 257, 32), **settings))
        size = runner.backend.pool_bytes()
        runner.tear_down()
        torch.cuda.empty_cache()
        return size

    largest = 256 * 32000 * 2
    shared = pool_bytes()
    assert largest <= shared < 1.6 * largest
    assert pool_bytes(output="per_size") > 3 * largest


def test_a_series_steps_through_its_lengths_and_keeps_its_mean(engine: Engine) -> None:
    with torch.inference_mode():
        series = BatchSeries(engine.table, size=4, context=100, vocab_size=32000, seed=1)
    lengths = [int(series.next().seq_lens_host[0]) for _ in range(32)]
    assert lengths[:16] == lengths[16:] == list(range(93, 109))
    assert int(series.middle.seq_lens_host[0]) == 100
