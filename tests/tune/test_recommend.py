from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.engines import ENGINES
from graphtune.errors import Finding, InputError
from graphtune.plan import PaddedTo
from graphtune.results import CaptureList
from graphtune.stats import Ratio
from graphtune.store import read_sweep
from graphtune.tune.candidates import bucket_for
from graphtune.tune.latency_model import latency_model
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.workload import DecodeShare, Workload, steady, uniform
from tests.synthetic import (
    MIB,
    SGLANG_LIST,
    captured_list,
    cell_result,
    cpu_sweep,
    environment,
    failed_cell,
    h200_sweep,
    model_facts,
    padded_points,
    point,
    small_sweep,
    sweep,
    write_sweep,
)
from tests.tune.answers import SCHEMA, SPARSE, checked, codes

RICH = h200_sweep()


def test_the_published_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "question",
    [
        Question(),
        Question(gpu_mem="80"),
        Question(gpu_mem="16"),
        Question(gpu_mem="80", max_graph_bytes=50 * MIB),
        Question(gpu_mem="80", min_kv_tokens=450_000),
        Question(gpu_mem="80", max_graphs=10, max_capture_s=1.0),
        Question(gpu_mem="80", max_running_requests=100, context_tokens=700),
        Question(gpu_mem="80", context_tokens=40_000),
        Question(gpu_mem="141", workload="steady 300", engines=("vllm",)),
        Question(gpu_mem="141", workload="steady 3000"),
        Question(gpu_mem="141", max_running_requests=700),
        Question(gpu_mem="80", eager_overhead_us=9000.0),
    ],
    ids=str,
)
def test_every_answer_is_valid_and_explains_its_nulls(question: Question) -> None:
    checked(recommend(RICH, question))


@given(
    st.builds(
        Question,
        gpu_mem=st.none() | st.sampled_from(["16", "24", "80", "141", "33.5", "60GiB"]),
        workload=st.sampled_from(["uniform", "steady 1", "steady 17", "steady 600"]),
        context_tokens=st.none() | st.integers(1, 100_000),
        max_running_requests=st.none() | st.integers(1, 2000),
        min_kv_tokens=st.none() | st.integers(1, 10**6),
        max_graph_bytes=st.none() | st.integers(0, 2**30),
        max_capture_s=st.none() | st.floats(0, 3),
        max_graphs=st.none() | st.integers(1, 60),
        engines=st.sampled_from([(), ("sglang",), ("vllm", "tensorrt_llm")]),
        eager_overhead_us=st.sampled_from([0.0, 8000.0]),
    )
)
@settings(max_examples=25, deadline=None)
def test_any_question_gets_a_valid_answer_inside_its_limits(question: Question) -> None:
    try:
        answer = recommend(SPARSE, question)
    except InputError as error:
        assert error.where == "--max-running"
        return
    checked(answer)
    for one in answer.engines:
        if one.decode is None or one.decode.is_eager:
            continue
        assert question.max_graph_bytes is None or (one.decode.graph_bytes or 0) <= question.max_graph_bytes
        assert question.max_capture_s is None or (one.decode.capture_s or 0) <= question.max_capture_s
        assert question.max_graphs is None or len(one.decode.capture_sizes) <= question.max_graphs
        assert question.min_kv_tokens is None or (one.decode.kv_tokens or 0) >= question.min_kv_tokens
        assert all(tie.chosen_over_this is not None for tie in one.ties)
        for tie in one.ties[:1]:  # the fastest
            assert tie.chosen_over_this is not None
            assert not inverse(tie.chosen_over_this).faster
        if one.eager is not None and one.eager.chosen_over_this is not None:
            assert one.eager.chosen_over_this.faster


def inverse(of: Ratio) -> Ratio:
    return Ratio(1 / of.combined, tuple(1 / ratio for ratio in of.by_process))


