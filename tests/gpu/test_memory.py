"""Memory of captured lists on the GPU: it returns between lists, is predicted, and graphs tell what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphtune.memory_cells import is_held_out, memory_cells
from graphtune.plan import Cell
from graphtune.recipe_keys import MemoryChoice
from graphtune.tune.memory_prediction import memory_predictor
from graphtune.units import MIB
from graphtune.worker.engine import Engine, build
from graphtune.worker.graphs.contents import driver_bindings
from graphtune.worker.measurement import LEFTOVER_LIMIT_BYTES, Measurement
from graphtune.worker.memory import Ledger
from graphtune.worker.nvml import Gpu
from tests.synthetic import cell_result
from tests.test_memory_cells import lists_of
from tests.worker import tiny

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
CONFIG = {
    **tiny.CONFIG,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
}
SIZES = (1, 4, 16, 48, 96, 160, 256)


def cell(**changes: Any) -> Cell:
    base = tiny.cell(
        model_config=CONFIG, dtype="bfloat16", attention="flashinfer", kv_tokens=64 * 1200, latency=(), gate=False
    )
    return replace(base, **changes)


def measured(of: Cell, change: Callable[[Engine], None] = lambda engine: None) -> Measurement:
    gpu = Gpu(0)
    ledger = Ledger(gpu)
    torch.cuda.set_stream(torch.cuda.Stream())
    with torch.inference_mode():
        engine = build(of, DEVICE, lambda stage: None)
        engine.warm_up()
        ledger.mark("eager_warmup")
        change(engine)
        made = Measurement(of, engine, ledger, gpu, lambda *_: None)
        made.run()
    return made


@pytest.mark.first
def test_held_out_lists_are_predicted_and_memory_returns_between_lists() -> None:
    (memory,) = memory_cells((cell(lists=lists_of(SIZES)),), MemoryChoice(fit=2, held_out=4), "gpu")
    done = measured(memory)
    leftover = {(of.list.name, of.list.output): of.leftover_bytes or 0 for of in done.captured_lists}
    assert {of: left for of, left in leftover.items() if abs(left) > LEFTOVER_LIMIT_BYTES} == {}
    assert done.unmeasured == () and len(done.captured_lists) == len(memory.lists)
    found = memory_predictor([cell_result(done.captured_lists, [], purpose="memory", with_ledger=False)])
    assert found is not None
    held_out = [one for one in found.checked if is_held_out(one.prediction.of)]
    assert len(held_out) == 8
    for one in held_out:
        assert abs(one.error_bytes) <= max(0.02 * one.measured_bytes, 16 * MIB), one


def test_a_capture_that_fails_half_way_sends_the_other_lists_to_a_fresh_process() -> None:
    def breaks_size_four(engine: Engine) -> None:
        forward = engine.eager.forward

        def reads_the_host(batch: Any) -> torch.Tensor:
            logits = forward(batch)
            return logits * float(logits.sum().item()) if batch.padded_size == 4 else logits

        engine.eager.forward = reads_the_host  # type: ignore[method-assign]

    lists = lists_of((1, 4, 16))
    done = measured(cell(lists=lists), breaks_size_four)
    (captured,) = done.captured_lists
    assert captured.status == "capture_failed" and "size 4" in str(captured.reason)
    assert done.unmeasured == lists[1:]


@pytest.mark.skipif(driver_bindings() is None, reason="cuda-bindings is not installed")
def test_graphs_tell_their_kernels() -> None:
    (captured,) = measured(cell(lists=lists_of((1, 16))[:1])).captured_lists
    for capture in captured.captures:
        assert capture.kernels is not None
        assert sum(kernel.nodes for kernel in capture.kernels) == capture.nodes
        layers = CONFIG["num_hidden_layers"]
        assert (
            sum(kernel.nodes for kernel in capture.kernels if "BatchDecode" in kernel.name or "Prefill" in kernel.name)
            >= layers
        )
