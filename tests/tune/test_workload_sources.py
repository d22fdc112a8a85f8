"""Workloads from traces, tables and logs, and what a deployment makes of them."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.errors import InputError
from graphtune.tune.latency_model import latency_model
from graphtune.tune.workload import DecodeShare, PrefillShare, Workload, parse_workload
from graphtune.tune.workloads.deployment import in_steps, of_role, over_ranks
from graphtune.tune.workloads.histogram_table import read_histograms
from graphtune.tune.workloads.presets import PRESETS, preset
from graphtune.tune.workloads.server_log import LoggedWorkload, from_logs
from graphtune.tune.workloads.trace import read_trace
from tests.synthetic import cell_result, latency_points

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def file(folder: Path, text: str, name: str = "given.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# Traces


@pytest.mark.parametrize(
    "text",
    [
        AZURE + "2023-11-16 18:59:59.5000000,7,3\n2023-11-16 19:00:01.2500001,8,4\n",
        "arrival_time;prompt_tokens;output_tokens\n100.5;7;3\n# a remark\n102.2500001;8;4\n",
        "timestamp_ms\tinput_length\toutput_length\n0\t7\t3\n\n1750.0001\t8\t4\n",
        "Timestamp,Model,Request tokens,Response tokens\n5.5s,x,7,3\n7.2500001s,y,8,4\n",
    ],
)
def test_common_traces_are_read(tmp_path: Path, text: str) -> None:
    trace = read_trace(file(tmp_path, text))
    assert trace.arrivals_s.tolist() == pytest.approx([0.0, 1.7500001], abs=1e-9)
    assert (trace.prompt_tokens.tolist(), trace.generated_tokens.tolist()) == ([7, 8], [3, 4])
    assert trace.lines_skipped == text.count("#") + text.count("\n\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        (AZURE, "has no requests"),
        (AZURE + "5,1,1\n4,1,1\n", ":3: arrives before"),
        (AZURE + "-5,1,1\n", ":2: a time of -5 is negative"),
        (AZURE + "5,0,1\n", ":2: '0' is no number of prompt tokens of at least 1"),
        (AZURE + "5,1,0\n", ":2: '0' is no number of generated tokens of at least 1"),
        (AZURE + "5,1,1\n2023-11-16 18:59:59,1,1\n", ":3: mixed units: '2023-11-16 18:59:59' stands among plain"),
        (AZURE + "5ms,1,1\n6s,1,1\n", ":3: mixed units: '6s' stands among numbers in ms"),
        ("time_ms,ContextTokens,GeneratedTokens\n5s,1,1\n", "another unit than its column"),
        (AZURE + "soon,1,1\n", ":2: 'soon' is no time"),
        (AZURE + "2023-13-16 18:59:59,1,1\n", "is no date"),
        (AZURE + "5,1\n", ":2: has 2 cells, the header 3"),
        ("a,b,c\n1,1,1\n", "no column holds the time of arrival"),
        ("time,prompt_tokens\n1,1\n", "no column holds generated tokens"),
        ("time,prompt_tokens,input_tokens,output_tokens\n1,1,1,1\n", "say the same"),
    ],
)
def test_bad_traces_get_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    name = file(tmp_path, text)
    with pytest.raises(InputError) as error:
        read_trace(name)
    assert says in str(error.value) and name in str(error.value)


def test_a_trace_survives_its_json(tmp_path: Path) -> None:
    name = file(tmp_path, AZURE + "# odd\n7.25,7,3\n8.5,8,4\n")
    written = tmp_path / "trace.json"
    assert CliRunner().invoke(app, ["workload", "from-trace", name, "-o", str(written)]).exit_code == 0
    trace, again = read_trace(name), read_trace(str(written))
    assert again.arrivals_s.tolist() == trace.arrivals_s.tolist() == [0.0, 1.25]
    assert again.as_dict() == trace.as_dict()
    changes: tuple[dict[str, object], ...] = (
        {"arrivals_s": []},
        {"prompt_tokens": [0, 1]},
        {"arrivals_s": [2.0, 1.0]},
        {"kind": "histogram"},
    )
    for change in changes:
        #: []}, {"prompt_tokens": [0, 1]}, {"arrivals_s": [2.0, 1.0]}, {"kind": "histogram"}):
        written.write_text(json.dumps({**trace.as_dict(), **change}))
        with pytest.raises(InputError):
            read_trace(str(written))


@pytest.mark.field_data
@pytest.mark.parametrize(("name", "requests", "generated"), [("code", 8819, 245896), ("conv", 19366, 4088665)])
def test_public_traces_load(field_data: Path, name: str, requests: int, generated: int) -> None:
    trace = read_trace(str(field_data / "traces" / f"azure-llm-2023-{name}.csv"))
    assert (len(trace), int(trace.generated_tokens.sum())) == (requests, generated)
    assert 3400 < trace.seconds < 3600 and np.all(np.diff(trace.arrivals_s) >= 0)


# Tables


def test_tables_of_both_phases(tmp_path: Path) -> None:
    decode = file(tmp_path, "batch size,steps,mean_kv_tokens\n8,3,900\n2,1,\n", "decode.csv")
    prefill = file(tmp_path, "tokens,count\n512,5\n", "prefill.csv")
    found = read_histograms([decode, prefill])
    assert found.decode == (DecodeShare(2, 1.0, None), DecodeShare(8, 3.0, 900.0))
    assert found.prefill == (PrefillShare(512, 5.0),)
    assert (found.weighting, found.max_running_requests, found.source) == ("per_step", 8, "decode.csv, prefill.csv")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("requests,steps\n", "has no rows"),
        ("requests,steps\n0,1\n", "no number of requests"),
        ("requests,steps\n1,-1\n", "no weight of at least 0"),
        ("requests,steps\n1,0\n", "all weights are zero"),
        ("requests,steps,seconds\n1,1,1\n", "mixed units: one table holds steps and seconds"),
        ("requests,tokens,steps\n1,1,1\n", "mixed units: one table holds requests and tokens"),
        ("tokens,seconds\n1,1\n", "seconds of prefill"),
        ("requests,speed\n1,1\n", "no column holds weights"),
        ("speed,steps\n1,1\n", "no column holds batch sizes or tokens"),
    ],
)
def test_bad_tables_get_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_histograms([file(tmp_path, text)])


# Logs


def sglang(requests: int, graph: bool, second: int, tokens: int, rank: str = "TP0") -> str:
    return (
        f"[2026-03-04 05:06:{second:02d} {rank}] Decode batch, #running-req: {requests}, #token: {tokens}, token usage: 0.10,"
        f" cuda graph: {graph}, gen throughput (token/s): 1.0, #queue-req: 0"
    )


CAPTURE = "[2026-03-04 05:00:05 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4, 8, 32], avail mem=9.50 GB"
PREFILL = "[2026-03-04 05:06:07 TP0] Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, token usage: 0.08, #running-req: 31, #queue-req: 0, cuda graph: True, input throughput (token/s): 559.53"
VLLM = "(EngineCore_DP0 pid=441) INFO 11-24 11:44:{:02d} [loggers.py:257] Engine 000: Avg prompt throughput: 2.8 tokens/s, Avg generation throughput: 7.5 tokens/s, Running: {} reqs, Waiting: 3 reqs, GPU KV cache usage: 13.3%, Prefix cache hit rate: 0.0%"
TABLE = "(EngineCore_DP0 pid=441) INFO 11-24 11:44:17 [loggers.py:257] | {:<15} | {:<13} | {:<12} | {:<12} | {:<5} |"


def logged(folder: Path, *lines: str) -> LoggedWorkload:
    return from_logs([file(folder, "\n".join(lines) + "\n", "server.log")])


def test_decode_lines_count_every_fortieth_iteration(tmp_path: Path) -> None:
    found = logged(
        tmp_path,
        CAPTURE,
        PREFILL,
        "something else",
        sglang(8, True, 1, 800),
        sglang(8, True, 2, 1600),
        sglang(2, True, 3, 90),
    )
    work = found.workload
    assert work.decode == (DecodeShare(2, 40.0, 45.0), DecodeShare(8, 80.0, 150.0))
    assert work.prefill == (PrefillShare(512, 1.0),)
    assert (work.weighting, work.lines_skipped, found.captured) == ("every_40th_step", 1, (1, 2, 4, 8, 32))
    assert "every 40th iteration" in work.source and "inflated" not in work.source and not found.notes
    assert parse_workload(json.dumps(work.as_dict()), "x").decode == work.decode


def test_a_server_off_its_graphs_is_said_to_inflate_the_histogram(tmp_path: Path) -> None:
    lines = [sglang(67, False, s, 6700) for s in (1, 2, 3)] + [sglang(30, True, s, 3000) for s in (4, 5)]
    found = logged(tmp_path, CAPTURE, *lines)
    assert "inflated: 60% of what it counts ran without a graph (its largest graph is 32)" in found.notes[0]
    assert "inflated: 60%" in found.workload.source


def test_readings_by_time_become_steps_with_a_sweep_only(tmp_path: Path) -> None:
    found = logged(tmp_path, *[VLLM.format(s, n) for s, n in ((0, 4), (10, 4), (20, 64), (30, 0))])
    assert found.workload.weighting == "per_second"
    assert [share.weight for share in found.workload.decode] == [20.0, 10.0]
    assert "idle" in found.notes[0]
    with pytest.raises(InputError, match="--sweep DIR"):
        in_steps(found.workload, None, None)
    model = latency_model([cell_result([], latency_points((1, 4, 8, 64), 1024))])
    steps = in_steps(found.workload, model, (8, 32))
    served = model.replay(4, 8, 1024)
    eager = model.eager(64, 1024)
    assert served is not None and eager is not None
    assert steps.weighting == "per_step"
    assert [share.weight for share in steps.decode] == pytest.approx([20e6 / served.us, 10e6 / eager.us])
    with pytest.raises(InputError, match="no step time for 64 requests"):
        in_steps(found.workload, latency_model([cell_result([], latency_points((1, 4, 8), 1024))]), (8, 32))


def test_step_tables_count_every_step_and_stand_alone(tmp_path: Path) -> None:
    rows = [
        TABLE.format(*row) for row in ((3, 4, 1, "FULL", 50), (600, 600, 0, "NONE", 7), (200, 200, 0, "PIECEWISE", 9))
    ]
    found = logged(tmp_path, VLLM.format(0, 4), *rows)
    assert found.workload.weighting == "per_step"
    assert found.workload.decode == (DecodeShare(3, 50.0),)
    assert found.workload.prefill == (PrefillShare(200, 9.0), PrefillShare(600, 7.0))
    assert any("left out" in note for note in found.notes)


def test_logs_that_count_differently_are_not_added_up(tmp_path: Path) -> None:
    one = file(tmp_path, sglang(8, True, 1, 800) + "\n", "one.log")
    two = file(tmp_path, VLLM.format(0, 4) + "\n", "two.log")
    with pytest.raises(InputError, match="count different things"):
        from_logs([one, two])
    both = from_logs([one, one]).workload
    assert both.decode == (DecodeShare(8, 80.0, 100.0),)


@pytest.mark.parametrize("lines", [[CAPTURE], ["nothing"], [VLLM.format(0, 0)]])
def test_a_log_without_batches_is_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(InputError, match=r"no batch lines|idle server"):
        logged(tmp_path, *lines)


# Presets


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("most", [1, 2, 256])
def test_presets_stay_within_their_requests(name: str, most: int) -> None:
    found = preset(name, most)
    sizes = [share.requests for share in found.decode]
    assert sizes == sorted(set(sizes)) and sizes[0] >= 1 and sizes[-1] == most == found.max_running_requests
    assert all(share.weight > 0 for share in found.decode)


def test_presets_are_what_they_say() -> None:
    assert preset("ramp", 4).weighting == preset("interactive", 4).weighting == "per_second"
    shares = {share.requests: share.weight for share in preset("interactive", 20).decode}
    assert shares[10] / shares[9] == pytest.approx(1.0) and shares[20] / shares[10] == pytest.approx(
        10**10 * math.factorial(10) / math.factorial(20)
    )
    queue = {share.requests: share.weight for share in preset("batch", 11).decode}
    assert queue[11] == 0.9 and queue[1] == queue[10] == pytest.approx(0.01)
    for name, requests in (("storm", 4), ("ramp", 0)):
        with pytest.raises(InputError):
            preset(name, requests)


# Deployments


histograms = st.dictionaries(st.integers(1, 60), st.floats(0.01, 10), min_size=1, max_size=8)


@given(histograms, st.integers(1, 9))
def test_the_largest_of_some_ranks(weights: dict[int, float], ranks: int) -> None:
    shares = tuple(DecodeShare(size, weight) for size, weight in sorted(weights.items()))
    found = over_ranks(Workload(shares, (), 60, None, "x", "per_step"), ranks)
    total = sum(weights.values())
    assert sum(share.weight for share in found.decode) == pytest.approx(total)
    for limit in weights:
        one = sum(weight for size, weight in weights.items() if size <= limit) / total
        largest = sum(share.weight for share in found.decode if share.requests <= limit) / total
        assert largest == pytest.approx(one**ranks, abs=1e-9)


def test_the_largest_of_two_ranks_by_hand() -> None:
    shares = (DecodeShare(1, 3.0, 10.0), DecodeShare(4, 1.0, 30.0), DecodeShare(4, 1.0, 50.0))
    found = over_ranks(Workload(shares, (), 4, None, "x", "per_step"), 2)
    assert [share.requests for share in found.decode] == [1, 4]
    assert [share.weight for share in found.decode] == pytest.approx([5 * 0.36, 5 * 0.64])
    assert [share.mean_kv_tokens for share in found.decode] == [10.0, 40.0]


def test_roles_leave_out_the_other_phase() -> None:
    work = Workload((DecodeShare(1, 1.0),), (PrefillShare(9, 1.0),), 1, None, "x", "per_step")
    assert of_role(work, "decode").prefill == () and of_role(work, "prefill").decode == ()
    with pytest.raises(InputError, match="no decode steps"):
        of_role(of_role(work, "prefill"), "decode")


def test_commands_write_workloads(tmp_path: Path) -> None:
    log = file(tmp_path, "\n".join([CAPTURE, sglang(64, False, 1, 6400), PREFILL]) + "\n", "server.log")
    run = CliRunner().invoke(app, ["workload", "from-log", log, "--dp", "2", "--role", "decode"])
    assert run.exit_code == 0
    values = json.loads(run.stdout)
    assert values["decode"] == [{"requests": 64, "weight": 40.0, "mean_kv_tokens": 100.0}] and values["prefill"] == []
    assert "note: server.log: inflated: 100%" in run.stderr
    table = file(tmp_path, "requests,seconds\n4,10\n")
    refused = CliRunner().invoke(app, ["workload", "from-histogram", table])
    assert refused.exit_code == 2 and "--sweep DIR" in refused.stderr and not refused.stdout
