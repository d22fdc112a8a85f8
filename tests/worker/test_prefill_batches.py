"""Prefill batches: padding of the static buffers, chunks, and attention against dense models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.model_config import ModelConfig
from graphtune.worker.models.decoder import Decoder
from graphtune.worker.runners.prefill_buffers import (
    REQUEST_SLOTS,
    TOKEN_SLOTS,
    LivePrefill,
    PrefillBuffers,
    chunked,
    live_prefill,
    sink_prefill,
)
from tests.worker import tiny_prefill as tiny
from tests.worker.models.tiny_checkpoints import save_checkpoint

CPU = torch.device("cpu")


def some_prefill(lengths: list[int]) -> LivePrefill:
    tokens, n = sum(lengths), len(lengths)
    return LivePrefill(
        token_rows=torch.stack([torch.arange(first, tokens + first, dtype=torch.int32) for first in (1, 11, 101)]),
        req_rows=torch.arange(1, n + 1, dtype=torch.int32),
        extend_lens=torch.tensor(lengths, dtype=torch.int32),
        prefix_lens=torch.full((n,), 7, dtype=torch.int32),
    )


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    extra=st.integers(0, 6),
    slots=st.none() | st.integers(5, 8),
    stale=st.integers(1, 1000),
)
@settings(max_examples=80, deadline=None)
def test_heads_are_the_batch_and_tails_are_padding(
    lengths: list[int], extra: int, slots: int | None, stale: int
) -> None:
    buffers = PrefillBuffers(40, 8, CPU)
    for tensor in buffers.tensors.values():
        tensor.fill_(stale)
    live, raw, n = some_prefill(lengths), sum(lengths), len(lengths)
    batch = buffers.fill(live, raw + extra, slots)
    assert (batch.raw_tokens, batch.padded_tokens, batch.requests) == (raw, raw + extra, n)
    for name in TOKEN_SLOTS:
        rows = getattr(batch, name)
        assert rows[:raw].tolist() == getattr(live, name).tolist()
        assert rows.shape[0] == raw + extra and rows[raw:].eq(0).all()
    starts = [sum(lengths[:i]) for i in range(n)]
    empty = (slots or n) - n
    assert batch.extend_lens.tolist() == lengths + [0] * empty
    assert batch.extend_starts.tolist() == starts + [raw] * empty
    assert batch.prefix_lens.tolist() == [7] * n + [0] * empty
    assert batch.req_rows.tolist() == list(range(1, n + 1)) + [0] * empty
    assert batch.last_rows.tolist() == [start + n - 1 for start, n in zip(starts, lengths, strict=True)] + [0] * empty
    for name in REQUEST_SLOTS:
        assert batch.host[name].tolist() == getattr(batch, name).tolist()


def test_addresses_never_change() -> None:
    buffers = PrefillBuffers(40, 8, CPU)
    before = {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    for lengths, padded in (([3, 4], 8), ([1], 1), ([20, 20], 40)):
        batch = buffers.fill(some_prefill(lengths), padded)
        assert all(getattr(batch, name).data_ptr() == pointer for name, pointer in before.items())
    buffers.reset()
    assert {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()} == before
    assert all(not tensor.any() for tensor in buffers.tensors.values())


@pytest.mark.parametrize(("lengths", "padded"), [([8], 7), ([8], 41), ([1] * 9, 9)])
def test_what_does_not_fit_is_refused(lengths: list[int], padded: int) -> None:
    with pytest.raises(ValueError, match="do not fit buffers of 40 tokens and 8 requests"):
        PrefillBuffers(40, 8, CPU).fill(some_prefill(lengths), padded)


@given(tokens=st.integers(1, 200), longest=st.integers(1, 64))
def test_a_sink_prefill_has_as_few_requests_as_hold_it(tokens: int, longest: int) -> None:
    live = sink_prefill(tokens, longest, CPU)
    assert live.tokens == tokens and live.requests == -(-tokens // longest)
    assert int(live.extend_lens.sum()) == tokens and live.longest <= longest
    assert not live.out_slots.any() and not live.req_rows.any()
    assert live.positions.tolist() == [i for n in live.extend_lens.tolist() for i in range(n)]


prompts = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), max_size=8)


@given(prompts=prompts, chunk_tokens=st.integers(1, 40), max_requests=st.integers(1, 4))
def test_chunks_hold_every_new_token_once_in_order(
    prompts: list[tuple[int, int]], chunk_tokens: int, max_requests: int
) -> None:
    cached = [prefix for prefix, _ in prompts]
    lengths = [prefix + new for prefix, new in prompts]
    batches = chunked(lengths, cached_lens=cached, chunk_tokens=chunk_tokens, max_requests=max_requests)
    chunks = [chunk for batch in batches for chunk in batch]
    covered = [(chunk.request, token) for chunk in chunks for token in range(chunk.start, chunk.stop)]
    assert covered == [(i, token) for i, (start, stop) in enumerate(zip(cached, lengths, strict=True))
                       for token in range(start, stop)]  # fmt: skip
    for batch in batches:
        assert sum(chunk.stop - chunk.start for chunk in batch) <= chunk_tokens
        assert len({chunk.request for chunk in batch}) == len(batch) <= max_requests
    for batch in batches[:-1]:
        assert sum(chunk.stop - chunk.start for chunk in batch) == chunk_tokens or len(batch) == max_requests


@pytest.mark.parametrize(("length", "cached"), [(4, 4), (4, 5), (4, -1)])
def test_a_prompt_without_new_tokens_is_refused(length: int, cached: int) -> None:
    with pytest.raises(ValueError, match="one at least must be new"):
        chunked([length], cached_lens=[cached], chunk_tokens=8, max_requests=2)


PROMPTS = (29, 3, 44, 12)


@pytest.mark.parametrize("name", ["llama3.1", "qwen3", "qwen2_tied"])
@pytest.mark.parametrize("chunk_tokens", [88, 32, 7])
@pytest.mark.parametrize("path", ["eager", "replay"])
def test_chunked_prefill_agrees_with_a_dense_model(name: str, chunk_tokens: int, path: str, tmp_path: Path) -> None:
    """Prompts of different lengths, several at once and in chunks, against transformers' forward of each whole prompt.

    A chunk's prefix is what the chunks before it wrote.
    """
    model = save_checkpoint(name, tmp_path)
    decoder = Decoder.from_safetensors(ModelConfig.from_path(tmp_path), tmp_path, dtype=torch.float32, device=CPU)
    eager = tiny.eager(decoder, max_tokens=96, max_requests=4)
    random = np.random.default_rng(1)
    prompts = [random.integers(0, decoder.config.vocab_size, n) for n in PROMPTS]
    run = eager.run if path == "eager" else tiny.captured(eager, 8, 32, 96).run
    last: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        rows = eager.table.admit(list(PROMPTS)).tolist()
        for batch in chunked(PROMPTS, cached_lens=[0] * 4, chunk_tokens=chunk_tokens, max_requests=4):
            live = live_prefill(
                eager.table,
                rows=[rows[chunk.request] for chunk in batch],
                prefix_lens=[chunk.start for chunk in batch],
                input_ids=[prompts[chunk.request][chunk.start : chunk.stop] for chunk in batch],
            )
            for chunk, logits in zip(batch, run(live).clone(), strict=True):
                last[chunk.request] = logits
        for request, prompt in enumerate(prompts):
            wanted = model(torch.from_numpy(prompt)[None]).logits[0, -1]
            torch.testing.assert_close(last[request], wanted, rtol=1e-4, atol=1e-5)


def test_prefill_then_decode_agree_with_prefill_alone() -> None:
    """The same KV serves both phases: the last token by a decode step equals the last row of one prefill."""
    from graphtune.worker.attention.sdpa import SdpaAttention
    from graphtune.worker.runners.decode import EagerDecode
    from graphtune.worker.runners.series import make_batches

    eager = tiny.eager()
    decode = EagerDecode(eager.model, SdpaAttention(eager.cache, eager.table), eager.cache, eager.table, 4)
    lengths = np.asarray([9, 17, 1], dtype=np.int32)
    with torch.inference_mode():
        rows = eager.table.admit((lengths + 1).tolist())
        (step,) = make_batches(eager.table, rows=rows, lengths=(lengths + 1)[None], vocab_size=200, seed=4)
        random = np.random.default_rng(2)
        prompts = [random.integers(0, 200, n) for n in lengths]
        eager.run(live_prefill(eager.table, rows=rows.tolist(), prefix_lens=[0] * 3, input_ids=prompts))
        stepped = decode.run(step).clone()
        whole = [np.append(prompt, int(token)) for prompt, token in zip(prompts, step.input_ids, strict=True)]
        wanted = eager.run(live_prefill(eager.table, rows=rows.tolist(), prefix_lens=[0] * 3, input_ids=whole))
    torch.testing.assert_close(stepped, wanted, rtol=1e-4, atol=1e-5)


def test_a_request_without_tokens_is_legal_in_prefill_and_illegal_in_decode() -> None:
    """Fixed request slots end in requests of length zero. A decode row of length zero has no position to look up."""
    from graphtune.worker.attention.sdpa import SdpaAttention
    from graphtune.worker.runners.buffers import StaticBuffers, decode_slots
    from graphtune.worker.runners.decode import EagerDecode

    eager = tiny.eager()
    with torch.inference_mode():
        live = tiny.live(eager, [5, 4], [8, 0])
        wanted = eager.run(live).clone()
        batch = eager.buffers.fill(live, live.tokens, request_slots=6)
        assert batch.extend_lens.tolist() == [5, 4, 0, 0, 0, 0]
        eager.attention.plan(batch)
        assert torch.equal(eager.tail(eager.body(batch), batch), wanted)

        decode = EagerDecode(eager.model, SdpaAttention(eager.cache, eager.table), eager.cache, eager.table, 4)
        decode.buffers = StaticBuffers(decode_slots(0), 4, CPU)
        decode.buffers.reset()
        with pytest.raises(IndexError):
            decode.forward(decode.buffers.batch(0, 4))


def test_what_lies_behind_the_real_tokens_is_zeroed_and_not_written_to_the_cache() -> None:
    eager = tiny.eager()
    config, cache = eager.model.config, eager.cache
    with torch.inference_mode():
        live = tiny.live(eager, [3, 2], [0, 9])
        eager.attention.plan(eager.buffers.fill(live, 8))
        before = cache.pool.clone()
        q = torch.randn(8, config.num_heads, config.head_dim)
        k, v = torch.randn(2, 8, config.num_kv_heads, config.head_dim)
        out = torch.full((8, config.num_heads * config.head_dim), float("nan"))
        eager.attention.forward(1, q, k, v, out)
        assert out[:5].isfinite().all() and not out[5:].any()
        slots = live.out_slots.long()
        assert torch.equal(cache.keys[1].flatten(0, 1)[slots], k[:5])
        assert torch.equal(cache.values[1].flatten(0, 1)[slots], v[:5])
        cache.write_slots(live.out_slots, 0.0)
        before.flatten(2, 3).index_fill_(2, slots, 0.0)
        assert torch.equal(cache.pool, before)
