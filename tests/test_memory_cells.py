"""The cells for memory alone: every size by itself, random lists drawn the same way every time, some held back."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from graphtune.memory_cells import LONGEST_RANDOM_LIST, is_held_out, memory_cells
from graphtune.plan_text import describe
from graphtune.recipe_keys import MemoryChoice
from graphtune.results import CaptureList, Sharing
from tests.worker import tiny

SIZES = st.lists(st.integers(1, 600), min_size=1, max_size=60, unique=True).map(lambda sizes: tuple(sorted(sizes)))
SHARINGS: tuple[tuple[Sharing, Sharing], ...] = (("shared", "shared"), ("per_size", "per_size"))


def lists_of(*all_sizes: tuple[int, ...], phase: str = "decode", backend: str = "full") -> tuple[CaptureList, ...]:
    return tuple(
        CaptureList(f"list-{index}", phase, backend, sizes, order, output, workspace)  # type: ignore[arg-type]
        for index, sizes in enumerate(all_sizes)
        for output, workspace in SHARINGS
        for order in ("descending", "ascending")
    )


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(0, 5), st.integers(0, 9), st.text(max_size=8))
def test_every_size_alone_and_random_lists_of_the_sizes_captured(
    measured: list[tuple[int, ...]], fit: int, held_out: int, seed: str
) -> None:
    cells = (tiny.cell(lists=lists_of(*measured), latency=()),)
    (cell,) = memory_cells(cells, MemoryChoice(fit, held_out), seed)
    union = sorted({size for sizes in measured for size in sizes})
    alone = [of for of in cell.lists if of.name == f"alone-{of.sizes[0]}"]
    drawn = [of for of in cell.lists if of not in alone]
    assert sorted((of.output, of.sizes[0]) for of in alone) == sorted((o, n) for o, _ in SHARINGS for n in union)
    assert len(drawn) == (2 * (fit + held_out) if len(union) > 1 else 0)
    assert sum(map(is_held_out, drawn)) == (2 * held_out if len(union) > 1 else 0)
    for of in drawn:
        assert 2 <= len(of.sizes) <= LONGEST_RANDOM_LIST["decode"]
        assert list(of.sizes) == sorted(set(of.sizes)) and set(of.sizes) <= set(union)
    assert (cell.gate, cell.latency, cell.profile_sizes, cell.purpose) == (False, (), (), "memory")
    assert memory_cells(cells, MemoryChoice(fit, held_out), seed) == (cell,)
    assert memory_cells(cells, MemoryChoice(fit, held_out), seed + "x")[0].lists[: len(alone)] == tuple(alone)


def test_a_cell_for_each_phase_and_backend() -> None:
    decode = tiny.cell(lists=lists_of((1, 2, 4)), latency=())
    prefill = replace(decode, lists=lists_of((64, 128), phase="prefill", backend="breakable"))
    cells = memory_cells((decode, prefill), MemoryChoice(), "seed")
    kinds = [{(of.phase, of.backend) for of in cell.lists} for cell in cells]
    assert kinds == [{("decode", "full")}, {("prefill", "breakable")}]
    assert {of.order for of in cells[0].lists if is_held_out(of)} == {"descending", "ascending"}


def test_the_cell_says_what_it_is() -> None:
    (cell,) = memory_cells((tiny.cell(lists=lists_of((1, 2, 4)), latency=()),), MemoryChoice(1, 2), "")
    assert describe(cell) == "memory of decode: 6 sizes alone and 6 random lists"
