"""Prefill on the GPU: FlashInfer against the reference, breakable replay against eager, memory of deep models."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from graphtune.worker.attention.base import PrefillAttention
from graphtune.worker.attention.sdpa import SdpaPrefill
from graphtune.worker.comparison import relative_error
from graphtune.worker.graphs.cuda_breakable import CudaBreakable
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.prefill_gate import check_prefill
from graphtune.worker.runners.prefill import EagerPrefill
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
    return FlashInferPrefill(cache, table, heads=8, kv_heads=kv_heads, head_size=head_size, max_tokens=512)


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
