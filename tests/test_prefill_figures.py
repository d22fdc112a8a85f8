"""Figures of prefill and of traffic: what they are computed from, and that pages hold with and without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.figures.breaks import draw_prefill_launches, prefill_launches
from graphtune.figures.lists import joint_table, list_totals
from graphtune.figures.phases import of_phase
from graphtune.figures.prefill import PrefillTimes, crossovers, draw_crossovers, prefill_curves, prefill_times
from graphtune.figures.shown_lists import ShownList, decode_lists, joined, prefill_lists
from graphtune.figures.traffic import decode_traffic, draw_traffic, prefill_traffic
from graphtune.report import page, render
from graphtune.results import CaptureList
from graphtune.stats import combined_us
from graphtune.tune.memory_model import memory_model
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.workload import PrefillShare
from tests.synthetic import (
    PREFILL_LIST,
    both_phases_sweep,
    captured_list,
    cpu_sweep,
    h200_sweep,
    prefill_cell,
    small_sweep,
)

QUESTION = Question(gpu_mem="80")


def measured() -> PrefillTimes:
    times = prefill_times(both_phases_sweep().cells)
    assert times is not None
    return times


def test_times_are_read_by_backend_bucket_and_tokens() -> None:
    times = measured()
    assert set(times.replay) == {"breakable", "full"} and times.backend == "breakable"
    assert tuple(sorted(times.replay["breakable"])) == PREFILL_LIST
    assert set(times.replay["breakable"][768]) == {513, 768}
    one = combined_us({1: 5160.0, 2: 5160.0 * 1.006})
    assert times.replay["breakable"][64][64] == pytest.approx(one)
    assert prefill_times(h200_sweep().cells) is None


def test_other_requests_and_prefixes_are_not_mixed_in() -> None:
    cell = prefill_cell()
    others = tuple(
        replace(p, requests=8) if index % 2 else replace(p, context_tokens=512) for index, p in enumerate(cell.points)
    )
    assert prefill_times([cell, replace(cell, points=others)]) == prefill_times([cell])


def test_crossovers_say_where_padding_stops_paying() -> None:
    by_bucket = {one.bucket: one for one in crossovers(measured()) if one.backend == "breakable"}
    assert by_bucket[64].to_the_end and by_bucket[64].from_tokens == 1
    assert by_bucket[512].from_tokens is None and by_bucket[512].factor is None
    full = {one.bucket: one for one in crossovers(measured()) if one.backend == "full"}
    at = full[768].from_tokens
    assert at is not None and 512 < at < 768 and full[768].factor == pytest.approx(768 / at)
    assert [row[-1] for row in draw_crossovers(crossovers(measured())).table.rows].count("crosses") == 2


@given(
    buckets=st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True).map(sorted),
    data=st.data(),
)
def test_no_size_between_a_crossover_and_its_bucket_is_faster_eager(buckets: list[int], data: st.DataObject) -> None:
    us = st.floats(100.0, 1000.0)
    raws = {bucket: sorted({below + 1, bucket}) for below, bucket in zip([0, *buckets], buckets, strict=False)}
    replay = {bucket: {raw: data.draw(us) for raw in some} for bucket, some in raws.items()}
    eager = {raw: data.draw(us) for some in raws.values() for raw in some}
    times = PrefillTimes({"breakable": replay}, eager)
    found = crossovers(times)
    assert [one.bucket for one in found] == buckets
    for one in found:

        def loss(raw: float, bucket: int = one.bucket) -> float:
            padded, exact = times.replay_us("breakable", bucket, raw), times.eager_us(raw)
            assert padded is not None and exact is not None
            return padded - exact

        if one.from_tokens is None:
            assert loss(one.bucket) > 0
            continue
        assert all(loss(raw) <= 1e-6 for raw in range(1, one.bucket + 1) if raw >= one.from_tokens)
        if one.to_the_end:
            assert one.from_tokens == min(eager)
        else:
            assert loss(one.from_tokens) == pytest.approx(0.0, abs=1e-6)


def test_a_list_follows_eager_where_its_engine_does_not_replay() -> None:
    times = measured()
    capped = ShownList(("SGLang",), (4, 64), "capped", False, 2.0)
    (curve,) = prefill_curves(times, [capped], 128)
    us = dict(zip(curve.tokens, curve.step_us, strict=True))
    assert us[1] == times.eager_us(1) and us[4] == times.replay_us("breakable", 4, 4)
    assert us[31] == times.eager_us(31) and us[32] == times.replay_us("breakable", 64, 32)
    assert us[100] == times.eager_us(100), "above its top"


def test_launches_of_a_breakable_step_are_told_apart() -> None:
    rows = {(one.tokens, one.backend): one for one in prefill_launches(both_phases_sweep().cells)}
    assert rows[64, "breakable"].calls == 33 + 96 and rows[64, "eager"].calls == 427
    drawn = draw_prefill_launches(tuple(rows.values()))
    assert "takes 427 calls of the host, a breakable replay 129" in drawn.says
    assert drawn.table.rows[1][:7] == ("64", "breakable", "427", "331", "96", "33", "129")


def test_both_phases_in_one_pool_stand_beside_each_alone() -> None:
    cells = both_phases_sweep().cells
    models = (memory_model(cells, "decode"), memory_model(cells, "prefill"))
    found = joint_table(cells, *models)
    assert found is not None
    decode = 90 + 35
    assert [row[0] for row in found.table.rows] == [
        "decode sglang then prefill sglang",
        "prefill sglang then decode sglang",
    ]
    totals = list_totals(*models)
    assert totals is not None and {row[1] for row in totals.table.rows} == {"decode", "prefill"}
    alone = {row[1]: row[4] for row in totals.table.rows if row[0] == "sglang" and row[2] == "both shared, descending"}
    assert alone["decode"] == f"{decode:.1f}"
    assert found.table.rows[0][1] == alone["decode"] and float(found.table.rows[0][5]) > 0
    assert float(found.table.rows[0][4].replace(",", "")) == pytest.approx(
        decode + float(alone["prefill"].replace(",", ""))
    )
    assert joint_table(h200_sweep().cells, *models) is None


def test_prefill_lists_are_those_of_engines() -> None:
    (only,) = prefill_lists(both_phases_sweep().cells)
    assert only.sizes == PREFILL_LIST and only.names == ("SGLang's default",) and only.bucket(31) == 32
    assert only.bucket(1) is None, "padding to four times the tokens is refused"
    mine = CaptureList("mine", "prefill", "full", (8, 64), waste_cap=None)
    (own,) = prefill_lists([replace(prefill_cell(), captured_lists=(captured_list(mine),))])
    assert own.names == ("list “mine”",) and own.bucket(1) == 8


def test_lists_that_serve_alike_are_one_under_all_their_names() -> None:
    one = ShownList(("a",), (1, 2), "always", False)
    both = joined([one, replace(one, names=("b",), recommended=True), replace(one, padding="exact", names=("c",))])
    assert [(of.names, of.recommended) for of in both] == [(("a", "b"), True), (("c",), False)]


def test_traffic_shares_add_up_and_show_what_serves_them() -> None:
    answer = recommend(h200_sweep(), QUESTION)
    lists = decode_lists(answer)
    found = decode_traffic(answer.workload, lists)
    assert found is not None and sum(found.shares.values()) == pytest.approx(1.0)
    drawn = draw_traffic(found)
    exact = next(index for index, of in enumerate(lists) if of.padding == "exact")
    by_size = {row[0]: row[2:] for row in drawn.table.rows}
    assert by_size["33"][exact] == "eager" and by_size["32"][exact] == "32"
    assert lists[0].recommended and by_size["3"][0] == f"{lists[0].bucket(3)}"


def test_prefill_traffic_is_drawn_where_there_is_some() -> None:
    workload = recommend(h200_sweep(), QUESTION).workload
    assert prefill_traffic(workload, ()) is None
    found = prefill_traffic(replace(workload, prefill=(PrefillShare(100, 1.0), PrefillShare(300, 3.0))), ())
    assert found is not None and found.shares == {100: 0.25, 300: 0.75}
    assert "mean 250.0" in draw_traffic(found).says


def test_a_page_with_prefill_holds_its_figures_and_the_same_decode_figures() -> None:
    with_prefill, without = (page(of, QUESTION)["sections"] for of in (both_phases_sweep(), h200_sweep()))
    drawn = {one.slug: one for section in with_prefill for one in section.drawings}
    before = {one.slug: one for section in without for one in section.drawings}
    assert set(drawn) - set(before) == {
        "prefill-time",
        "prefill-crossover",
        "prefill-launches",
        "timeline-prefill",
        "graph-growth-prefill",
        "capture-seconds-prefill",
    }
    for slug in set(before) - {"wall-time", "gpu-memory", "step-time", "trade", "traffic-decode"}:
        assert drawn[slug].table == before[slug].table, slug


@pytest.mark.filterwarnings("error")
def test_pages_hold_without_prefill_and_with_nothing_else() -> None:
    for of in (cpu_sweep(), small_sweep((1, 2)), replace(h200_sweep(), cells=(prefill_cell(),))):
        text = render(of)
        assert ("Where a padded replay stops paying" in text) == any(of_phase(of.cells, "prefill")[0].points)
