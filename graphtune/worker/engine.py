"""A model ready to serve both phases: weights, paged KV, attention backends and eager runners, built from a cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphtune.model_config import ModelConfig
from graphtune.plan import Cell
from graphtune.results import CaptureList, ModelFacts
from graphtune.worker.attention.base import AttentionBackend, PrefillAttention
from graphtune.worker.attention.sdpa import SdpaAttention, SdpaPrefill
from graphtune.worker.gate import MAX_LENGTH_PAGES
from graphtune.worker.graphs.backend import GraphBackend
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.models.decoder import Decoder
from graphtune.worker.prefill_gate import PREFIX_PAGES, SEVERAL
from graphtune.worker.runners.decode import EagerDecode, GraphDecode
from graphtune.worker.runners.prefill import EagerPrefill, GraphPrefill
from graphtune.worker.runners.series import tokens_needed

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Runner = GraphDecode | GraphPrefill


@dataclass(frozen=True)
class Room:
    """What the lists and timed steps of a cell need. ``requests`` are rows of the request table, the gates' victim
    included; ``prefill_tokens`` is 0 for a cell without prefills."""

    decode_sizes: tuple[int, ...]
    prefill_sizes: tuple[int, ...]
    decode_requests: int
    prefill_requests: int
    context: int

    @property
    def prefill_tokens(self) -> int:
        return max(self.prefill_sizes, default=0)

    @property
    def requests(self) -> int:
        return max(self.decode_requests, self.prefill_requests) + 1

    @classmethod
    def of(cls, cell: Cell, positions: int) -> Room:
        """``positions`` is the longest context that the model has."""
        decode = {size for of in cell.lists if of.phase == "decode" for size in of.sizes}
        decode |= {size for at in cell.latency for size in at.sizes}
        prefill = {size for of in cell.lists if of.phase == "prefill" for size in of.sizes}
        prefill |= {tokens for at in cell.prefill_latency for tokens in at.tokens}
        contexts = [tokens_needed(at.context_tokens) for at in cell.latency] + [MAX_LENGTH_PAGES * cell.page_size]
        requests = 1
        if prefill:
            contexts += [-(-max(at.tokens) // at.requests) + at.prefix_tokens for at in cell.prefill_latency]
            contexts.append(max(prefill) + PREFIX_PAGES * cell.page_size)
            whole = -(-max(prefill) // min(max(contexts), positions))
            slots = [of.request_slots or 0 for of in cell.lists]
            requests = max(SEVERAL, whole, *slots, *(at.requests for at in cell.prefill_latency))
        return cls(
            decode_sizes=tuple(sorted(decode)),
            prefill_sizes=tuple(sorted(prefill)),
            decode_requests=max(decode, default=1),
            prefill_requests=requests,
            context=min(max(contexts), positions),
        )


@dataclass(frozen=True)
class Engine:
    """Everything a cell captures and times with. ``prefill`` is None for a cell without prefills."""

    device: torch.device
    model: Decoder
    cache: PagedKVCache
    table: RequestTable
    attention: AttentionBackend
    eager: EagerDecode
    prefill: EagerPrefill | None
    room: Room
    facts: ModelFacts

    def warm_up(self) -> None:
        """Run every size of both phases eagerly: lazy loading and tuning are never charged to graphs."""
        self.eager.warm_up(self.room.decode_sizes)
        if self.prefill is not None:
            self.prefill.warm_up(self.room.prefill_sizes)

    def runner(self, capture_list: CaptureList, pools: list[Any] | None = None) -> Runner:
        """A runner that captures the list, on a backend of its own; with ``pools`` into those of another runner."""
        if capture_list.phase == "decode":
            return self.decode_runner(capture_list, pools)
        return self.prefill_runner(capture_list, pools)

    def decode_runner(self, capture_list: CaptureList, pools: list[Any] | None = None) -> GraphDecode:
        return GraphDecode(self.eager, self.make_backend(capture_list, pools), capture_list)

    def prefill_runner(self, capture_list: CaptureList, pools: list[Any] | None = None) -> GraphPrefill:
        """Raises ValueError for a cell without prefills."""
        if self.prefill is None:
            raise ValueError("this cell was built without prefills")
        return GraphPrefill(self.prefill, self.make_backend(capture_list, pools), capture_list)

    def make_backend(self, capture_list: CaptureList, pools: list[Any] | None = None) -> GraphBackend:
        """A fresh graph backend: CUDA graphs on a GPU, tapes on the CPU. Raises ValueError for an unknown name."""
        kind, output = capture_list.backend, capture_list.output
        rows = max(capture_list.sizes)
        if self.device.type == "cuda":
            from graphtune.worker.graphs.cuda_breakable import CudaBreakable
            from graphtune.worker.graphs.full import FullBackend

            if kind == "full":
                return FullBackend(output=output, pools=pools)
            if kind == "breakable":
                return CudaBreakable(output=output, output_rows=rows, pools=pools)
        else:
            from graphtune.worker.graphs.tape_backend import TapeBackend
            from graphtune.worker.graphs.tape_breakable import TapeBreakable

            if kind == "full":
                return TapeBackend(output=output, pools=pools)
            if kind == "breakable":
                return TapeBreakable(output=output, output_rows=rows, pools=pools)
        raise ValueError(f"no graph backend named {kind!r}")


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
    room = Room.of(cell, config.max_position_embeddings)
    table = RequestTable(cache=cache, max_requests=room.requests, max_context=room.context, seed=cell.seed)
    reached("kv_cache")
    attention, prefill_attention = _attention(cell, cache, table, config, room)
    reached("workspace")
    eager = EagerDecode(model, attention, cache, table, room.decode_requests + 1)
    prefill = None
    if prefill_attention is not None:
        prefill = EagerPrefill(
            model,
            prefill_attention,
            cache,
            table,
            max_tokens=room.prefill_tokens,
            max_requests=room.prefill_requests,
        )
    reached("buffers")
    facts = ModelFacts(
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=config.kv_bytes_per_token(dtype.itemsize),
        kv_pool_bytes=cache.bytes,
        kv_tokens=cell.kv_tokens,
        workspace_bytes=_workspace_bytes(attention, prefill_attention, table),
        static_buffer_bytes=eager.buffers.bytes + (prefill.buffers.bytes if prefill else 0),
        parameters=config.parameter_count(),
        shard_of=cell.shard,
        load="random" if cell.weights is None else "safetensors",
        attention_kernels=attention.kernels,
        layer_kernels=model.kernels.name,
        prefill_kernels=prefill_attention.kernels if prefill_attention else None,
    )
    return Engine(device, model, cache, table, attention, eager, prefill, room, facts)


def _attention(
    cell: Cell, cache: PagedKVCache, table: RequestTable, config: ModelConfig, room: Room
) -> tuple[AttentionBackend, PrefillAttention | None]:
    """Attention of both phases, over one float workspace where there is one; no prefill attention without prefills."""
    if cell.attention == "sdpa":
        return SdpaAttention(cache, table), SdpaPrefill(cache, table) if room.prefill_sizes else None
    if cell.attention != "flashinfer":
        raise ValueError(f"no attention backend named {cell.attention!r}")
    from graphtune.worker.attention.flashinfer import FlashInferAttention

    heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_size": config.head_dim}
    if not room.prefill_sizes:
        return FlashInferAttention(cache, table, **heads, max_requests=room.decode_requests + 1), None
    from graphtune.worker.attention.flashinfer_prefill import FlashInferPrefill, recorded_workspace_bytes

    recorded = [
        recorded_workspace_bytes(**heads, tokens=max(of.sizes), request_slots=of.request_slots)
        for of in cell.lists
        if of.request_slots is not None
    ]
    decode = FlashInferAttention(
        cache, table, **heads, max_requests=room.decode_requests + 1, least_workspace_bytes=max(recorded, default=0)
    )
    prefill = FlashInferPrefill(
        cache,
        table,
        **heads,
        max_tokens=room.prefill_tokens,
        max_requests=room.prefill_requests,
        float_workspace=decode.float_workspace,
    )
    return decode, prefill


def _workspace_bytes(attention: AttentionBackend, prefill: PrefillAttention | None, table: RequestTable) -> int:
    """Device bytes of the private buffers of both phases, those that both use counted once."""
    private = [*attention.private_tensors().values(), *(prefill.private_tensors().values() if prefill else ())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in private}
    storages.pop(table.page_table.untyped_storage().data_ptr(), None)
    return sum(storages.values())