def test_expected_step_of_uniform_traffic_by_hand() -> None:
    """Sizes 1, 2, 4 at 1010, 1020, 1040 us; the step of 3 requests is padded to 4."""
    slower = [1010.0, 1100.0, 1540.0]
    of = small_sweep((1, 2, 4), graph_us=slower, eager_us=[us + 2000 for us in slower])
    answer = recommend(of, Question(engines=("sglang",))).engine("sglang")
    assert answer.decode is not None and answer.eager is not None
    assert answer.decode.capture_sizes == (1, 2, 4)
    assert answer.decode.expected_step_us == pytest.approx((1010 + 1100 + 1540 + 1540) / 4)
    assert answer.decode.coverage == 1.0
    assert answer.decode.padding_waste == pytest.approx(1 / 11)
    assert answer.decode.expected_step_from == "interpolated"
    assert answer.decode.graph_bytes == 92 * MIB and answer.decode.graph_bytes_from == "measured"
    assert answer.eager.expected_step_us == pytest.approx((3010 + 3100 + 3320 + 3540) / 4)


def test_a_shorter_list_takes_the_bytes_of_the_measured_one_as_a_bound() -> None:
    answer = recommend(small_sweep((1, 2, 4, 8)), Question(max_graphs=2, engines=("sglang",))).engine("sglang")
    assert answer.decode is not None
    assert answer.decode.capture_sizes == (4, 8)
    assert (answer.decode.graph_bytes, answer.decode.graph_bytes_from) == (93 * MIB, "bound")
    assert answer.decode.capture_s_from == "bound" and answer.decode.graph_bytes_interval is None


def test_a_size_that_failed_the_gate_is_never_recommended() -> None:
    of = small_sweep((1, 2, 4, 8), failing=(4,))
    answer = recommend(of)
    for one in answer.engines:
        assert one.decode is not None and set(one.decode.capture_sizes) <= {1, 2, 8}
    assert "gate_failed" in codes(checked(answer))


def test_a_list_whose_gate_never_ran_is_not_recommended() -> None:
    of = CaptureList("a", "decode", "full", (1, 2))
    points = [point(s, 1024, e, 1000.0) for s in (1, 2) for e in ("graph", "eager")]
    answer = recommend(sweep([cell_result([captured_list(of, gate=False)], points)]))
    assert answer.status == "nothing_fits"
    assert "checked" in answer.engine("vllm").message


def test_a_gain_within_noise_is_no_reason_to_serve_without_graphs() -> None:
    """Eager figures are a lower bound of a server's."""
    same = [1000.0, 1010.0, 1020.0]
    answer = recommend(small_sweep((1, 2, 4), graph_us=same, eager_us=[us * 1.005 for us in same]))
    for one in answer.engines:
        assert one.decode is not None and one.decode.coverage == 1.0
        assert "no list gains more than the noise" in one.message


def test_when_every_list_is_longer_than_eager_it_says_that_none_pays() -> None:
    same = [1000.0, 1010.0, 1020.0]
    answer = recommend(small_sweep((1, 2, 4), graph_us=same, eager_us=[us * 0.985 for us in same]))
    data = checked(answer)
    assert "no_list_pays" in codes(data)
    for one in answer.engines:
        assert one.decode is not None and one.decode.is_eager and one.decode.graph_bytes == 0
        assert "no list pays" in one.message
        assert one.runner_up is not None and one.runner_up.capture_sizes == (1, 2, 4)
    assert "disabled" in json.dumps(data["engines"]["sglang"]["flags"])


def test_a_loss_within_noise_is_no_reason_to_serve_without_graphs() -> None:
    """Eager is a lower bound of a server's."""
    same = [1000.0, 1010.0, 1020.0]
    answer = recommend(small_sweep((1, 2, 4), graph_us=same, eager_us=[us * 0.995 for us in same]))
    for one in answer.engines:
        assert one.decode is not None and one.decode.capture_sizes and one.decode.coverage == 1.0
        assert "no list gains more than the noise" in one.message
    assert "no_list_pays" not in codes(checked(answer))


def test_eager_overhead_makes_graphs_pay() -> None:
    same = [1000.0, 1010.0, 1020.0]
    of = small_sweep((1, 2, 4), graph_us=same, eager_us=same)
    answer = recommend(of, Question(eager_overhead_us=500.0)).engine("sglang")
    assert answer.decode is not None and answer.decode.coverage == 1.0
    assert answer.eager is not None
    assert answer.eager.expected_step_us == pytest.approx((1000 + 1010 + 1015 + 1020) / 4 + 500)


