"""A model ready to decode: weights, paged KV, attention backend and eager runner, built from a cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from graphtune.model_config import ModelConfig
from graphtune.plan import Cell
from graphtune.results import ModelFacts, Sharing
from graphtune.worker.attention.base import AttentionBackend
from graphtune.worker.attention.sdpa import SdpaAttention
from graphtune.worker.gate import MAX_LENGTH_PAGES
from graphtune.worker.graphs.backend import GraphBackend
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.models.decoder import Decoder
from graphtune.worker.runners.decode import EagerDecode
from graphtune.worker.runners.series import tokens_needed

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Engine:
    """Everything a cell captures and times with."""

    device: torch.device
    model: Decoder
    cache: PagedKVCache
    table: RequestTable
    attention: AttentionBackend
    eager: EagerDecode
    facts: ModelFacts

    def make_backend(self, output: Sharing = "shared") -> GraphBackend:
        """A fresh graph backend: CUDA graphs on a GPU, the tape on the CPU."""
        if self.device.type == "cuda":
            from graphtune.worker.graphs.full import FullBackend

            return FullBackend(output=output)
        from graphtune.worker.graphs.tape_backend import TapeBackend

        return TapeBackend(output=output)


def build(cell: Cell, device: torch.device, reached: Callable[[str], None]) -> Engine:
    """Build the engine of a cell; ``reached(stage)`` is called after weights, kv_cache, workspace and buffers."""
    dtype = DTYPES[cell.dtype]
    config = ModelConfig.from_mapping(cell.model_config)
    if cell.shard > 1:
        config = config.shard(cell.shard)
    if cell.weights is None:
        model = Decoder(config, dtype=dtype, device=device, seed=cell.seed)
    else:
        model = Decoder.from_safetensors(config, Path(cell.weights), dtype=dtype, device=device)
    reached("weights")
    cache = PagedKVCache(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        page_size=cell.page_size,
        tokens=cell.kv_tokens,
        dtype=dtype,
        device=device,
    )
    cache.fill_random(cell.seed)
    sizes = [size for capture_list in cell.lists for size in capture_list.sizes]
    sizes += [size for at in cell.latency for size in at.sizes]
    max_requests = max(sizes) + 1  # the gate's victim request
    contexts = [tokens_needed(at.context_tokens) for at in cell.latency] + [MAX_LENGTH_PAGES * cell.page_size]
    max_context = min(max(contexts), config.max_position_embeddings)
    table = RequestTable(cache=cache, max_requests=max_requests, max_context=max_context, seed=cell.seed)
    reached("kv_cache")
    attention, workspace_bytes = _attention(cell.attention, cache, table, config, max_requests)
    reached("workspace")
    eager = EagerDecode(model, attention, cache, table, max_requests)
    reached("buffers")
    facts = ModelFacts(
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=config.kv_bytes_per_token(dtype.itemsize),
        kv_pool_bytes=cache.bytes,
        kv_tokens=cell.kv_tokens,
        workspace_bytes=workspace_bytes,
        static_buffer_bytes=eager.buffers.bytes,
        parameters=config.parameter_count(),
        shard_of=cell.shard,
        load="random" if cell.weights is None else "safetensors",
        attention_kernels=attention.kernels,
        layer_kernels=model.kernels.name,
    )
    return Engine(device, model, cache, table, attention, eager, facts)


def _attention(
    name: str, cache: PagedKVCache, table: RequestTable, config: ModelConfig, max_requests: int
) -> tuple[AttentionBackend, int]:
    if name == "sdpa":
        return SdpaAttention(cache, table), 0
    if name != "flashinfer":
        raise ValueError(f"no attention backend named {name!r}")
    from graphtune.worker.attention.flashinfer import FlashInferAttention

    backend = FlashInferAttention(
        cache,
        table,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        max_requests=max_requests,
    )
    return backend, backend.workspace_bytes
