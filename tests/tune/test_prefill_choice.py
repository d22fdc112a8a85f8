"""Prefill: the latency model, the list, its flags, and both phases out of one device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.engines import ENGINES
from graphtune.results import CaptureList, Point
from graphtune.store import Sweep
from graphtune.tune.candidates import Evaluator, bucket_for
from graphtune.tune.prefill_choice import MOST_SLOWER, coalesced, knots_of
from graphtune.tune.prefill_model import PrefillSteps, prefill_models
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation import EngineAnswer
from graphtune.tune.recommendation_text import as_text
from graphtune.tune.step_table import Step
from graphtune.tune.workload import DecodeShare, PrefillShare, Workload
from tests.synthetic import (
    MIB,
    PREFILL_LIST,
    both_phases_sweep,
    captured_list,
    cell_result,
    point,
    prefill_points,
    small_sweep,
    sweep,
)
from tests.tune.answers import checked, codes
from tests.tune.test_trace_traffic import ASKED, trace

BOTH = both_phases_sweep()
MODEL = prefill_models(BOTH.cells)["breakable"]


def shares(tokens: Iterable[int], decode: int = 4) -> Workload:
    prefill = tuple(PrefillShare(n, 1.0) for n in tokens)
    return Workload((DecodeShare(decode, 10.0),), prefill, decode, None, "made up", "per_step")


def one(of: Sweep, engine: str, workload: Workload, **limits: int) -> EngineAnswer:
    answer = recommend(of, Question(gpu_mem="80", workload=workload, engines=(engine,), **limits))  # type: ignore[arg-type]
    checked(answer)
    return answer.engine(engine)


@given(st.sampled_from(PREFILL_LIST), st.integers(1, 8192))
@settings(max_examples=80, deadline=None)
def test_a_bucket_takes_no_longer_than_when_it_is_full(bucket: int, tokens: int) -> None:
    figure, full = MODEL.step(tokens, bucket), MODEL.step(bucket, bucket)
    if tokens > bucket:
        assert figure is None
        return
    assert figure is not None and full is not None and figure.us <= full.us + 1e-9
    below = max((size for size in PREFILL_LIST if size < bucket), default=0)
    assert (figure.provenance == "measured") == (tokens in (below + 1, bucket))


def test_what_was_not_measured_lies_between_what_was_or_is_unknown() -> None:
    assert MODEL.step(9000, None) is None and MODEL.step(9000, 16384) is None
    low, high, between = (MODEL.step(100, bucket) for bucket in (1024, 2048, 1536))
    assert low and high and between and low.us < between.us < high.us and between.provenance == "interpolated"
    steps = PrefillSteps(MODEL, (), "always", None)
    assert steps.seconds(16384) > steps.seconds(8192) > steps.seconds(100)


def test_an_overhead_of_eager_steps_is_added_to_eager_prefill() -> None:
    slower = prefill_models(BOTH.cells, 5000.0)["breakable"]
    for bucket in (None, 512):
        one, other = MODEL.step(300, bucket), slower.step(300, bucket)
        assert one is not None and other is not None
        assert other.us - one.us == pytest.approx(5000.0 if bucket is None else 0.0)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt_llm"])
def test_a_prefill_list_is_recommended_with_flags_for_both_phases(engine: str) -> None:
    found = one(BOTH, engine, shares((8, 20, 60, 100)))
    assert found.prefill is not None and found.prefill.unit == "tokens" and found.prefill_share == 1.0
    assert found.prefill.backend == "breakable" and found.prefill.coverage == 1.0
    assert found.prefill_eager is not None and found.prefill.expected_step_us is not None
    assert found.prefill.expected_step_us < 0.9 * (found.prefill_eager.expected_step_us or 0)
    assert found.flags is not None
    text = found.flags.yaml or " ".join(found.flags.args)
    assert ",".join(map(str, found.prefill.capture_sizes)) in text.replace(" ", "")
    assert found.joint is not None and found.memory is not None and found.decode is not None
    assert found.joint.graph_bytes == (found.decode.graph_bytes or 0) + (found.prefill.graph_bytes or 0)
    assert found.memory.graph_bytes == found.joint.graph_bytes
    assert found.prefill.kv_tokens == found.decode.kv_tokens == found.memory.kv_tokens


def test_padding_above_the_cap_runs_eager() -> None:
    """SGLang refuses a bucket of more than twice the tokens: 9 tokens in a bucket of 32 are eager."""
    found = one(BOTH, "sglang", shares((9, 32)), max_graphs=2)
    assert found.prefill is not None
    cap = ENGINES["sglang"].dispatch.prefill_cap_factor
    served = [bucket_for(n, found.prefill.capture_sizes, "capped", cap) for n in (9, 32)]
    assert found.prefill.coverage == pytest.approx(sum(bucket is not None for bucket in served) / 2)


def sweep_where_eager_wins_at(losing: set[int]) -> Sweep:
    """Replay is faster by a quarter but at some buckets, where it is slower by a quarter."""
    buckets = (64, 128, 256, 512)
    of = CaptureList("four", "prefill", "breakable", buckets)

    def slower(points: list[Point]) -> list[Point]:
        made = []
        for at in points:
            if at.execution == "graph":
                us = 1.25 if at.padded_size in losing else 0.75
                times = at.step_us and replace(at.step_us, us=tuple(one * us for one in at.step_us.us))
                at = replace(at, step_us=times)
            made.append(at)
        return made

    flat = [replace(at, step_us=point(1, 0, "graph", 1000.0).step_us) for at in prefill_points(buckets)]
    cells = [
        replace(made, cell={**made.cell, "phase": "prefill", "process": process})
        for process in (1, 2)
        for made in [cell_result([captured_list(of)], slower(flat), process=process, with_ledger=False)]
    ]
    return sweep([*small_sweep((1, 2, 4), processes=2).cells, *cells])


@given(st.sets(st.sampled_from((64, 128, 256, 512))), st.sets(st.integers(1, 512), min_size=1))
@settings(max_examples=25, deadline=None)
def test_no_bucket_is_kept_that_is_slower_than_eager(losing: set[int], tokens: set[int]) -> None:
    of = sweep_where_eager_wins_at(losing)
    model = prefill_models(of.cells)["breakable"]
    found = one(of, "sglang", shares(tokens))
    assert found.prefill is not None and not losing & set(found.prefill.capture_sizes)
    assert not any(model.slower_than_eager(size, MOST_SLOWER) for size in found.prefill.capture_sizes)


def test_when_eager_wins_everywhere_prefill_graphs_are_off() -> None:
    of = sweep_where_eager_wins_at({64, 128, 256, 512})
    answer = recommend(of, Question(gpu_mem="80", workload=shares((100,)), engines=("sglang",)))
    data = checked(answer)
    assert data["engines"]["sglang"]["prefill"]["backend"] == "eager" and "no_prefill_list_pays" in codes(data)
    assert '"prefill":{"backend":"disabled"}' in " ".join(data["engines"]["sglang"]["flags"]["args"])


def test_limits_are_shared_by_both_phases() -> None:
    """Brute force over all pairs of measured sub-lists: none within the limit takes less time for the whole traffic."""
    of = sweep_where_eager_wins_at(set())
    traffic = shares((60, 120, 250, 500))
    found = one(of, "sglang", traffic, max_graphs=3)
    assert found.joint is not None and found.decode is not None and found.prefill is not None
    assert len(found.joint.decode_sizes) + len(found.joint.prefill_sizes) <= 3

    def total(decode_us: float, prefill_us: float) -> float:
        return 10 * decode_us + 4 * prefill_us

    def prefill_us(sizes: tuple[int, ...]) -> float:
        served = [bucket_for(n, sizes, "capped", 2.0) for n in (60, 120, 250, 500)]
        return sum(1000.0 if bucket is None else 750.0 for bucket in served) / 4

    decode_us = {(): 3040.0, (4,): 1040.0}
    best = min(
        total(decode_us[decode], prefill_us(sizes))
        for decode, count in product(decode_us, range(4))
        for sizes in combinations((64, 128, 256, 512), count)
        if len(decode) + count <= 3
    )
    ours = total(found.decode.expected_step_us or 0, found.prefill.expected_step_us or 0)
    assert ours == pytest.approx(best, rel=0.011)


def test_a_common_list_serves_both_phases() -> None:
    found = one(BOTH, "vllm", shares((16, 30, 60), decode=30))
    assert found.joint is not None and found.joint.one_list and found.prefill is not None and found.decode is not None
    assert found.joint.prefill_sizes and found.flags is not None
    written = json.loads(found.flags.args[1])["cudagraph_capture_sizes"]
    assert written == list(found.joint.prefill_sizes)
    assert set(found.joint.decode_sizes) == {size for size in written if size <= 512}
    answer = recommend(BOTH, Question(gpu_mem="80", workload=shares((16, 30, 60), decode=30), engines=("vllm",)))
    warning = next(one for one in checked(answer)["warnings"] if one["code"] == "common_list_lacks_sizes")
    assert "not checked for prefill are not in it: 1, 2, " in warning["message"]
    assert found.prefill.expected_step_us < (found.prefill_eager.expected_step_us or 0)  # type: ignore[operator, union-attr]


def test_without_prefill_the_answer_says_why() -> None:
    no_steps = recommend(BOTH, Question(gpu_mem="80", engines=("sglang",)))
    assert "no prefill steps" in no_steps.engine("sglang").absent["prefill"]
    no_times = recommend(small_sweep((1, 2, 4)), Question(workload=shares((5,)), engines=("sglang",)))
    assert "no prefill times" in no_times.engine("sglang").absent["prefill"]
    too_long = recommend(BOTH, Question(workload=shares((9000,)), engines=("sglang",)))
    assert "longer than all that were measured" in too_long.engine("sglang").absent["prefill"]
    for answer in (no_steps, no_times, too_long):
        checked(answer)


def test_a_trace_is_played_with_measured_prefill_times() -> None:
    question = replace(ASKED, workload=trace(200, 0.02), prefill_tokens_per_s=None, engines=("sglang",))
    answer = recommend(BOTH, question)
    data = checked(answer)["engines"]["sglang"]
    assert data["prefill"]["unit"] == "tokens" and "prefill_not_measured" not in codes(checked(answer))
    joint = data["joint"]
    assert joint["tokens_per_s"] >= data["decode"]["simulated"]["tokens_per_s"] * 0.99
    assert joint["max_running_requests"] >= 1
    text = as_text(answer)
    assert "prefill: " in text and "both phases: " in text and "tokens a second" in text


def test_a_small_cache_prices_graphs_by_the_tokens_they_cost() -> None:
    """Room for a few requests beside a list of 120 MiB: the throughput objective takes what leaves more of it."""
    of = small_sweep(tuple(range(1, 17)), graph_us=[1000.0 + n for n in range(16)], eager_us=[1400.0] * 16, processes=2)
    heavy = captured_list(CaptureList("heavy", "decode", "full", tuple(range(1, 17))), first_bytes=1200 * MIB)
    light = captured_list(CaptureList("light", "decode", "full", (16,)), first_bytes=60 * MIB)
    cells = [replace(cell, captured_lists=(heavy, light)) for cell in of.cells]
    question = replace(ASKED, gpu_mem="18GiB", workload=trace(60, 0.001, 30), engines=("vllm",), objective="throughput")
    answer = recommend(sweep(cells), question)
    found = answer.engine("vllm")
    assert found.decode is not None and found.decode.bytes_of_list == "light"


SMALL = sweep_where_eager_wins_at({512})


@given(
    st.builds(
        Question,
        gpu_mem=st.sampled_from(["24", "80"]),
        workload=st.builds(shares, st.sets(st.integers(1, 600), min_size=1), st.integers(1, 6)),
        max_graph_bytes=st.none() | st.integers(0, 2**28),
        max_capture_s=st.none() | st.floats(0, 1),
        max_graphs=st.none() | st.integers(1, 8),
        min_kv_tokens=st.none() | st.integers(1, 10**5),
        engines=st.sampled_from([("sglang",), ("vllm",), ("tensorrt_llm",)]),
        role=st.sampled_from([None, None, "decode", "prefill"]),
        eager_overhead_us=st.sampled_from([0.0, 4000.0]),
    )
)
@settings(max_examples=40, deadline=None)
def test_both_phases_together_stay_within_any_limits(question: Question) -> None:
    answer = recommend(SMALL, question)
    checked(answer)
    found = answer.engine(question.engines[0])
    lists = [of for of in (found.decode, found.prefill) if of is not None]
    if not lists:
        return
    graph_bytes = sum(of.graph_bytes or 0 for of in lists)
    assert question.max_graph_bytes is None or graph_bytes <= question.max_graph_bytes
    assert question.max_capture_s is None or sum(of.capture_s or 0 for of in lists) <= question.max_capture_s + 1e-9
    assert question.max_graphs is None or sum(len(of.capture_sizes) for of in lists) <= question.max_graphs
    assert found.memory is not None and found.memory.graph_bytes == graph_bytes
    assert question.min_kv_tokens is None or found.memory.kv_tokens >= question.min_kv_tokens
    for of in lists:
        assert of.kv_tokens == found.memory.kv_tokens


@given(st.dictionaries(st.integers(1, 8192), st.floats(0.1, 5), min_size=1, max_size=200), st.data())
@settings(max_examples=40, deadline=None)
def test_prefill_taken_together_takes_as_long_under_any_list(weights: dict[int, float], data: st.DataObject) -> None:
    steps = [Step(tokens, weight, 0.0) for tokens, weight in weights.items()]
    few = coalesced(steps, knots_of([MODEL], 2.0))
    assert len(few) <= len(steps) and sum(s.weight for s in few) == pytest.approx(sum(s.weight for s in steps))
    sizes = tuple(sorted(data.draw(st.sets(st.sampled_from(PREFILL_LIST), max_size=8))))
    for padding, cap in (("capped", 2.0), ("always", None)):
        whole, short = (Evaluator(some, MODEL, cap).evaluate(sizes, padding) for some in (steps, few))  # type: ignore[arg-type]
        assert short.expected_step_us == pytest.approx(whole.expected_step_us, rel=1e-3)
        assert short.coverage == pytest.approx(whole.coverage)
        assert short.padding_waste == pytest.approx(whole.padding_waste, abs=0.02)
