"""The capture lists that a recipe names, for either phase: an engine's default, powers of two, or its own sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from graphtune.engines import engine_named
from graphtune.engines.base import DeviceFacts, Serving
from graphtune.errors import InputError
from graphtune.recipe import LoadedRecipe
from graphtune.recipe_keys import ListChoice
from graphtune.results import Phase

LARGEST_CARD_MIB = 192 * 1024
"""Memory at which no engine lowers its largest size: stands in where a recipe sets ``max`` itself."""

DEFAULT_TOP: dict[Phase, int] = {"decode": 256, "prefill": 8192}
"""Where powers of two end when no other list says."""


@dataclass(frozen=True)
class NamedList:
    """Ascending sizes under one name; lists with equal sizes are one list with both names."""

    name: str
    sizes: tuple[int, ...]


def named_lists(loaded: LoadedRecipe, phase: Phase, facts: DeviceFacts, notes: list[str]) -> tuple[NamedList, ...]:
    """The lists of a phase. ``notes`` gains what was merged. Raises InputError for an engine that captures nothing."""
    choices = loaded.recipe.lists_of(phase)
    sized: list[tuple[str, tuple[int, ...]]] = []
    for index, choice in enumerate(choices):
        if choice.engine == "powers_of_two":
            continue
        name, sizes = _sizes(choice, phase, facts)
        where = loaded.source.where((phase, "lists", index))
        if not sizes:
            raise InputError(f"the engine captures nothing for {phase} here", where=where)
        if choice.sizes and len(sizes) < len(choice.sizes):
            repeated = sorted({size for size in choice.sizes if choice.sizes.count(size) > 1})
            notes.append(f"{where}: {listed(repeated)} is written more than once and counts once")
        sized.append((name, sizes))
    for choice in choices:
        if choice.engine == "powers_of_two":
            top = choice.max or max((sizes[-1] for _, sizes in sized), default=DEFAULT_TOP[phase])
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
        merged.append(NamedList(name if by_name[name] == 1 else f"{name}-{by_name[name]}", sizes))
    return tuple(merged)


def union_of(lists: Iterable[NamedList]) -> tuple[int, ...]:
    """Every size of every list, ascending."""
    return tuple(sorted({size for one in lists for size in one.sizes}))


def _sizes(choice: ListChoice, phase: Phase, facts: DeviceFacts) -> tuple[str, tuple[int, ...]]:
    if choice.engine is None:
        assert choice.name is not None and choice.sizes is not None  # checked with the recipe
        return choice.name, tuple(sorted(set(choice.sizes)))
    engine = engine_named(choice.engine)
    default = engine.default_decode_sizes if phase == "decode" else engine.default_prefill_sizes
    if choice.max is None:
        return choice.engine, default(facts, Serving())
    roomy = replace(facts, nvml_total_mib=LARGEST_CARD_MIB)
    if phase == "decode":
        serving = Serving(max_running_requests=choice.max)
    else:
        serving = Serving(chunked_prefill_size=choice.max, max_batched_tokens=choice.max)
    return choice.engine, tuple(size for size in default(roomy, serving) if size <= choice.max)


def at_most(
    sizes: tuple[int, ...], union: tuple[int, ...], loaded: LoadedRecipe, path: tuple[str | int, ...]
) -> tuple[int, ...]:
    """``sizes`` ascending, each once. Raises InputError for one above the largest bucket."""
    for index, size in enumerate(sizes):
        if size > union[-1]:
            raise InputError(
                f"{size} is above the largest bucket, {union[-1]}, so no graph serves it",
                where=loaded.source.where((*path, index)),
            )
    return tuple(sorted(set(sizes)))


def listed(sizes: Iterable[int]) -> str:
    """Sizes as text."""
    return ", ".join(str(size) for size in sizes)
