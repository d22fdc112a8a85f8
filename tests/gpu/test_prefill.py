"""Prefill on the GPU: FlashInfer against the reference, breakable replay against eager, memory of deep models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from graphtune.plan import Cell
from graphtune.results import CaptureList
from graphtune.worker.attention.base import PrefillAttention
from graphtune.worker.attention.sdpa import SdpaPrefill
from graphtune.worker.comparison import relative_error
from graphtune.worker.engine import build
from graphtune.worker.gate import check_list
from graphtune.worker.graphs.cuda_breakable import CudaBreakable
from graphtune.worker.graphs.full import FullBackend
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.measurement import check_runner
from graphtune.worker.prefill_gate import check_prefill
from graphtune.worker.runners.base import CaptureFailure
from graphtune.worker.runners.prefill import EagerPrefill
from tests.worker import tiny as decode_tiny
from tests.worker import tiny_prefill as tiny

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SIZES = (4, 16, 64, 256, 512)
CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture(autouse=True)
def stream() -> None:
    torch.cuda.set_stream(torch.cuda.Stream())


def flashinfer_prefill(cache: PagedKVCache, table: RequestTable) -> PrefillAttention:
    from graphtune.worker.attention.flashinfer_prefill import FlashInferPrefill  # not installed where there is no GPU

    kv_heads, head_size = cache.pool.shape[-2:]
    return FlashInferPrefill(
        cache, table, heads=8, kv_heads=kv_heads, head_size=head_size, max_tokens=512, max_requests=8
    )


def eager(attention: Any = flashinfer_prefill, **changes: Any) -> EagerPrefill:
    given: dict[str, Any] = {"page_size": 16, **CONFIG, **changes}
    return tiny.eager(
        attention=attention,
        max_tokens=512,
        max_requests=8,
        max_context=400,
        kv_tokens=16_000,
        device=DEVICE,
        dtype=torch.bfloat16,
        **given,
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_flashinfer_agrees_with_the_reference(page_size: int, kv_heads: int) -> None:
    runner = eager(page_size=page_size, num_key_value_heads=kv_heads)
    reference = SdpaPrefill(runner.cache, runner.table)
    random = np.random.default_rng(page_size + kv_heads)
    with torch.inference_mode():
        for lengths, prefixes, padded in (([7], [0], 8), ([1, 90, 33], [300, 17, 0], 128), ([400], [0], 400)):
            live = tiny.live(runner, lengths, prefixes, seed=int(random.integers(100)))
            batch = runner.buffers.fill(live, padded)
            merged = torch.randn(padded, 8 + 2 * kv_heads, 128, device=DEVICE, dtype=torch.bfloat16)
            q, k, v = merged.split([8, kv_heads, kv_heads], dim=1)
            outputs = []
            for attention in (runner.attention, reference):
                attention.plan(batch)
                out = torch.full((padded, 1024), float("nan"), device=DEVICE, dtype=torch.bfloat16)
                attention.forward(1, q, k, v, out)
                assert not out[live.tokens :].any()
                outputs.append(out)
            assert torch.equal(runner.cache.slots(live.out_slots)[1, 0], k[: live.tokens])
            assert relative_error(*outputs) < 1e-2
            tiny.release(runner, live)


@pytest.mark.parametrize("attention", [flashinfer_prefill, SdpaPrefill])
@pytest.mark.parametrize("order", ["descending", "ascending"])
def test_the_gate_is_green(attention: Any, order: str) -> None:
    backend = CudaBreakable(output_rows=max(SIZES))
    runner = tiny.captured(eager(attention), *SIZES, backend=backend, order=order)
    with torch.inference_mode():
        checks = check_prefill(runner, seed=3)
    runner.tear_down()
    assert all(check.passed for check in checks), [check.reason for check in checks]
    assert all(check.equal_at_padded for check in checks)


def test_a_full_recording_passes_the_gate() -> None:
    """Attention is recorded too: a launch of fixed shape over four request slots, some without tokens."""
    runner = tiny.captured(eager(), *SIZES, backend=FullBackend(), request_slots=4)
    with torch.inference_mode():
        checks = check_prefill(runner, seed=3)
        assert all(check.passed and check.equal_at_padded for check in checks), [check.reason for check in checks]
        live = tiny.live(runner.eager, [3] * 5, [20] * 5)
        assert torch.equal(runner.run(live).clone(), runner.eager.run(live))
    assert runner.admitted["too_many_requests"] == 1
    runner.tear_down()


def test_decode_and_prefill_share_a_pool() -> None:
    """One phase's graphs use memory that the other's leave free: together they take less than the two pools."""
    alone: list[int] = []
    together: list[int] = []
    for kinds in (("decode",), ("prefill",), ("decode", "prefill"), ("prefill", "decode")):
        with torch.inference_mode():
            engine = build(joint_cell(), DEVICE, lambda stage: None)
            engine.warm_up()
            pools: list[Any] = []
            runners = [engine.runner(of, pools) for kind in kinds for of in joint_cell().lists if of.phase == kind]
            for runner in runners:
                outcomes = list(runner.capture())
                assert not any(isinstance(outcome, CaptureFailure) for _, outcome in outcomes)
            for runner in runners:
                checks = check_runner(runner, seed=1)
                assert all(one.passed and one.equal_at_padded for one in checks), [one.reason for one in checks]
            (alone if len(kinds) == 1 else together).append(runners[-1].backend.pool_bytes())
            for runner in runners:
                runner.tear_down()
    assert max(together) < sum(alone)
    assert min(together) >= max(alone) - (2 << 20)


def joint_cell() -> Cell:
    lists = (
        decode_tiny.capture_list(1, 8, 32),
        CaptureList("test", "prefill", "breakable", (16, 64, 512), waste_cap=2.0),
    )
    return decode_tiny.cell(
        model_config={**decode_tiny.CONFIG, **CONFIG},
        dtype="bfloat16",
        attention="flashinfer",
        kv_tokens=64 * 1200,
        lists=lists,
    )


@pytest.mark.parametrize("settings", [{}, {"order": "ascending"}], ids=str)
def test_breakable_decode_passes_the_gate(settings: dict[str, Any]) -> None:
    """Attention between the segments, planned for the padded size as an eager step is."""
    of = decode_tiny.capture_list(1, 4, 32, backend="breakable", **settings)
    with torch.inference_mode():
        engine = build(replace(joint_cell(), lists=(of,)), DEVICE, lambda stage: None)
        engine.warm_up()
        runner = engine.decode_runner(of)
        assert not any(isinstance(outcome, CaptureFailure) for _, outcome in runner.capture())
        checks = check_list(runner, seed=1)
        runner.tear_down()
    assert all(check.passed and check.equal_at_padded for check in checks), [check.reason for check in checks]


def test_mixed_prefills_in_turn_agree_with_eager() -> None:
    """Every step plans anew: sizes, requests and prefixes change from one replay to the next."""
    runner = tiny.captured(eager(), *SIZES, backend=CudaBreakable())
    random = np.random.default_rng(0)
    with torch.inference_mode():
        for step in range(30):
            count = int(random.integers(1, 8))
            lengths = random.integers(1, 60, count).tolist()
            live = tiny.live(runner.eager, lengths, random.integers(0, 300, count).tolist(), seed=step)
            assert relative_error(runner.run(live).clone(), runner.eager.run(live)) < 2e-2
            tiny.release(runner.eager, live)
    runner.tear_down()
    assert runner.admitted["graph"] > 5


def test_pool_bytes_do_not_grow_with_the_layers() -> None:
    pools = []
    for layers in (2, 24):
        backend = CudaBreakable()
        runner = tiny.captured(eager(num_hidden_layers=layers), 512, 64, backend=backend)
        pools.append(backend.pool_bytes())
        runner.tear_down()
    assert abs(pools[1] - pools[0]) <= 2 << 20


def test_replays_take_no_memory() -> None:
    runner = tiny.captured(eager(), 64, backend=CudaBreakable())
    with torch.inference_mode():
        live = tiny.live(runner.eager, [40, 20], [0, 33])
        replay = partial(runner.run, live)
        replay()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            replay()
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    runner.tear_down()
