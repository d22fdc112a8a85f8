"""FlashInfer decode attention against a float64 reference, eager and replayed, at every page size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphtune.worker.attention.sdpa import SdpaAttention
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.runners.buffers import StaticBuffers, decode_slots
from graphtune.worker.runners.series import make_batches

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def setup(page_size: int, heads: int, kv_heads: int, head_size: int):  # type: ignore[no-untyped-def]
    from graphtune.worker.attention.flashinfer import FlashInferAttention  # not installed where there is no GPU

    cache = PagedKVCache(
        layers=1,
        kv_heads=kv_heads,
        head_size=head_size,
        page_size=page_size,
        tokens=20 * 400,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    cache.fill_random(3)
    table = RequestTable(cache=cache, max_requests=17, max_context=400)
    attention = FlashInferAttention(cache, table, heads=heads, kv_heads=kv_heads, head_size=head_size, max_requests=17)
    return cache, table, attention, StaticBuffers(decode_slots(1), 17, DEVICE)


def reference(cache, table, lengths, rows, q):  # type: ignore[no-untyped-def]
    out = []
    for i, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        slots = torch.from_numpy(table.slots(np.full(length, row), np.arange(length))).to(DEVICE)
        past = cache.slots(slots)[0].double()
        keys, values = (part.repeat_interleave(q.shape[1] // past.shape[2], dim=1) for part in past)
        scores = torch.einsum("hd,thd->ht", q[i].double(), keys) * q.shape[2] ** -0.5
        out.append(torch.einsum("ht,thd->hd", scores.softmax(1), values))
    return torch.stack(out).flatten(1)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(16, 8, 128), (32, 8, 128), (14, 2, 64)])
def test_matches_float64(page_size: int, heads: int, kv_heads: int, head_size: int) -> None:
    cache, table, attention, buffers = setup(page_size, heads, kv_heads, head_size)
    sdpa = SdpaAttention(cache, table)
    rng = np.random.default_rng(page_size + heads)
    attention.bind(16, per_size=False)
    for raw, padded, graph_size in ((1, 1, None), (5, 5, None), (16, 16, 16), (11, 16, 16)):
        lengths = rng.integers(1, 390, raw, dtype=np.int32)
        rows = table.admit(lengths.tolist())
        (live,) = make_batches(table, rows=rows, lengths=lengths[None], vocab_size=10, seed=1)
        batch = buffers.fill(live, padded)
        attention.plan(batch, graph_size=graph_size)
        attention.prepare(batch)
        merged = torch.randn(padded, heads + 2 * kv_heads, head_size, device=DEVICE, dtype=torch.bfloat16)
        q, k, v = merged.split([heads, kv_heads, kv_heads], dim=1)
        got = attention.forward(0, q, k, v)[:raw]
        assert torch.equal(cache.slots(live.out_slots)[0, 0], k[:raw])
        want = reference(cache, table, lengths, rows, q[:raw])
        assert (got.double() - want).norm() / want.norm() < 1e-2
        sdpa.prepare(batch)
        plain = sdpa.forward(0, q, k, v)[:raw]
        assert (plain.double() - want).norm() / want.norm() < 1e-2
        table.release(rows)


def test_planning_ahead_does_not_disturb_the_step_that_runs() -> None:
    _, table, attention, buffers = setup(16, 32, 8, 128)
    lengths = np.full(16, 380, dtype=np.int32)
    rows = table.admit(lengths.tolist())
    (live,) = make_batches(table, rows=rows, lengths=lengths[None], vocab_size=10, seed=1)
    q = torch.randn(16, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    kv = torch.randn(16, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    (short,) = make_batches(table, rows=rows, lengths=np.full((1, 16), 2, dtype=np.int32), vocab_size=10, seed=1)

    def step(batch_of):  # type: ignore[no-untyped-def]
        batch = buffers.fill(batch_of, 16)
        attention.plan(batch, graph_size=None)
        attention.prepare(batch)
        return attention.forward(0, q, kv, kv)

    want = step(live).clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    got = step(live)
    step(short)
    torch.cuda.synchronize()
    assert torch.equal(got, want)
