"""From a recipe to the cells that a sweep runs: lists times settings, what is timed where, and what is left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Literal

from graphtune.engines import engine_named
from graphtune.engines.base import DeviceFacts, Serving
from graphtune.errors import InputError
from graphtune.memory_cells import memory_cells
from graphtune.plan import STEP_TOKENS, UNION, Cell, LatencyAt, Measure, Plan, Skip
from graphtune.recipe import LoadedRecipe
from graphtune.recipe_keys import ListChoice
from graphtune.results import CaptureList, Execution, Order, Sharing
from graphtune.units import ASSUMED_OVERHEAD_BYTES, GIB, MIB, format_bytes

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

GATE_PAGES = 3
"""Pages per request that the correctness gate uses where the pool has them, for one request more than the bucket."""

LARGEST_CARD_MIB = 192 * 1024
"""Memory at which no engine lowers its largest size: stands in where a recipe sets ``max`` itself."""


def plan_sweep(
    loaded: LoadedRecipe,
    *,
    device: Literal["cuda", "cpu"],
    device_facts: DeviceFacts | None,
    processes: int | None = None,
) -> Plan:
    """The cells of a recipe on a device.

    Every list is captured once per order and sharing; lists with equal sizes are captured once. The first list of
    the first cell is the one that latency is timed on: all sizes of all lists, large to small, everything shared.
    A cell holds the settings of one set of sizes: only the first list of a process shows the bytes of its executables,
    and these depend on the sizes. A tenth of the lists that come later in a process, drawn by a hash of the content, is
    planned again alone as a control. ``processes`` repeats whole cells (default: the recipe's).

    Raises InputError for what cannot be run: a bucket beyond the KV pool, a context beyond the model's positions, a
    model beyond the device. Steps that the KV pool cannot hold are skipped with a reason.
    """
    recipe = loaded.recipe
    notes: list[str] = [f"config.json: key {key} is not known and was not used" for key in loaded.model.unknown_keys]
    named = _named_lists(loaded, device_facts or DeviceFacts(None), notes)
    union = tuple(sorted({size for _, sizes in named for size in sizes}))
    contexts = _contexts(loaded, union)
    pool = _Pool.of(loaded, union, contexts, device_facts)
    latency, skips = _latency(loaded, contexts, pool)
    template = Cell(
        model_name=loaded.model_name,
        model_config=loaded.model_mapping,
        weights=str(loaded.weights) if loaded.weights else None,
        dtype=recipe.dtype,
        shard=recipe.shard,
        seed=recipe.seed,
        phase="decode",
        attention=_attention(loaded, device),
        page_size=recipe.page_size,
        kv_tokens=pool.tokens,
        lists=(),
        latency=(),
        measure=Measure(recipe.measure.min_samples, recipe.measure.noise, recipe.measure.max_seconds),
    )
    lists = _capture_lists(loaded, named, union, timed=bool(latency))
    profile = _at_most(recipe.decode.profile_sizes, union, loaded, ("decode", "profile_sizes"))
    groups = _by_sizes(lists)
    cells = []
    for process in range(1, (processes or recipe.processes) + 1):
        for index, group in enumerate(groups):
            first = index == 0
            cells.append(
                replace(
                    template,
                    lists=group,
                    latency=latency if first else (),
                    # Outputs and launches are the same in every process; the first one checks and counts them.
                    profile_sizes=profile if first and latency and process == 1 else (),
                    gate=process == 1,
                    process=process,
                )
            )
    cells += [replace(template, lists=(chosen,), purpose="control") for chosen in _controls(loaded, groups)]
    if recipe.memory is not None:
        cells += memory_cells(cells, recipe.memory, loaded.sha)
    return Plan(recipe.name, device, tuple(cells), skips, tuple(notes))


def follow_up(cell: Cell, lists: tuple[CaptureList, ...]) -> Cell:
    """The cell that captures, in a fresh process, the lists that ``cell`` had to leave out. Nothing is timed again."""
    return replace(cell, lists=lists, latency=(), profile_sizes=())


def _named_lists(loaded: LoadedRecipe, facts: DeviceFacts, notes: list[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Name and ascending sizes of every list; lists with equal sizes are one list with both names."""
    choices = loaded.recipe.decode.lists
    sized: list[tuple[str, tuple[int, ...]]] = []
    for index, choice in enumerate(choices):
        if choice.engine == "powers_of_two":
            continue
        name, sizes = _sizes(choice, facts)
        where = loaded.source.where(("decode", "lists", index))
        if not sizes:
            raise InputError("the engine captures nothing here", where=where)
        if choice.sizes and len(sizes) < len(choice.sizes):
            repeated = sorted({size for size in choice.sizes if choice.sizes.count(size) > 1})
            notes.append(f"{where}: {_listed(repeated)} is written more than once and counts once")
        sized.append((name, sizes))
    for choice in choices:
        if choice.engine == "powers_of_two":
            top = choice.max or max((sizes[-1] for _, sizes in sized), default=256)
            sized.append(("powers_of_two", tuple(2**power for power in range(top.bit_length()))))
    names: dict[tuple[int, ...], list[str]] = {}
    for name, sizes in sized:
        names.setdefault(sizes, []).append(name)
    by_name: dict[str, int] = {}
    merged = []
    for sizes, equal in names.items():
        unique = list(dict.fromkeys(equal))
        if len(unique) > 1:
            notes.append(f"the lists {', '.join(unique)} have the same sizes and are captured once")
        name = "+".join(unique)
        by_name[name] = by_name.get(name, 0) + 1
        merged.append((name if by_name[name] == 1 else f"{name}-{by_name[name]}", sizes))
    return merged


def _sizes(choice: ListChoice, facts: DeviceFacts) -> tuple[str, tuple[int, ...]]:
    if choice.engine is None:
        assert choice.name is not None and choice.sizes is not None  # checked with the recipe
        return choice.name, tuple(sorted(set(choice.sizes)))
    engine = engine_named(choice.engine)
    if choice.max is None:
        return choice.engine, engine.default_decode_sizes(facts, Serving())
    roomy = replace(facts, nvml_total_mib=LARGEST_CARD_MIB)
    sizes = engine.default_decode_sizes(roomy, Serving(max_running_requests=choice.max))
    return choice.engine, tuple(size for size in sizes if size <= choice.max)


def _contexts(loaded: LoadedRecipe, union: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Context tokens to the sizes timed there. InputError beyond the model's positions or above the largest bucket."""
    contexts: dict[int, set[int]] = {}
    limit = loaded.model.max_position_embeddings
    for index, choice in enumerate(loaded.recipe.decode.contexts):
        path = ("decode", "contexts", index)
        if choice.tokens + STEP_TOKENS > limit:
            raise InputError(
                f"{choice.tokens} tokens, and {STEP_TOKENS} more while steps are timed, is beyond the model's "
                f"{limit} positions",
                where=loaded.source.where((*path, "tokens")),
                action=f"Use at most {max(limit - STEP_TOKENS, 0)} tokens.",
            )
        sizes = union if choice.sizes is None else _at_most(choice.sizes, union, loaded, (*path, "sizes"))
        contexts.setdefault(choice.tokens, set()).update(sizes)
    return {tokens: tuple(sorted(sizes)) for tokens, sizes in contexts.items()}


def _at_most(
    sizes: tuple[int, ...], union: tuple[int, ...], loaded: LoadedRecipe, path: tuple[str | int, ...]
) -> tuple[int, ...]:
    for index, size in enumerate(sizes):
        if size > union[-1]:
            raise InputError(
                f"{size} is above the largest bucket, {union[-1]}, so no graph serves it",
                where=loaded.source.where((*path, index)),
            )
    return tuple(sorted(set(sizes)))


@dataclass(frozen=True)
class _Pool:
    """The KV pool: ``tokens`` in whole pages, page 0 included, which is the sink of padded rows."""

    tokens: int
    page_size: int
    limit: str

    @classmethod
    def of(
        cls,
        loaded: LoadedRecipe,
        union: tuple[int, ...],
        contexts: dict[int, tuple[int, ...]],
        facts: DeviceFacts | None,
    ) -> _Pool:
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
            wanted = [(union[-1] + 1, GATE_PAGES * page)] + [
                (sizes[-1], tokens + STEP_TOKENS) for tokens, sizes in contexts.items() if sizes
            ]
            need = max(cls(0, page, "").tokens_for(size, tokens) for size, tokens in wanted)
            pool = cls(need if room is None else min(need, room), page, "the device's memory")
        pool.hold_buckets(loaded, union)
        return pool

    def tokens_for(self, size: int, tokens: int) -> int:
        """KV tokens that ``size`` requests of ``tokens`` each take, in whole pages, with the sink page."""
        return (size * -(-tokens // self.page_size) + 1) * self.page_size

    def holds(self, size: int, tokens: int) -> bool:
        return self.tokens_for(size, tokens) <= self.tokens

    def hold_buckets(self, loaded: LoadedRecipe, union: tuple[int, ...]) -> None:
        """InputError unless every bucket can hold requests that cross a page, which the correctness gate needs."""
        least = max(2 * self.page_size, 16)
        too_large = [size for size in union if not self.holds(size, least)]
        if not too_large:
            return
        size = too_large[0]
        raise InputError(
            f"bucket {size} is larger than the KV pool: {self.tokens} tokens ({self.limit}) hold no {size} requests "
            f"of {least} tokens, which takes {self.tokens_for(size, least)}",
            where=_where_size(loaded, size),
            action="Raise kv_tokens, or leave the bucket out.",
        )


def _where_size(loaded: LoadedRecipe, size: int) -> str:
    lists = loaded.recipe.decode.lists
    for index, choice in enumerate(lists):
        if choice.sizes and size in choice.sizes:
            return loaded.source.where(("decode", "lists", index, "sizes", choice.sizes.index(size)))
    return loaded.source.where(("decode", "lists"))


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


def _latency(
    loaded: LoadedRecipe, contexts: dict[int, tuple[int, ...]], pool: _Pool
) -> tuple[tuple[LatencyAt, ...], tuple[Skip, ...]]:
    executions: tuple[Execution, ...] = ("graph", "eager") if "eager" in loaded.recipe.decode.backends else ("graph",)
    latency, skips = [], []
    for tokens, sizes in contexts.items():
        held = tuple(size for size in sizes if pool.holds(size, tokens + STEP_TOKENS))
        left = [size for size in sizes if size not in held]
        if held:
            latency.append(LatencyAt(held, tokens, executions))
        if left:
            need = pool.tokens_for(left[0], tokens + STEP_TOKENS)
            reason = f"{left[0]} requests take {need} KV tokens; {pool.limit} leaves {pool.tokens}"
            skips.append(Skip(f"step times of {_listed(left)} requests at context {tokens}", reason))
    return tuple(latency), tuple(skips)


def _attention(loaded: LoadedRecipe, device: str) -> str:
    chosen = loaded.recipe.attention
    if chosen == "auto":
        return "flashinfer" if device == "cuda" else "sdpa"
    if chosen == "flashinfer" and device == "cpu":
        raise InputError(
            "flashinfer needs a CUDA device", where=loaded.source.where(("attention",)), action="Write attention: auto."
        )
    return chosen


def _capture_lists(
    loaded: LoadedRecipe, named: list[tuple[str, tuple[int, ...]]], union: tuple[int, ...], *, timed: bool
) -> tuple[CaptureList, ...]:
    """Every list under every setting; first the one that latency is timed on, when anything is timed."""
    lists = [
        CaptureList(name, "decode", "full", sizes, order, output, workspace)
        for order, output, workspace in _settings(loaded)
        for name, sizes in named
    ]
    if not timed:
        return tuple(lists)
    timed_on = CaptureList(UNION, "decode", "full", union)
    same = [one for one in lists if replace(one, name=UNION) == timed_on]
    first = same[0] if same else timed_on
    return (first, *(one for one in lists if one != first))


def _settings(loaded: LoadedRecipe) -> Iterator[tuple[Order, Sharing, Sharing]]:
    axes = loaded.recipe.decode
    together = axes.sharing == "together"
    pairs = zip(axes.output, axes.workspace, strict=True) if together else product(axes.output, axes.workspace)
    for (output, workspace), order in product(dict.fromkeys(pairs), dict.fromkeys(axes.order)):
        yield order, output, workspace


def _by_sizes(lists: tuple[CaptureList, ...]) -> list[tuple[CaptureList, ...]]:
    """Lists of the same sizes together, in the order in which the sizes first appear."""
    groups: dict[tuple[int, ...], list[CaptureList]] = {}
    for one in lists:
        groups.setdefault(one.sizes, []).append(one)
    return [tuple(group) for group in groups.values()]


def _controls(loaded: LoadedRecipe, groups: list[tuple[CaptureList, ...]]) -> list[CaptureList]:
    """A tenth, at least one, of the lists that are captured after another one in their process."""
    later = [one for group in groups for one in group[1:]]
    if not later:
        return []

    def draw(one: CaptureList) -> str:
        return hashlib.sha256(f"{loaded.sha} {json.dumps(asdict(one), sort_keys=True)}".encode()).hexdigest()

    return sorted(later, key=draw)[: max(1, round(len(later) / 10))]


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(str(size) for size in sizes)
