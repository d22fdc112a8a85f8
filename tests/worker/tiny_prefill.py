"""A tiny model with prefill runners for tests on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from graphtune.model_config import ModelConfig
from graphtune.results import CaptureList
from graphtune.worker.attention.base import PrefillAttention
from graphtune.worker.attention.sdpa import SdpaPrefill
from graphtune.worker.graphs.backend import GraphBackend
from graphtune.worker.graphs.tape_breakable import TapeBreakable
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.models.decoder import Decoder
from graphtune.worker.runners.admission import WASTE_CAP
from graphtune.worker.runners.base import CaptureFailure
from graphtune.worker.runners.prefill import EagerPrefill, GraphPrefill
from graphtune.worker.runners.prefill_buffers import LivePrefill, live_prefill
from tests.worker import tiny

CPU = torch.device("cpu")
MAX_CONTEXT = 64


def eager(
    decoder: Decoder | None = None,
    attention: Callable[[PagedKVCache, RequestTable], PrefillAttention] = SdpaPrefill,
    *,
    max_tokens: int = 64,
    max_requests: int = 6,
    page_size: int = 8,
    max_context: int = MAX_CONTEXT,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    kv_tokens: int = 1024,
    **config: Any,
) -> EagerPrefill:
    """An eager prefill runner over a KV pool of random content."""
    with torch.inference_mode():
        if decoder is None:
            mapping = {**tiny.CONFIG, **config}
            decoder = Decoder(ModelConfig.from_mapping(mapping), dtype=dtype, device=device, seed=7)
        of = decoder.config
        cache = PagedKVCache(
            layers=of.num_layers,
            kv_heads=of.num_kv_heads,
            head_size=of.head_dim,
            page_size=page_size,
            tokens=kv_tokens,
            dtype=dtype,
            device=device,
        )
        cache.fill_random(3)
        table = RequestTable(cache=cache, max_requests=max_requests + 2, max_context=max_context, seed=3)
        return EagerPrefill(
            decoder, attention(cache, table), cache, table, max_tokens=max_tokens, max_requests=max_requests
        )


def capture_list(*sizes: int, **settings: Any) -> CaptureList:
    return replace(CaptureList("test", "prefill", "breakable", tuple(sizes), waste_cap=WASTE_CAP), **settings)


def captured(
    runner: EagerPrefill, *sizes: int, backend: GraphBackend | None = None, order: str = "descending", **settings: Any
) -> GraphPrefill:
    """A runner with these token counts captured."""
    backend = backend or TapeBreakable(output_rows=max(sizes))
    of_list = {name: settings.pop(name) for name in ("waste_cap", "request_slots") if name in settings}
    graph = GraphPrefill(runner, backend, capture_list(*sizes, order=order, **of_list), **settings)
    with torch.inference_mode():
        runner.warm_up(graph.list.sizes)
        outcomes = list(graph.capture())
    failures = [outcome for _, outcome in outcomes if isinstance(outcome, CaptureFailure)]
    assert not failures, failures
    return graph


def live(runner: EagerPrefill, lengths: Sequence[int], prefixes: Sequence[int], seed: int = 0) -> LivePrefill:
    """New requests with random ids; their prefixes are whatever the pool holds. Rows stay taken."""
    random = np.random.default_rng(seed)
    rows = runner.table.admit([n + prefix for n, prefix in zip(lengths, prefixes, strict=True)])
    ids = [random.integers(0, runner.model.config.vocab_size, n) for n in lengths]
    return live_prefill(runner.table, rows=rows.tolist(), prefix_lens=prefixes, input_ids=ids)


def release(runner: EagerPrefill, batch: LivePrefill) -> None:
    runner.table.release(batch.req_rows.numpy())
