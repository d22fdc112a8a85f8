"""`compare` on sweeps of both phases: points, lists of each purpose, and profiles of breakable graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphtune.compare.model import Comparison, Row
from graphtune.compare.sweeps import compare_sweeps
from graphtune.results import CapturedList, CaptureList, CellResult, LaunchProfile, Point
from graphtune.store import Sweep
from tests.synthetic import MIB, captured_list, cell_result, point, sweep

BUCKETS = (64, 256, 1024)


def prefill_point(tokens: int, padded: int, us: float, *, requests: int = 1, prefix: int = 0, **changes: Any) -> Point:
    backend = changes.pop("backend", "breakable")
    on_graph = backend != "eager"
    one = point(tokens, prefix, "graph" if on_graph else "eager", us, gpu_us=0.9 * us)
    return replace(
        one, phase="prefill", padded_size=padded if on_graph else tokens, backend=backend, requests=requests, **changes
    )


def prefill_list(backend: str = "breakable", sizes: tuple[int, ...] = BUCKETS) -> CapturedList:
    return captured_list(CaptureList("sglang", "prefill", backend, sizes))


def of_purpose(cell: CellResult, purpose: str) -> CellResult:
    return replace(cell, cell={**cell.cell, "purpose": purpose})


def both_phases(factor: float = 1.0, *, torch_bytes: int = 40 * MIB, joint_bytes: int = 30 * MIB) -> Sweep:
    """Three processes; prefill's padded replays and eager steps, two requests with a prefix, decode beside."""
    cells = []
    for process in (1, 2, 3):
        noise = 1 + 0.0004 * process
        points = [
            prefill_point(tokens, bucket, factor * noise * (900 + bucket), backend=backend)
            for bucket in BUCKETS
            for tokens in (bucket // 2 + 1, bucket)
            for backend in ("breakable", "eager")
        ]
        points += [prefill_point(64, 64, 1000 * factor * noise, requests=2, prefix=512)]
        cells.append(cell_result([prefill_list()], points, process=process))
        decode = captured_list(CaptureList("main", "decode", "full", (1, 8)))
        cells.append(cell_result([decode], [point(8, 1024, "graph", 800 * noise)], process=process))
    joint = captured_list(CaptureList("main", "decode", "full", (1, 8)), each_bytes=joint_bytes, position=2)
    first = captured_list(CaptureList("main", "decode", "full", (1, 8)), each_bytes=70 * MIB)
    memory = replace(prefill_list(sizes=(64,)), graph_bytes=None, torch_bytes=torch_bytes)
    cells.append(of_purpose(cell_result([prefill_list(), joint], []), "joint"))
    cells.append(of_purpose(cell_result([first, replace(prefill_list(), position_in_process=2)], []), "joint"))
    cells.append(of_purpose(cell_result([memory], []), "memory"))
    return sweep(cells)


def named(comparison: Comparison, start: str) -> list[Row]:
    return [row for row in comparison.rows if row.name.startswith(start)]


def test_both_phases_compared_with_themselves_are_silent() -> None:
    comparison = compare_sweeps(both_phases(), both_phases())
    assert comparison.quiet
    assert len({row.name for row in comparison.rows}) == len(comparison.rows), "every row has a name of its own"


def test_slower_prefill_is_found_and_decode_stays_the_same() -> None:
    comparison = compare_sweeps(both_phases(), both_phases(1.05))
    times = [row for row in comparison.rows if row.what.kind == "time"]
    assert {row.what.phase for row in times if row.verdict == "slower"} == {"prefill"}
    assert {row.verdict for row in times if row.what.phase == "decode"} == {"same"}
    assert {mean.group for mean in comparison.means()} >= {"prefill graph step_us", "prefill eager step_us"}
    (padded,) = named(comparison, "prefill graph step_us, 513 in 1024 tokens at 0")
    (several,) = named(comparison, "prefill graph step_us, 64 tokens of 2 requests at 512")
    assert (padded.verdict, several.verdict) == ("slower", "slower")


def test_two_batches_of_as_many_tokens_are_two_rows() -> None:
    one = sweep([cell_result([], [prefill_point(64, 64, 900), prefill_point(64, 64, 1500, requests=8)])])
    comparison = compare_sweeps(one, one)
    assert [round(row.base or 0) for row in comparison.rows if row.what.quantity == "step_us"] == [900, 1500]


def test_backends_are_named_where_a_phase_has_several() -> None:
    lists = [prefill_list("breakable"), prefill_list("full")]
    points = [prefill_point(64, 64, 900), prefill_point(64, 64, 700, backend="full"), point(8, 1024, "graph", 800)]
    of = sweep([cell_result(lists, points)])
    found = [row.name for row in compare_sweeps(of, of).rows if row.what.quantity in ("step_us", "graph_bytes")]
    assert found == [
        "decode graph step_us, 8 requests at 1024",
        "prefill graph step_us, 64 tokens at 0, breakable",
        "prefill graph step_us, 64 tokens at 0, full",
        "prefill graph_bytes, sglang 3 to 1024, breakable",
        "prefill graph_bytes, sglang 3 to 1024, full",
    ]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"joint_bytes": 60 * MIB}, "decode graph_bytes, main 2 to 8, after the other phase in one pool"),
        ({"torch_bytes": 80 * MIB}, "prefill torch_bytes, sglang 1 to 64, for memory alone"),
    ],
)
def test_bytes_of_both_lists_together_and_of_lists_captured_for_memory_are_rows_of_their_own(
    changed: dict[str, int], name: str
) -> None:
    comparison = compare_sweeps(both_phases(), both_phases(**changed))
    differing = [row.name for row in comparison.rows if row.verdict != "same"]
    assert name in differing
    assert all(
        word in ("joint second", "memory")
        for row in comparison.rows
        if row.verdict != "same"
        for word in [row.what.purpose]
    )


def test_segments_and_launches_in_breaks_that_changed_are_told() -> None:
    def profiled(segments: int, breaks: int) -> Sweep:
        profile = LaunchProfile(1024, 0, "graph", 90, 800.0, 900.0, 0.1, "prefill", "breakable", segments, breaks)
        return sweep([replace(cell_result([prefill_list()], []), launch_profiles=(profile,))])

    assert compare_sweeps(profiled(29, 56), profiled(33, 64)).growth == (
        "prefill graph step of 1024 at 0 (breakable): segments went from 29 to 33",
        "prefill graph step of 1024 at 0 (breakable): launches in the breaks between segments went from 56 to 64",
    )
