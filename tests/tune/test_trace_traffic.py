"""Recommendations for a request trace: the batches are those that the recommended list makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.errors import InputError
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.simulated_server import ServerQuestion, simulated_server
from graphtune.tune.workload import uniform
from graphtune.tune.workloads.trace import Trace
from tests.synthetic import cpu_sweep, h200_sweep, small_sweep, write_sweep
from tests.tune.answers import checked, codes

RICH = h200_sweep()


def trace(requests: int = 300, every_s: float = 0.05, generated: int = 60) -> Trace:
    at = np.arange(requests) * every_s
    return Trace(at, np.full(requests, 400), generated + np.arange(requests) % 9, "made up")


ASKED = Question(gpu_mem="80", workload=trace(), prefill_tokens_per_s=30_000.0)


def test_the_batches_are_those_under_the_recommended_list() -> None:
    answer = recommend(RICH, replace(ASKED, engines=("sglang",)))
    one = answer.engine("sglang")
    assert one.settled and one.load == 1.0 and one.decode is not None and one.memory is not None
    sizes = ",".join(map(str, one.decode.capture_sizes))
    server = simulated_server(
        RICH, ServerQuestion("sglang", sizes, kv_tokens=one.memory.kv_tokens, prefill_tokens_per_s=30_000.0)
    )
    found = server.run(trace(), 1.0)
    assert found.workload().decode == answer.workload.decode
    assert one.decode.expected_step_us == pytest.approx(found.expected_step_us, rel=0.01)
    assert one.decode.simulated is not None
    assert one.decode.simulated.tokens_per_s == pytest.approx(found.tokens_per_s)


def test_every_list_is_simulated_with_its_own_kv() -> None:
    data = checked(recommend(RICH, ASKED))
    for one in data["engines"].values():
        for name in ("decode", "eager"):
            assert one[name]["simulated"]["tokens_per_s"] > 0
        assert one["eager"]["simulated"]["inter_token_p99_s"] > one["decode"]["simulated"]["inter_token_p99_s"]
    exact = data["engines"]["tensorrt_llm"]["default"]
    assert exact["simulated"] is None  # no measured list holds its bytes, so its KV is not known


def test_a_share_of_the_capacity_is_a_load_below_overload() -> None:
    for load, overloaded in (("60%", False), ("300%", True)):
        answer = recommend(RICH, replace(ASKED, load=load, workload=trace(3000, 0.5), engines=("vllm",)))
        one = answer.engine("vllm")
        assert one.load is not None and one.load > 1
        assert (one.overload is not None) is overloaded
        data = checked(answer)
        assert ("overloaded" in codes(data)) is overloaded
        if overloaded:
            assert data["engines"]["vllm"]["decode"]["simulated"]["ttft_p99_s"] is None


def test_a_request_limit_holds_in_the_simulation() -> None:
    answer = recommend(RICH, replace(ASKED, load="50", max_running_requests=12, engines=("sglang",)))
    assert max(share.requests for share in answer.workload.decode) == 12


@pytest.mark.parametrize(
    ("question", "where"),
    [
        (replace(ASKED, prefill_tokens_per_s=None), "--prefill-tokens-per-s"),
        (replace(ASKED, prefill_tokens_per_s=0.0), "--prefill-tokens-per-s"),
        (replace(ASKED, load="fast"), "--load"),
        (replace(ASKED, load="0"), "--load"),
        (replace(ASKED, workload=trace(generated=1, requests=1)), "--workload"),
        (replace(ASKED, workload=uniform(8), load="4"), "--load"),
    ],
)
def test_what_cannot_be_simulated_is_refused(question: Question, where: str) -> None:
    with pytest.raises(InputError) as caught:
        recommend(RICH, question)
    assert caught.value.where == where


def test_without_kv_budget_there_is_no_simulation() -> None:
    with pytest.raises(InputError, match="how many tokens the KV cache holds"):
        recommend(cpu_sweep(), replace(ASKED, gpu_mem=None))


def test_a_card_too_small_is_an_answer() -> None:
    data = checked(recommend(RICH, replace(ASKED, gpu_mem="16")))
    assert data["status"] == "nothing_fits" and data["workload"]["decode"] == []
    assert data["workload"]["source"] == "made up, not simulated"


def test_shares_of_time_become_steps() -> None:
    """Batches that each take a tenth of the time: the one with steps twice as long runs half as many of them."""
    of = small_sweep((1, 2), graph_us=[1000.0, 2000.0], eager_us=[4000.0, 4000.0])
    one, two = recommend(of, Question(workload="ramp 2", engines=("vllm",))).workload.decode
    assert one.weight == pytest.approx(2 * two.weight)


def test_the_command_takes_a_trace(tmp_path: Path) -> None:
    folder = write_sweep(RICH, tmp_path / "sweep")
    rows = "".join(f"{at * 0.05:.2f},400,{60 + at % 9}\n" for at in range(200))
    (tmp_path / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    asked = ["recommend", str(folder), "--workload", str(tmp_path / "trace.csv"), "--load", "2", "--engine", "sglang"]
    missing = CliRunner().invoke(app, asked)
    assert missing.exit_code == 2 and "--prefill-tokens-per-s" in missing.stderr
    done = CliRunner().invoke(app, [*asked, "--prefill-tokens-per-s", "30000"])
    assert done.exit_code == 0, done.output
    assert "trace.csv simulated at load 2" in done.stdout and "token gap p99" in done.stdout
    data = json.loads(CliRunner().invoke(app, [*asked, "--prefill-tokens-per-s", "30000", "--json"]).stdout)
    assert data["engines"]["sglang"]["load"] == 2.0