def test_more_than_noise_is_needed_to_pay_for_bytes() -> None:
    """A dense list that is faster by less than the noise loses to a sparse one with fewer bytes, and that to one with
    as many bytes and fewer graphs."""
    dense = captured_list(CaptureList("dense", "decode", "full", (1, 2, 3, 4)), first_bytes=900 * MIB)
    thin = captured_list(CaptureList("thin", "decode", "full", (2, 4)), first_bytes=90 * MIB)
    graph = {1: 1000.0, 2: 1001.0, 3: 1002.0, 4: 1003.0}
    points = [point(s, c, "graph", us) for s, us in graph.items() for c in (64, 1024)]
    points += [point(s, c, "eager", 3000.0) for s in graph for c in (64, 1024)]
    answer = recommend(sweep([cell_result([dense, thin], points)]), Question(engines=("vllm",))).engine("vllm")
    assert answer.decode is not None and answer.decode.capture_sizes == (4,)
    assert answer.decode.bytes_of_list == "thin"
    assert {(2, 4), (1, 2, 3, 4)} <= {tie.capture_sizes for tie in answer.ties}
    assert answer.runner_up is not None and answer.runner_up.capture_sizes == (1, 2, 3, 4)


def test_the_solver_finds_lists_that_no_sweep_captured() -> None:
    """Nobody captured 3 and 8 alone, and no prefix of what was captured is as good."""
    of = small_sweep(tuple(range(1, 9)), graph_us=[1000.0 * size for size in range(1, 9)], eager_us=[9000.0] * 8)
    shares = {3: 0.6, 8: 0.4}
    question = Question(workload="uniform", max_graphs=2, engines=("sglang",))
    traffic = Workload(tuple(DecodeShare(n, share) for n, share in shares.items()), (), 8, None, "two", "per_step")
    answer = recommend(of, replace(question, workload=traffic)).engine("sglang")
    assert answer.decode is not None and answer.decode.capture_sizes == (3, 8)
    assert answer.decode.expected_step_us == pytest.approx(0.6 * 3000 + 0.4 * 8000)
    assert answer.decode.expected_step_from == "measured" and answer.decode.graph_bytes_from == "bound"


def test_the_default_list_is_the_engines_own_on_the_same_traffic() -> None:
    answer = recommend(RICH, Question(gpu_mem="80", max_running_requests=256))
    sglang = answer.engine("sglang").default
    assert sglang is not None and sglang.capture_sizes == SGLANG_LIST
    assert sglang.graph_bytes_from == "measured" and sglang.coverage == 1.0
    tensorrt = answer.engine("tensorrt_llm").default
    assert tensorrt is not None
    exact = [n for n in range(1, 257) if bucket_for(n, tensorrt.capture_sizes, "exact")]
    assert tensorrt.coverage == pytest.approx(len(exact) / 256)
    assert tensorrt.graph_bytes is None and "no measured list" in tensorrt.absent["graph_bytes"]


def test_a_default_list_that_was_not_measured_at_every_size_is_interpolated_not_dropped() -> None:
    answer = recommend(small_sweep((1, 4, 16)), Question(engines=("sglang",), max_running_requests=16))
    default = answer.engine("sglang").default
    assert default is not None and default.capture_sizes == (1, 2, 4, 8, 12, 16)
    assert default.expected_step_us is not None and default.expected_step_from == "interpolated"


def test_steps_that_kv_cannot_hold_are_left_out_and_said() -> None:
    data = checked(recommend(RICH, Question(gpu_mem="24")))
    for name in ENGINES:
        one = data["engines"][name]
        assert one["largest_step"] * 1024 <= one["decode"]["kv_tokens"] + 1024
        assert one["status"] == "ok"
    assert "kv_limits_requests" in codes(data)


def test_a_list_that_would_pad_a_lone_request_far_is_said_to_be_for_this_traffic() -> None:
    sweep = small_sweep((1, 16, 64), graph_us=(1000.0, 1700.0, 4000.0), eager_us=(9000.0, 9000.0, 9000.0))
    for traffic, said in (("steady 64", True), ("steady 1", False)):
        data = checked(recommend(sweep, Question(engines=("sglang",), workload=traffic)))
        assert data["engines"]["sglang"]["decode"]["capture_sizes"] == [64 if said else 1]
        assert ("thin_traffic" in codes(data)) is said


