"""What is verified of a recommendation, what counts as not as stated, and what is refused before anything runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphtune.cli import verify as command
from graphtune.cli.app import app
from graphtune.device import cpu_device
from graphtune.errors import Finding, InputError
from graphtune.plan import CaptureLimit
from graphtune.results import CellResult, Mark
from graphtune.store import decode_cell
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation_json import as_json
from graphtune.tune.verify import TIMED_SIZES, Verification, spread, verification_cell, verify
from graphtune.tune.verify_joint import joint_cell, joint_checks
from graphtune.tune.verify_target import Target, read_recommendation, refuse_too_small, target_of
from graphtune.tune.verify_text import as_text
from graphtune.units import MIB, parse_gpu_memory
from graphtune.worker.memory import refusal
from tests.synthetic import captured_list, cell_result, point, write_sweep
from tests.tune.answers import SPARSE

GPU = parse_gpu_memory("141")


def recommendation(gpu_mem: str = "141") -> dict[str, Any]:
    answer = recommend(SPARSE, Question(gpu_mem=gpu_mem, engines=("vllm",)))
    return json.loads(json.dumps(as_json(answer)))  # type: ignore[no-any-return]


DATA = recommendation()


def target(data: dict[str, Any] = DATA) -> Target:
    return target_of(data, None, "rec.json")


def measured(of: Target, **changes: Any) -> CellResult:
    """The result of a process in which everything was as stated."""
    made = captured_list(of.list)
    captured = replace(
        made, graph_bytes=of.graph_bytes, peak_bytes=of.peak_bytes, capture_s=of.capture_s, outside_source="measured"
    )
    captured = replace(captured, **changes)
    cell = verification_cell(of, SPARSE, GPU)
    (at,) = cell.latency
    points = [
        point(size, at.context_tokens, "graph", 4000.0 + 40 * size + 0.03 * size * at.context_tokens)
        for size in at.sizes
    ]
    result = cell_result([captured], points, purpose="verify")
    return replace(result, cell=decode_cell(result.cell).__dict__ | {"capture_limit": cell.capture_limit})


def outside(found: Verification) -> set[str]:
    return {check.name for check in found.checks if check.verdict == "outside"}


def test_a_process_that_does_as_stated_passes() -> None:
    found = verify(target(), SPARSE, measured(target()))
    assert found.passed and outside(found) == set()
    judged = {check.name for check in found.checks if check.verdict == "ok"}
    assert {"graph memory", "peak while capturing", "outputs equal to eager's", "seconds of capture"} <= judged
    assert {f"replay of {size}" for size in spread(target().list.sizes)} <= judged
    assert "Everything is as stated." in as_text(found)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda of: {"graph_bytes": of.interval[1] + 1}, "graph memory"),
        (lambda of: {"graph_bytes": of.interval[0] - 1}, "graph memory"),
        (lambda of: {"peak_bytes": of.peak_bytes * 2}, "peak while capturing"),
        (lambda of: {"capture_s": of.capture_s * 2 + 1.1}, "seconds of capture"),
        (lambda of: {"gate": captured_list(of.list, failing=(8,)).gate}, "outputs equal to eager's"),
    ],
)
def test_what_is_not_as_stated_is_named(change: Callable[[Target], dict[str, Any]], name: str) -> None:
    found = verify(target(), SPARSE, measured(target(), **change(target())))
    assert not found.passed and outside(found) == {name}
    assert f"Not as stated: {name}." in as_text(found)


def test_a_replay_that_takes_longer_than_in_the_sweep_is_named_unless_the_host_disturbed_it() -> None:
    of = measured(target())
    slow = replace(of.points[0].gpu_us, us=tuple(us * 1.2 for us in of.points[0].gpu_us.us))  # type: ignore[union-attr, type-var]
    late = replace(of, points=(replace(of.points[0], gpu_us=slow), *of.points[1:]))
    assert outside(verify(target(), SPARSE, late)) == {f"replay of {of.points[0].raw_size}"}
    excused = replace(slow, flags=("host slowed down",))
    late = replace(of, points=(replace(of.points[0], gpu_us=excused), *of.points[1:]))
    assert outside(verify(target(), SPARSE, late)) == set()


def test_nothing_captured_is_a_finding_with_the_reason() -> None:
    result = replace(measured(target()), captured_lists=(), status="oom", reason="nothing was captured: 64 MiB short")
    with pytest.raises(Finding, match="64 MiB short"):
        verify(target(), SPARSE, result)


def test_a_card_that_is_64_mib_too_small_is_refused_saying_what_is_short_by_how_much() -> None:
    of = target()
    assert of.needed_bytes is not None
    enough = replace(GPU, cuda_total_bytes=of.needed_bytes)
    refuse_too_small(of, enough)
    with pytest.raises(Finding, match=r"nothing was captured: .* while capturing are 64 MiB more than the") as caught:
        refuse_too_small(of, replace(GPU, cuda_total_bytes=of.needed_bytes - 64 * MIB))
    assert caught.value.exit_code == 1


def mark(held_bytes: int | None) -> Mark:
    return Mark("eager_warmup", None, None, held_bytes, held_bytes, 0, None, None, held_bytes, 0.0)


@given(st.integers(0, 10**12), st.integers(0, 10**10), st.integers(0, 10**12))
def test_the_worker_refuses_exactly_what_does_not_fit(held: int, needed: int, limit: int) -> None:
    refused = refusal(CaptureLimit(limit, needed), mark(held))
    assert (refused is not None) == (held + needed > limit)


def test_without_a_limit_or_a_device_to_read_nothing_is_refused() -> None:
    assert refusal(None, mark(10**12)) is None and refusal(CaptureLimit(0, 1), mark(None)) is None
    refused = refusal(CaptureLimit(1000 * MIB, 100 * MIB), mark(964 * MIB))
    assert refused is not None and "64 MiB more than the 1000 MiB" in refused


def test_the_process_gets_the_recommended_pool_and_list() -> None:
    of = target()
    cell = verification_cell(of, SPARSE, GPU)
    assert cell.lists == (of.list,) and cell.gate and cell.purpose == "verify"
    assert cell.kv_tokens == (of.kv_tokens or 0) - cell.page_size
    assert cell.capture_limit == CaptureLimit(GPU.cuda_total_bytes, of.peak_bytes)
    assert cell.latency[0].sizes == spread(of.list.sizes) and cell.latency[0].executions == ("graph",)
    assert verification_cell(of, SPARSE, None).capture_limit is None


def test_a_pool_too_small_for_the_output_check_is_a_finding() -> None:
    with pytest.raises(Finding, match="checking the largest size"):
        verification_cell(replace(target(), kv_tokens=64), SPARSE, GPU)


@given(st.lists(st.integers(1, 4096), unique=True).map(sorted))
def test_timed_sizes_are_spread_from_the_smallest_to_the_largest(sizes: list[int]) -> None:
    chosen = spread(sizes)
    assert list(chosen) == sorted(set(chosen)) and set(chosen) <= set(sizes)
    assert len(chosen) == min(len(sizes), TIMED_SIZES)
    assert not sizes or (chosen[0], chosen[-1]) == (sizes[0], sizes[-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not JSON"), ("{", "not JSON"), ("[]", "schema 1"), ('{"schema": 2, "engines": {}}', "schema 1")],
)
def test_files_that_are_no_recommendation(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rec.json"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_recommendation(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_recommendation(tmp_path / "none.json")


def test_recommendations_without_a_list() -> None:
    with pytest.raises(InputError, match="no answer for sglang"):
        target_of(DATA, "sglang", "rec.json")
    empty = copy.deepcopy(DATA)
    empty["engines"]["vllm"]["decode"]["capture_sizes"] = []
    with pytest.raises(Finding, match="nothing is captured"):
        target(empty)
    torn = copy.deepcopy(DATA)
    del torn["engines"]["vllm"]["decode"]["workspace"]
    with pytest.raises(InputError, match="no complete recommendation"):
        target(torn)


def test_the_command_refuses_before_it_runs_anything(tmp_path: Path) -> None:
    folder = write_sweep(SPARSE, tmp_path / "sweep")
    data = copy.deepcopy(DATA)
    data["sweep"]["path"] = str(folder)
    file = tmp_path / "rec.json"
    file.write_text(json.dumps(data))
    done = CliRunner().invoke(app, ["verify", str(file), "--gpu-mem", "24", "--device", "cpu"])
    assert done.exit_code == 1 and "more than the" in done.output
    done = CliRunner().invoke(app, ["verify", str(file), "--device", "cpu"])
    assert done.exit_code == 2 and "the sweep ran on cuda" in done.output


def test_the_command_prints_the_checks_and_exits_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_sweep(SPARSE, tmp_path / "sweep")
    result = measured(target())
    device = replace(cpu_device(), kind="cuda")
    monkeypatch.setattr("graphtune.device.choose_device", lambda asked: device)
    monkeypatch.setattr(command, "_run", lambda cell, device: result)
    done = CliRunner().invoke(app, ["verify", str(folder), "--engine", "vllm", "--gpu-mem", "141"])
    assert done.exit_code == 0 and "Everything is as stated." in done.stdout
    result = measured(target(), graph_bytes=10**10)
    done = CliRunner().invoke(app, ["verify", str(folder), "--engine", "vllm", "--gpu-mem", "141", "--json"])
    data = json.loads(done.stdout)
    assert done.exit_code == 1 and data["passed"] is False and data["checks"][0]["verdict"] == "outside"


def with_prefill() -> Target:
    data = copy.deepcopy(DATA)
    answer = data["engines"]["vllm"]
    answer["prefill"] = {
        **answer["decode"],
        "backend": "breakable",
        "capture_sizes": [64, 128],
        "graph_bytes": 200 * MIB,
    }
    return target(data)


def test_a_prefill_list_is_captured_before_that_of_decode_into_one_pool() -> None:
    of = with_prefill()
    assert of.prefill is not None and of.joint_bytes is not None and of.joint_bytes > of.graph_bytes + 200 * MIB
    decode = verification_cell(of, SPARSE, GPU)
    cell = joint_cell(of, SPARSE, decode)
    assert cell is not None and cell.purpose == "joint" and cell.gate and cell.latency == ()
    assert [one.phase for one in cell.lists] == ["prefill", "decode"]
    assert cell.capture_limit is not None and cell.capture_limit.device_bytes == GPU.cuda_total_bytes
    assert joint_cell(target(), SPARSE, decode) is None


@pytest.mark.parametrize(("prefill_mib", "passed"), [(150, True), (260, False)])
def test_both_lists_may_take_at_most_what_they_were_stated_to_take_apart(prefill_mib: int, passed: bool) -> None:
    of = with_prefill()
    assert of.prefill is not None
    prefill = replace(captured_list(of.prefill), graph_bytes=prefill_mib * MIB, peak_bytes=300 * MIB)
    decode = replace(captured_list(of.list), graph_bytes=of.graph_bytes, peak_bytes=of.peak_bytes)
    checks = joint_checks(of, SPARSE, cell_result([prefill, decode], [], purpose="joint"))
    both = checks[0]
    assert both.measured == prefill_mib * MIB + of.graph_bytes
    assert (both.verdict == "ok") == passed
    assert [check.verdict for check in checks[2:]] == ["ok", "ok"]
    with pytest.raises(Finding, match="both"):
        joint_checks(of, SPARSE, cell_result([prefill], [], purpose="joint"))
