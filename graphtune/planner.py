"""From a recipe to the cells that a sweep runs, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from graphtune.decode_cells import DecodePlan
from graphtune.engines.base import DeviceFacts
from graphtune.errors import InputError
from graphtune.kv_pool import KvPool
from graphtune.memory_cells import memory_cells
from graphtune.named_lists import named_lists
from graphtune.plan import Cell, Measure, Plan, Repeats, Skip
from graphtune.prefill_cells import PrefillPlan, joint_cells
from graphtune.recipe import LoadedRecipe
from graphtune.results import CaptureList


def plan_sweep(
    loaded: LoadedRecipe,
    *,
    device: Literal["cuda", "cpu"],
    device_facts: DeviceFacts | None,
    processes: int | None = None,
) -> Plan:
    """The cells of a recipe on a device: those of decode, of prefill, both phases in one pool, and memory alone.

    Lists with equal sizes are captured once. ``processes`` repeats every cell; without it the recipe's number of
    processes repeats what the noise of a sweep is known by.

    Raises InputError for what cannot be run: a bucket beyond the KV pool, a context beyond the model's positions, a
    model beyond the device. Steps that the KV pool cannot hold are skipped with a reason.
    """
    recipe = loaded.recipe
    facts = device_facts or DeviceFacts(None)
    notes: list[str] = [f"config.json: key {key} is not known and was not used" for key in loaded.model.unknown_keys]
    repeats = Repeats(recipe.processes, whole=False) if processes is None else Repeats(processes, whole=True)
    decode, prefill = None, None
    if "decode" in recipe.phases:
        decode = DecodePlan.of(loaded, named_lists(loaded, "decode", facts, notes))
    if "prefill" in recipe.phases:
        prefill = PrefillPlan(loaded, named_lists(loaded, "prefill", facts, notes))
    needs = [need for part in (decode, prefill) if part is not None for need in part.needs()]
    pool = KvPool.of(loaded, needs, device_facts)
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
    cells: list[Cell] = []
    skips: tuple[Skip, ...] = ()
    if decode is not None:
        cells, skips = decode.cells(template, pool, repeats)
    if prefill is not None:
        prefill_cells = prefill.cells(template, repeats)
        if decode is not None:
            prefill_cells += joint_cells(template, decode.first_list(), prefill.first_list())
        # Round by round: what changes while a sweep runs reaches every cell.
        cells = sorted([*cells, *prefill_cells], key=lambda cell: (cell.purpose != "main", cell.process))
    if recipe.memory is not None:
        cells += memory_cells(cells, recipe.memory, loaded.sha)
    return Plan(recipe.name, device, tuple(cells), skips, tuple(notes))


def follow_up(cell: Cell, lists: tuple[CaptureList, ...]) -> Cell:
    """The cell that captures, in a fresh process, the lists that ``cell`` had to leave out. Nothing is timed again."""
    return replace(cell, lists=lists, latency=(), prefill_latency=(), profile_sizes=())


def _attention(loaded: LoadedRecipe, device: str) -> str:
    chosen = loaded.recipe.attention
    if chosen == "auto":
        return "flashinfer" if device == "cuda" else "sdpa"
    if chosen == "flashinfer" and device == "cpu":
        raise InputError(
            "flashinfer needs a CUDA device", where=loaded.source.where(("attention",)), action="Write attention: auto."
        )
    return chosen
