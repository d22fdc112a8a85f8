"""Servers of one phase, and ranks that pad to the largest of their batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation_text import as_text
from graphtune.tune.workload import uniform
from graphtune.tune.workloads.deployment import over_ranks
from tests.synthetic import both_phases_sweep, small_sweep, write_sweep
from tests.tune.answers import checked
from tests.tune.test_prefill_choice import shares
from tests.tune.test_trace_traffic import ASKED, trace

BOTH = both_phases_sweep()


def test_ranks_that_gather_are_answered_for_the_largest_of_them() -> None:
    answer = recommend(small_sweep((1, 2, 4, 8)), Question(workload=uniform(8), dp=4, engines=("sglang",)))
    assert answer.workload == over_ranks(uniform(8), 4)
    one = recommend(small_sweep((1, 2, 4, 8)), Question(workload=uniform(8), engines=("sglang",)))
    assert answer.engine("sglang").decode and one.engine("sglang").decode
    assert answer.engine("sglang").decode.expected_step_us > one.engine("sglang").decode.expected_step_us  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("engine", ["sglang", "vllm", "tensorrt_llm"])
def test_a_prefill_server_gets_a_prefill_list_and_no_decode_graphs(engine: str) -> None:
    question = Question(gpu_mem="80", workload=shares((8, 20, 60, 100)), role="prefill", engines=(engine,))
    answer = recommend(BOTH, question)
    data = checked(answer)
    found = answer.engine(engine)
    assert found.status == "ok" and found.decode is None and found.prefill is not None
    assert found.prefill.capture_sizes and found.prefill.expected_step_us is not None
    assert found.prefill_eager is not None
    assert found.prefill.expected_step_us < (found.prefill_eager.expected_step_us or 0)
    assert found.memory is not None and found.memory.graph_bytes == found.prefill.graph_bytes
    assert data["workload"]["decode"] == [] and found.flags is not None
    sizes = ",".join(map(str, found.prefill.capture_sizes))
    assert sizes in (found.flags.yaml or " ".join(found.flags.args)).replace(" ", "")
    assert "a prefill step" in as_text(answer)


def test_a_decode_server_is_told_nothing_of_prefill() -> None:
    answer = recommend(BOTH, Question(gpu_mem="80", workload=shares((8,)), role="decode", engines=("sglang",)))
    checked(answer)
    found = answer.engine("sglang")
    assert found.decode is not None and found.prefill is None and "no prefill steps" in found.absent["prefill"]


def test_limits_hold_for_a_prefill_server() -> None:
    question = Question(gpu_mem="80", workload=shares((8, 20, 60, 100)), role="prefill", engines=("sglang",))
    few = recommend(BOTH, replace(question, max_graphs=1)).engine("sglang")
    assert few.prefill is not None and len(few.prefill.capture_sizes) <= 1
    small = recommend(BOTH, replace(question, gpu_mem="16")).engine("sglang")
    assert small.status == "nothing_fits" and "short by" in small.message
    no_times = recommend(small_sweep((1, 2)), replace(question, gpu_mem=None))
    checked(no_times)
    assert "no prefill times" in no_times.engine("sglang").message


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_trace_keeps_the_steps_of_one_phase(role: str) -> None:
    question = replace(ASKED, workload=trace(120), prefill_tokens_per_s=None, engines=("sglang",), dp=2)
    answer = recommend(BOTH, replace(question, role=role))  # type: ignore[arg-type]
    checked(answer)
    assert bool(answer.workload.decode) is (role == "decode") and bool(answer.workload.prefill) is (role == "prefill")
    assert "largest of 2 ranks" in answer.workload.source


def test_the_command_takes_what_workload_writes(tmp_path: Path) -> None:
    folder = write_sweep(BOTH, tmp_path / "sweep")
    (tmp_path / "prefill.csv").write_text("tokens,steps\n20,3\n100,1\n")
    written = str(tmp_path / "w.json")
    made = ["workload", "from-histogram", str(tmp_path / "prefill.csv"), "--role", "prefill", "-o", written]
    assert CliRunner().invoke(app, made).exit_code == 0
    asked = ["recommend", str(folder), "--gpu-mem", "80", "--workload", written, "--engine", "sglang", "--json"]
    for more in ([], ["--role", "prefill", "--dp", "2"]):
        done = CliRunner().invoke(app, [*asked, *more])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["engines"]["sglang"]["prefill"]["capture_sizes"]
    refused = CliRunner().invoke(app, [*asked, "--role", "decode"])
    assert refused.exit_code == 2 and "has no decode steps" in refused.stderr