def test_steps_beyond_the_measured_sizes_make_the_answer_partial() -> None:
    data = checked(recommend(small_sweep((1, 2, 4, 8)), Question(max_running_requests=16)))
    assert data["status"] == "partial"
    assert data["engines"]["sglang"]["steps_share"] == pytest.approx(0.5)
    assert data["engines"]["sglang"]["largest_step"] == 8
    assert "beyond_measured" in codes(data)


def test_large_steps_at_contexts_that_were_not_measured_count_at_the_longest_that_was() -> None:
    """300 requests were timed at 1,024 tokens alone: a list for such traffic must still reach them."""
    traffic = Workload(
        (DecodeShare(16, 0.8, 2000.0), DecodeShare(300, 0.2, 2000.0)), (), 300, None, "made up", "per_step"
    )
    data = checked(recommend(RICH, Question(gpu_mem="141", workload=traffic, engines=("vllm",), eager_overhead_us=9e3)))
    one = data["engines"]["vllm"]
    assert one["steps_share"] == 1.0 and one["status"] == "ok"
    assert one["decode"]["capture_sizes"][-1] >= 300 and one["decode"]["coverage"] == 1.0
    said = next(w["message"] for w in data["warnings"] if w["code"] == "shorter_context_stands_in")
    assert "20% in vllm" in said


def test_traffic_wholly_beyond_the_measured_sizes_has_no_answer() -> None:
    answer = recommend(small_sweep((1, 2, 4, 8)), Question(workload="steady 16"))
    assert answer.status == "partial" and answer.engine("sglang").decode is None
    assert "measured sizes, 1 to 8" in answer.engine("sglang").message


def test_a_card_of_a_gibibyte_has_a_valid_answer() -> None:
    assert checked(recommend(RICH, Question(gpu_mem="1")))["status"] == "nothing_fits"


def test_weights_that_do_not_fit_say_what_is_missing() -> None:
    answer = recommend(RICH, Question(gpu_mem="16"))
    assert answer.status == "nothing_fits"
    for one in answer.engines:
        assert one.memory is not None and one.memory.short_by_bytes > 0
        assert "short by" in one.message


def test_limits_that_no_list_meets_say_by_how_much() -> None:
    answer = recommend(RICH, Question(gpu_mem="80", max_graph_bytes=50 * MIB))
    assert answer.status == "nothing_fits"
    assert "50 MiB over the limit" in answer.engine("sglang").message
    assert "over the limit" in recommend(RICH, Question(max_capture_s=0.01)).engine("vllm").message


def test_a_request_limit_keeps_lists_that_the_engine_keeps_as_written() -> None:
    answer = recommend(RICH, Question(gpu_mem="80", max_running_requests=100))
    in_requests, in_tokens = answer.engine("sglang").decode, answer.engine("vllm").decode
    assert in_requests is not None and in_requests.capture_sizes[-1] == 96
    assert in_tokens is not None and in_tokens.capture_sizes[-1] == 104
    assert "steps_run_eager" in codes(checked(answer))


def test_contexts_outside_the_measured_ones_are_answered_by_the_nearest_and_said() -> None:
    near = recommend(RICH, Question(gpu_mem="141", context_tokens=100, workload="steady 4", engines=("vllm",)))
    edge = recommend(RICH, Question(gpu_mem="141", context_tokens=512, workload="steady 4", engines=("vllm",)))
    assert "context_outside_measured" in codes(checked(near))
    assert "context_outside_measured" not in codes(checked(edge))
    one, other = near.engine("vllm").decode, edge.engine("vllm").decode
    assert one is not None and other is not None and one.expected_step_us == other.expected_step_us


def test_on_a_cpu_eager_and_graphs_are_not_distinguished() -> None:
    answer = recommend(cpu_sweep())
    data = checked(answer)
    assert answer.status == "partial" and "cpu_not_distinguished" in codes(data)
    for one in answer.engines:
        assert one.decode is not None and one.decode.capture_sizes == (1, 2, 4, 8)
        assert "as fast as eager" not in one.message
        assert not one.decode.buckets and "on a CPU" in one.decode.absent["cliff"]
        assert one.memory is None


