"""Figures of prefill and of traffic: what they are computed from, and that pages hold with and without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from graphtune.figures.breaks import draw_prefill_launches, head_bytes, prefill_launches
from graphtune.figures.lists import joint_table, list_totals
from graphtune.figures.phases import of_phase
from graphtune.figures.prefill import crossovers, draw_crossovers, main_backend, prefill_curves, replays
from graphtune.figures.shown_lists import ShownList, captured_prefill_lists, decode_lists, joined, prefill_lists
from graphtune.figures.traffic import decode_traffic, draw_traffic, prefill_traffic
from graphtune.report import page, render
from graphtune.results import CaptureList
from graphtune.stats import combined_us
from graphtune.tune.memory_model import memory_model
from graphtune.tune.prefill_model import PrefillKey, PrefillModel, prefill_models
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.workload import PrefillShare
from tests.synthetic import (
    PREFILL_LIST,
    both_phases_sweep,
    both_phases_traffic,
    captured_list,
    cpu_sweep,
    h200_sweep,
    prefill_cell,
    small_sweep,
)

QUESTION = Question(gpu_mem="80")
ASKED = Question(gpu_mem="80", workload=both_phases_traffic())


def measured() -> dict[str, PrefillModel]:
    return prefill_models(both_phases_sweep().cells)


def test_times_are_read_by_backend_bucket_and_tokens() -> None:
    models = measured()
    assert set(models) == {"breakable", "full"} and main_backend(models) == "breakable"
    by_bucket = replays(models["breakable"])
    assert tuple(sorted(by_bucket)) == PREFILL_LIST and set(by_bucket[768]) == {513, 768}
    assert by_bucket[64][64] == pytest.approx(combined_us({1: 5160.0, 2: 5160.0 * 1.006}))


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
    table: dict[PrefillKey, float] = {}
    for below, bucket in zip([0, *buckets], buckets, strict=False):
        for raw in sorted({below + 1, bucket}):
            table[PrefillKey("breakable", bucket, raw)] = data.draw(us)
            table[PrefillKey("eager", None, raw)] = data.draw(us)
    model = PrefillModel("breakable", table, ())
    found = crossovers({"breakable": model})
    assert [one.bucket for one in found] == buckets
    for one in found:

        def loss(raw: int, bucket: int = one.bucket) -> float:
            padded, exact = model.step(raw, bucket), model.step(raw, None)
            assert padded is not None and exact is not None
            return padded.us - exact.us

        if one.from_tokens is None:
            assert loss(one.bucket) > 0
            continue
        assert all(loss(raw) <= 1e-6 for raw in range(1, one.bucket + 1) if raw >= one.from_tokens)
        if one.to_the_end:
            assert one.from_tokens == 1
        else:
            assert loss(int(one.from_tokens)) >= -1e-6, "the size below the crossing, where eager takes over"


def test_a_list_follows_eager_where_its_engine_does_not_replay() -> None:
    models = measured()
    capped = ShownList(("SGLang",), (4, 64), "capped", False, 2.0, "breakable")
    (curve,) = prefill_curves(models, [capped], 128)
    us = dict(zip(curve.tokens, curve.step_us, strict=True))

    def at(raw: int, bucket: int | None) -> float:
        figure = models["breakable"].step(raw, bucket)
        assert figure is not None
        return figure.us

    assert us[1] == at(1, None) and us[4] == at(4, 4)
    assert us[31] == at(31, None) and us[32] == at(32, 64)
    assert us[100] == at(100, None), "above its top"


def test_launches_of_a_breakable_step_are_told_apart() -> None:
    rows = {(one.tokens, one.backend): one for one in prefill_launches(both_phases_sweep().cells)}
    assert rows[64, "breakable"].calls == 33 + 96 and rows[64, "eager"].calls == 427
    drawn = draw_prefill_launches(tuple(rows.values()))
    assert "takes 427 calls of the host, a breakable replay 129" in drawn.says
    assert drawn.table.rows[1][:7] == ("64", "breakable", "427", "331", "96", "33", "129")


def test_logits_that_a_recorded_head_would_bind_are_said() -> None:
    cells = both_phases_sweep().cells
    head = head_bytes(cells)
    vocabulary = cells[0].cell["model_config"]["vocab_size"]
    assert head is not None and head.tokens == max(PREFILL_LIST)
    assert head.nbytes == head.tokens * vocabulary * 2
    assert (
        f"logits of {head.tokens:,} tokens would have bound"
        in draw_prefill_launches(prefill_launches(cells), head).says
    )
    assert head_bytes(small_sweep().cells) is None


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


def test_prefill_lists_are_the_recommended_ones_and_each_engine_s_own() -> None:
    answer = recommend(both_phases_sweep(), ASKED)
    lists = prefill_lists(answer)
    assert [of.recommended for of in lists] == sorted((of.recommended for of in lists), reverse=True)
    sglang = answer.engine("sglang").prefill
    assert sglang is not None
    first = next(of for of in lists if "SGLang" in of.names)
    assert first.sizes == sglang.capture_sizes and first.backend == sglang.backend and first.padding == "capped"
    assert any("SGLang's default" in of.names for of in lists)
    assert prefill_lists(recommend(h200_sweep(), QUESTION)) == ()


def test_captured_prefill_lists_pad_up_to_the_cap_of_the_sweep() -> None:
    capped, free = (CaptureList("mine", "prefill", "full", (8, 64), waste_cap=cap) for cap in (2.0, None))
    cell = replace(prefill_cell(), captured_lists=(captured_list(capped), captured_list(free)))
    of, other = captured_prefill_lists([cell])
    assert of.names == ("list “mine”",) and of.bucket(3) is None and other.bucket(3) == 8


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


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures with their tables alone: drawing some fifty of them is most of a page's time."""
    monkeypatch.setattr("graphtune.figures.base._svg", lambda *of, **more: Markup())


@pytest.mark.usefixtures("without_pictures")
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


@pytest.mark.usefixtures("without_pictures")
def test_traffic_with_prefill_has_its_answer_in_the_cards_and_its_own_histogram() -> None:
    shown = page(both_phases_sweep(), ASKED)
    card = shown["cards"][0]
    decode, prefill = card.tables
    assert decode.title == "decode, in requests" and prefill.title == "prefill, in tokens, breakable"
    answer = recommend(both_phases_sweep(), ASKED).engine("sglang").prefill
    assert answer is not None and dict(prefill.rows)["graph coverage"][0] == f"{answer.coverage:.1%}"
    assert "Both phases: " in card.others and any("longer without bucket" in text for text in card.more)
    slugs = [one.slug for section in shown["sections"] for one in section.drawings]
    assert slugs[1:3] == ["traffic-decode", "traffic-prefill"]
    (decode_only, *none) = page(both_phases_sweep(), QUESTION)["cards"][0].tables
    assert decode_only.title == "" and not none


@pytest.mark.filterwarnings("error")
def test_pages_hold_without_prefill_and_with_nothing_else() -> None:
    for of in (cpu_sweep(), small_sweep((1, 2)), replace(h200_sweep(), cells=(prefill_cell(),))):
        text = render(of)
        assert ("Where a padded replay stops paying" in text) == any(of_phase(of.cells, "prefill")[0].points)
