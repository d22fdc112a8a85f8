"""Why a graph grew: what `compare` says of nodes and kernels that came and went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.compare.growth import graph_growth
from graphtune.results import Capture, KernelCount
from graphtune.store import Sweep
from tests.synthetic import small_sweep

SIZES = (1, 2, 8)
NORM = "void norm::fused_add_rmsnorm_kernel<8u, __nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*, unsigned int)"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy>(int, at::native::direct_copy)"


def holding(of: Callable[[int], Mapping[str, int] | None], nodes: Callable[[int], int] | None = None) -> Sweep:
    """A sweep whose graphs hold these kernels at each size."""

    def filled(capture: Capture) -> Capture:
        kernels = of(capture.size)
        count = nodes(capture.size) if nodes else sum((kernels or {}).values())
        stored = None if kernels is None else tuple(KernelCount(name, many) for name, many in kernels.items())
        return replace(capture, nodes=count, kernels=stored)

    sweep = small_sweep(sizes=SIZES)
    (cell,) = sweep.cells
    lists = [replace(one, captures=tuple(filled(c) for c in one.captures)) for one in cell.captured_lists]
    return replace(sweep, cells=(replace(cell, captured_lists=tuple(lists)),))


def growth(base: Sweep, new: Sweep) -> tuple[str, ...]:
    return graph_growth(base.cells, new.cells)


def test_kernels_that_came_and_went_are_named() -> None:
    base, new = holding(lambda size: {NORM: 57, "gemm": 10}), holding(lambda size: {NORM: 57, "gemm": 10, COPY: 4})
    name = "at::native::elementwise_kernel<128, 4, at::native::direct_copy>"
    short = f"{name[:59]}…"
    assert growth(base, new) == (
        f"decode list main: nodes per graph went from 67 to 71 at all 3 sizes: 4 more {short}",
    )
    assert growth(new, base)[0].endswith(f"from 71 to 67 at all 3 sizes: 4 fewer {short}")


def test_a_kernel_that_stands_for_another_is_told_though_no_node_was_gained() -> None:
    base = holding(lambda size: {"old_gemm": 4} if size == 8 else {"gemm": 4})
    new = holding(lambda size: {"new_gemm": 4} if size == 8 else {"gemm": 4})
    assert growth(base, new) == (
        "decode list main: other kernels in as many nodes at 1 of 3 sizes: 4 more new_gemm, 4 fewer old_gemm",
    )


def test_instances_of_one_template_stay_apart() -> None:
    long = "void gemm<" + "int, " * 30
    base, new = holding(lambda size: {f"{long}1>(a)": 2}), holding(lambda size: {f"{long}2>(a)": 2})
    (told,) = growth(base, new)
    assert "2 fewer" in told and "1>" in told and "2>" in told


def test_sizes_that_differ_in_several_ways_get_a_sentence_each_at_most_three() -> None:
    base = holding(lambda size: {"gemm": 4})
    assert len(growth(base, holding(lambda size: {"gemm": 4, f"tile_{size}": 1}))) == 3
    assert "7 fewer a0" in growth(holding(lambda size: {f"a{i}": 7 for i in range(9)}), base)[0]
    assert growth(holding(lambda size: {f"a{i}": 7 for i in range(9)}), base)[0].endswith("4 other names")


def test_without_stored_kernels_the_numbers_of_nodes_are_told() -> None:
    base, new = holding(lambda size: None, lambda size: 427), holding(lambda size: {"gemm": 431})
    assert growth(base, new) == ("decode list main: nodes per graph went from 427 to 431 at all 3 sizes",)


kernels = st.dictionaries(st.sampled_from([NORM, COPY, "gemm", "copy"]), st.integers(1, 5), min_size=1)


@given(before=kernels, after=kernels)
@settings(max_examples=50, deadline=None)
def test_equal_graphs_are_silent_and_others_never(before: dict[str, int], after: dict[str, int]) -> None:
    told = growth(holding(lambda size: before), holding(lambda size: after))
    assert bool(told) == (before != after)
    assert len(told) <= 1