def test_another_card_lends_only_its_memory() -> None:
    assert {"other_card", "cuda_total_assumed"} <= codes(checked(recommend(RICH, Question(gpu_mem="80"))))
    assert not {"other_card", "cuda_total_assumed"} & codes(checked(recommend(RICH, Question(gpu_mem="141"))))


def test_noise_is_that_between_two_processes_or_said_to_be_assumed() -> None:
    assert recommend(RICH).noise.relative == pytest.approx(0.004, rel=0.05)
    assert "noise_assumed" in codes(checked(recommend(small_sweep((1, 2)))))
    assert "assumed" in checked(recommend(small_sweep((1, 2))))["noise"]["sentence"]
    assert "noise_assumed" not in codes(checked(recommend(small_sweep((1, 2), processes=2))))


def test_what_is_wrong_with_a_sweep_is_said() -> None:
    of = small_sweep((1, 2))
    cell = of.cells[0]
    assert cell.ledger is not None
    bad_ledger = replace(cell.ledger, unexplained_bytes=40 * MIB)
    throttled = replace(environment(), throttle_reasons=("sw_power_cap",), other_processes=2)
    facts = replace(model_facts(), shard_of=4)
    cell = replace(cell, ledger=bad_ledger, environment=throttled, model=facts)
    of = replace(of, cells=(cell, failed_cell()), finished_at=None)
    found = codes(checked(recommend(of)))
    wanted = {"bytes_unexplained", "throttled", "other_processes", "shard", "failed_cells", "unfinished"}
    assert wanted <= found


def test_padding_that_was_timed_in_part_is_said_of_the_rest() -> None:
    of = small_sweep((1, 2, 4, 8))
    (cell,) = of.cells
    timed = padded_points([PaddedTo(1, (2, 4)), PaddedTo(2, (4,))], 1024, lambda raw, bucket: 900.0 + bucket)
    partly = replace(of, cells=(replace(cell, points=(*cell.points, *timed)),))
    within = Question(workload="steady 3", engines=("sglang",), max_graphs=1)
    assert "padding_not_timed" not in codes(checked(recommend(partly, within)))
    above = recommend(partly, Question(workload="steady 6", engines=("sglang",)))
    (said,) = [one for one in above.warnings if one.code == "padding_not_timed"]
    assert "100% in sglang" in said.message


@pytest.mark.parametrize("tokens", [131073, 200000])
def test_a_context_beyond_the_models_positions_is_refused(tokens: int) -> None:
    with pytest.raises(InputError, match="131,072 positions"):
        recommend(RICH, Question(gpu_mem="141", context_tokens=tokens))


def test_padding_that_was_not_timed_is_said_where_a_list_pads() -> None:
    pads = Question(workload="steady 3", engines=("sglang",))
    assert "padding_not_timed" in codes(checked(recommend(small_sweep((1, 2, 4)), pads)))
    exact = Question(workload="steady 4", engines=("sglang",))
    assert "padding_not_timed" not in codes(checked(recommend(small_sweep((1, 2, 4)), exact)))
    assert "padding_not_timed" not in codes(checked(recommend(RICH, Question(gpu_mem="141", workload="uniform 100"))))


def test_a_sweep_without_steps_is_a_finding() -> None:
    with pytest.raises(Finding):
        recommend(sweep([failed_cell()]))


@pytest.mark.parametrize(
    ("question", "where"),
    [
        (Question(gpu_mem="lots"), "--gpu-mem"),
        (Question(engines=("tgi",)), "--engine"),
        (Question(context_tokens=0), "--context-len"),
        (Question(max_running_requests=0), "--max-running"),
        (Question(min_kv_tokens=-1), "--min-kv-tokens"),
        (Question(max_graphs=0), "--max-graphs"),
        (Question(eager_overhead_us=-1.0), "--eager-overhead-ms"),
        (Question(workload="no/such.json"), "--workload"),
        (Question(workload="steady 32", max_running_requests=16), "--max-running"),
    ],
    ids=str,
)
def test_questions_that_make_no_sense_are_refused(question: Question, where: str) -> None:
    with pytest.raises(InputError) as caught:
        recommend(RICH, question)
    assert caught.value.where == where


