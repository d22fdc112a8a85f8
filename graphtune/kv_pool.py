"""The KV pool of a sweep's processes: as many pages as the timed steps and the correctness gate need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphtune.engines.base import DeviceFacts
from graphtune.errors import InputError
from graphtune.recipe import LoadedRecipe
from graphtune.units import ASSUMED_OVERHEAD_BYTES, GIB, MIB, format_bytes

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Need:
    """``requests`` requests of ``tokens`` tokens at once. Where ``bucket`` is given it must be held with ``least``
    tokens each, or the recipe is refused at ``where``; other needs may go unmet."""

    requests: int
    tokens: int
    bucket: int | None = None
    least: int = 0
    where: str = ""


@dataclass(frozen=True)
class KvPool:
    """The KV pool: ``tokens`` in whole pages, page 0 included, which is the sink of padded rows."""

    tokens: int
    page_size: int
    limit: str

    @classmethod
    def of(cls, loaded: LoadedRecipe, needs: Sequence[Need], facts: DeviceFacts | None) -> KvPool:
        """As large as the largest need, or as the recipe or the device allows. InputError for a recipe's own figure
        that the device has no room for, and for a need that must be met and is not."""
        recipe = loaded.recipe
        page = recipe.page_size
        room = _kv_room_tokens(loaded, facts)
        if recipe.kv_tokens is not None:
            pool = cls(-(-recipe.kv_tokens // page) * page, page, f"the recipe's {recipe.kv_tokens} KV tokens")
            if room is not None and pool.tokens > room:
                raise InputError(
                    f"{recipe.kv_tokens} KV tokens do not fit the device, which has room for {room}",
                    where=loaded.source.where(("kv_tokens",)),
                    action="Write kv_tokens: auto.",
                )
        else:
            wanted = max(cls(0, page, "").tokens_for(need.requests, need.tokens) for need in needs)
            pool = cls(wanted if room is None else min(wanted, room), page, "the device's memory")
        for need in needs:
            if need.bucket is not None and not pool.holds(need.requests, need.least):
                raise InputError(
                    f"bucket {need.bucket} is larger than the KV pool: {pool.tokens} tokens ({pool.limit}) hold no "
                    f"{need.requests} requests of {need.least} tokens, which takes "
                    f"{pool.tokens_for(need.requests, need.least)}",
                    where=need.where,
                    action="Raise kv_tokens, or leave the bucket out.",
                )
        return pool

    def tokens_for(self, size: int, tokens: int) -> int:
        """KV tokens that ``size`` requests of ``tokens`` each take, in whole pages, with the sink page."""
        return (size * -(-tokens // self.page_size) + 1) * self.page_size

    def holds(self, size: int, tokens: int) -> bool:
        return self.tokens_for(size, tokens) <= self.tokens


def _kv_room_tokens(loaded: LoadedRecipe, facts: DeviceFacts | None) -> int | None:
    """KV tokens in whole pages that the device has room for beside the model; None where its memory is unknown."""
    if facts is None or facts.nvml_total_mib is None:
        return None
    width = DTYPE_BYTES[loaded.recipe.dtype]
    total = facts.nvml_total_mib * MIB
    # Context, workspaces, activations and graphs: on an H200 an 8B model with every sharing setting takes under 4 GiB.
    beside = max(3 * GIB // 2, total // 20)
    weights = loaded.model.weights_bytes(width) + loaded.model.rope_cache_bytes()
    room = total - ASSUMED_OVERHEAD_BYTES - beside - weights
    page_bytes = loaded.model.kv_bytes_per_token(width) * loaded.recipe.page_size
    if room < 2 * page_bytes:
        raise InputError(
            f"the model's {format_bytes(weights)} of weights leave no room for a KV cache in {format_bytes(total)}",
            where=loaded.source.where(("model",)),
            action="Use a larger card, or shard: N for one rank's part of the model.",
        )
    return room // page_bytes * loaded.recipe.page_size
