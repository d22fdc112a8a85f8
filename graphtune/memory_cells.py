"""Cells that capture lists for their memory alone: what each size asks for, and random lists to check predictions on.

A size captured alone into an empty pool shows its requests (``AllocationTrace``); from these the memory of any list is
worked out. Random lists named ``fit-N`` say how far that is off, those named ``held-out-N`` are kept back: nothing is
derived from them, so the error there is the error of a prediction.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from graphtune.plan import Cell
from graphtune.recipe_keys import MemoryChoice
from graphtune.results import CaptureList, Order, Phase

ALONE = "alone"
FIT = "fit"
HELD_OUT = "held-out"

LONGEST_RANDOM_LIST: dict[Phase, int] = {"decode": 24, "prefill": 12}
"""A prefill size takes several times as long to capture as a decode size."""


def memory_cells(cells: Sequence[Cell], choice: MemoryChoice, seed: str) -> tuple[Cell, ...]:
    """One cell per phase and backend for the sizes and settings that ``cells`` capture; ``seed`` decides the draws."""
    kinds = dict.fromkeys((of.phase, of.backend) for cell in cells for of in cell.lists)
    # Full prefill is an experiment beside breakable: its lists are known by those that were measured.
    kinds.pop(("prefill", "full"), None)
    return tuple(_cell(cells, phase, backend, choice, seed) for phase, backend in kinds)


def _cell(cells: Sequence[Cell], phase: Phase, backend: str, choice: MemoryChoice, seed: str) -> Cell:
    holding = [cell for cell in cells if any((of.phase, of.backend) == (phase, backend) for of in cell.lists)]
    lists = [of for cell in holding for of in cell.lists if (of.phase, of.backend) == (phase, backend)]
    sizes = tuple(sorted({size for of in lists for size in of.sizes}))
    sharings = tuple(dict.fromkeys((of.output, of.workspace) for of in lists))
    orders = tuple(dict.fromkeys(of.order for of in lists))
    draw = random.Random(f"{seed} {phase} {backend}")
    wanted: list[CaptureList] = []
    for output, workspace in sharings:
        like = replace(lists[0], output=output, workspace=workspace)
        wanted += [replace(like, name=f"{ALONE}-{size}", sizes=(size,), order="descending") for size in sizes]
    for output, workspace in sharings:
        like = replace(lists[0], output=output, workspace=workspace)
        wanted += _random_lists(like, sizes, orders, choice, draw)
    return replace(
        holding[0],
        phase=phase,
        lists=tuple(wanted),
        latency=(),
        prefill_latency=(),
        profile_sizes=(),
        gate=False,
        purpose="memory",
        process=1,
    )


def _random_lists(
    like: CaptureList, sizes: tuple[int, ...], orders: tuple[Order, ...], choice: MemoryChoice, draw: random.Random
) -> Iterable[CaptureList]:
    """Lists of at least two sizes drawn without replacement, the orders in turn. None where there are not two sizes."""
    if len(sizes) < 2:
        return
    longest = min(len(sizes), LONGEST_RANDOM_LIST[like.phase])
    names = [f"{FIT}-{n}" for n in range(1, choice.fit + 1)] + [
        f"{HELD_OUT}-{n}" for n in range(1, choice.held_out + 1)
    ]
    for index, name in enumerate(names):
        chosen = tuple(sorted(draw.sample(sizes, draw.randint(2, longest))))
        yield replace(like, name=name, sizes=chosen, order=orders[index % len(orders)])


def is_held_out(of: CaptureList) -> bool:
    """True for a list that no prediction may rest on."""
    return of.name.startswith(f"{HELD_OUT}-")