def test_an_empty_sweep_says_that_it_is_empty() -> None:
    with pytest.raises(Finding, match="holds no results") as caught:
        recommend(sweep([]))
    assert "--retry-failed" not in (caught.value.action or "")


def test_running_requests_beyond_kv_are_not_asked_of_the_engine() -> None:
    answer = recommend(RICH, Question(gpu_mem="24", max_running_requests=100, workload="steady 2"))
    data = checked(answer)
    warning = next(one for one in data["warnings"] if one["code"] == "max_running_capped")
    for one in answer.engines:
        assert one.memory is not None and one.memory.max_running_requests < 100
        assert f"{one.memory.max_running_requests} in {one.engine}" in warning["message"]
    (sglang,) = (one for one in answer.engines if one.engine == "sglang")
    assert sglang.flags is not None and sglang.memory is not None
    at = sglang.flags.args.index("--max-running-requests")
    assert sglang.flags.args[at + 1] == str(sglang.memory.max_running_requests)
    fits = recommend(RICH, Question(gpu_mem="141", max_running_requests=100))
    assert "max_running_capped" not in codes(checked(fits))


def test_a_torn_line_is_told_with_the_answer(tmp_path: Path) -> None:
    path = write_sweep(small_sweep((1, 2)), tmp_path / "sweep")
    whole = recommend(read_sweep(path))
    with (path / "cells.jsonl").open("a") as file:
        file.write('{"schema": 1, "cell_id"')
    assert "torn_line" in codes(checked(recommend(read_sweep(path))))
    assert "torn_line" not in codes(checked(whole))


def test_a_workload_file_weighs_steps_and_contexts(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    rows = [{"requests": 1, "weight": 3, "mean_kv_tokens": 512}, {"requests": 4, "weight": 1}]
    path.write_text(json.dumps({"kind": "histogram", "decode": rows}))
    answer = recommend(RICH, Question(gpu_mem="141", workload=str(path), engines=("sglang",))).engine("sglang")
    assert answer.decode is not None
    model, sizes = latency_model(RICH.cells), answer.decode.capture_sizes
    one, four = (model.step(n, bucket_for(n, sizes, "always"), context) for n, context in ((1, 512), (4, 1024)))
    assert one is not None and four is not None
    assert answer.decode.expected_step_us == pytest.approx((3 * one.us + four.us) / 4)


def test_presets_are_stored_with_the_answer() -> None:
    answer = recommend(RICH, Question(workload="steady 8"))
    assert answer.workload == steady(8)
    assert recommend(small_sweep((1, 2, 4))).workload == uniform(4)
    assert asdict(answer.limits)["context_tokens"] == 1024


def test_damaged_lines_are_named_beside_the_answer() -> None:
    damaged = recommend(replace(RICH, damaged_lines=(2, 5)), Question(gpu_mem="80"))
    (caution,) = [one for one in checked(damaged)["warnings"] if one["code"] == "damaged_lines"]
    assert "line 2, 5" in caution["message"]
    assert "damaged_lines" not in codes(checked(recommend(RICH, Question(gpu_mem="80"))))


@pytest.mark.parametrize("requests", [1, 100, 184, 256, 448, 512])
def test_no_list_that_serves_no_step_is_named(requests: int) -> None:
    for one in recommend(RICH, Question(gpu_mem="80", workload=f"steady {requests}")).engines:
        for of in (one.decode, one.runner_up, *one.ties):
            assert of is None or of.is_eager or of.coverage > 0


def test_short_gaps_are_not_bought_with_longer_steps() -> None:
    for one in recommend(RICH, Question(gpu_mem="141", objective="p99-itl")).engines:
        assert one.decode is not None and one.decode.expected_step_us is not None
        for tie in one.ties:
            assert tie.expected_step_us is not None and one.decode.expected_step_us <= tie.expected_step_us * 1.02
        assert "without the limits" not in (one.message or "")
