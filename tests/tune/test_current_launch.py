"""What runs now against what is recommended: the verdict, the change, and a command that does it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts
from graphtune.engines.launch import parse_command
from graphtune.errors import InputError
from graphtune.tune.current_launch import read_current
from graphtune.tune.model_bytes import Deployment
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation import CurrentAnswer
from graphtune.tune.recommendation_text import as_text
from graphtune.units import GIB
from tests.synthetic import h200_sweep, write_sweep
from tests.tune.answers import checked

RICH = h200_sweep()
H200 = DeviceFacts(143771, (9, 0))
DENSE = " ".join(map(str, (1, 2, 4, 8, 12, *range(16, 257, 8))))


def asked(current: str, **more: Any) -> CurrentAnswer:
    answer = recommend(RICH, Question(gpu_mem="141", workload="uniform 256", current=current, **more))
    checked(answer)
    (one,) = answer.engines
    assert one.current is not None
    return one.current


@pytest.mark.parametrize(
    ("command", "engine", "option"),
    [
        ("python -m sglang.launch_server --model-path m --cuda-graph-bs-decode 1 2 4", "sglang", "--model-path"),
        ("vllm serve m --cudagraph-capture-sizes 1 2 4 --seed 7", "vllm", "--seed"),
        ('vllm serve m -cc \'{"cudagraph_capture_sizes":[1,2],"cudagraph_mode":"FULL"}\'', "vllm", "-cc"),
        ("trtllm-serve m --tp_size 1", "tensorrt_llm", "--tp_size"),
    ],
)
def test_a_list_that_is_too_short_is_changed_and_the_rest_stays(command: str, engine: str, option: str) -> None:
    found = asked(command)
    assert not found.leave_it and found.message.startswith("change it (faster): −") and found.edits
    assert found.change["step_us"] is not None and found.change["step_us"] < 0
    assert found.command is not None and option in found.command.args
    named, launch = parse_command(shlex.join(found.command.args))
    assert named == engine
    if found.command.yaml is None:  # the command to paste captures the recommended list
        answer = recommend(RICH, Question(gpu_mem="141", workload="uniform 256", engines=(engine,))).engine(engine)
        run = next(run for run in ENGINES[engine].resolve(launch, H200).phases if run.phase == "decode")
        assert answer.decode is not None and run.effective.sizes == answer.decode.capture_sizes
        assert asked(shlex.join(found.command.args)).leave_it
    else:
        assert "enable_padding: true" in found.command.yaml
        assert found.command.args[-2:] == ("--config", "graphs.yaml")


@pytest.mark.parametrize("sizes", [" --cuda-graph-bs-decode 8 64 256", " --cuda-graph-max-bs-decode 16"])
def test_a_launch_without_padding_gets_it_with_the_recommended_list(sizes: str) -> None:
    """Left off, steps between the recommended sizes would run eager."""
    found = asked(f"python -m sglang.launch_server --model-path m{sizes} --disable-cuda-graph-padding")
    assert found.padding == "exact" and not found.leave_it
    assert found.command is not None and "--disable-cuda-graph-padding" not in found.command.args
    assert any("--disable-cuda-graph-padding" in edit for edit in found.edits)
    again = asked(shlex.join(found.command.args))
    assert again.padding == "always" and again.leave_it


def test_a_good_list_is_left_alone() -> None:
    found = asked(f"sglang serve --cuda-graph-bs-decode {DENSE}")
    assert found.leave_it and found.command is None and not found.edits
    assert found.message.startswith("leave it: the recommended list is no faster (within 1.0%)")


def test_graphs_turned_off_are_told_from_graphs() -> None:
    off = asked("--disable-cuda-graph", engines=("sglang",))
    assert off.list.is_eager and not off.leave_it
    assert off.command is None and "stand in the way" in off.absent["command"]


def test_room_for_kv_is_a_reason_to_change() -> None:
    found = asked(f"sglang serve --mem-fraction-static 0.7 --cuda-graph-bs-decode {DENSE}")
    assert not found.leave_it and "more room for KV" in found.message
    assert found.change["kv_tokens"] is not None and found.change["kv_tokens"] > 0
    assert found.command is not None and "--mem-fraction-static" in found.command.args
    again = asked(shlex.join(found.command.args))
    assert again.leave_it and again.change["kv_tokens"] == pytest.approx(0, abs=200)  # a fraction has four places


def test_stated_limits_hold_for_the_recommendation() -> None:
    answer = recommend(
        RICH, Question(gpu_mem="141", current="vllm serve m --max-num-seqs 40 --gpu-memory-utilization 0.5")
    )
    (one,) = answer.engines
    assert one.decode is not None and answer.workload.max_running_requests == 40
    assert one.memory is not None and one.memory.fraction == 0.5
    assert one.flags is not None and "--max-num-seqs" in one.flags.args


def test_a_log_says_what_was_captured(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "[2026-01-01 00:00:00] server_args=ServerArgs(model_path='m', mem_fraction_static=0.88)\n"
        "[2026-01-01 00:00:05] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, "
        "bs=[1, 2, 4, 8], avail mem=20.00 GB\n"
        "[2026-01-01 00:00:09] Capture target decode CUDA graph end. elapsed=1.10 s, mem usage=0.20 GB, "
        "avail mem=19.80 GB.\n"
    )
    found = read_current(str(log), "sglang", H200)
    assert (found.engine, found.source, found.sizes, found.launch) == ("sglang", "log", (1, 2, 4, 8), None)
    answer = recommend(RICH, Question(gpu_mem="141", current=str(log), engines=("sglang",)))
    checked(answer)
    assert "a log does not tell the launch command" in as_text(answer)


@pytest.mark.parametrize(
    ("current", "engines", "where"),
    [
        ("vllm serve m", ("sglang",), "launch command"),
        ("python serve.py --port 1", (), "launch command"),
        ("vllm", (), "launch command"),
        ("vllm serve m --cudagraph-capture-sizes many", (), "--current"),
        ("sglang serve --speculative-algorithm EAGLE --speculative-num-draft-tokens 4", (), "--current"),
        ("vllm serve 'm", (), "launch command"),
    ],
)
def test_what_cannot_be_read_is_refused(current: str, engines: tuple[str, ...], where: str) -> None:
    with pytest.raises(InputError) as caught:
        recommend(RICH, Question(gpu_mem="141", current=current, engines=engines))
    assert caught.value.where == where


def test_the_command_prints_what_to_paste(tmp_path: Path) -> None:
    folder = write_sweep(replace(RICH, path=tmp_path), tmp_path / "sweep")
    done = CliRunner().invoke(
        app, ["recommend", str(folder), "--gpu-mem", "141", "--current", "vllm serve m --cudagraph-capture-sizes 1 2"]
    )
    assert done.exit_code == 0, done.output
    assert "current" in done.stdout and "change it" in done.stdout and "\nvllm serve m \\\n" in done.stdout


def test_a_launch_over_other_ranks_needs_the_shard() -> None:
    with pytest.raises(InputError, match="over 2 ranks and the figures would be those of 1") as refused:
        asked("vllm serve m -tp 2")
    assert refused.value.where == "--current" and refused.value.action == "Add --shard 2."
    assert recommend(RICH, Question(gpu_mem="141", current="vllm serve m -tp 1")).engines


def test_a_limit_below_all_of_the_traffic_names_where_it_is_from() -> None:
    with pytest.raises(InputError, match=r"16 requests or fewer.*--current"):
        recommend(RICH, Question(gpu_mem="141", workload="steady 32", current="vllm serve m --max-num-seqs 16"))


def test_a_log_of_another_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    stamp = "[2026-07-01 10:00:00 TP0]"
    file.write_text(
        f"{stamp} Load weight end. elapsed=0.13 s, type=LlamaForCausalLM, avail mem=124.11 GB, mem usage=1.20 GB.\n"
        f"{stamp} Capture cuda graph begin. This can take up to several minutes. avail mem=40.00 GB\n"
        f"{stamp} Capture cuda graph bs [1, 2, 4, 8]\n"
        f"{stamp} Capture cuda graph end. Time elapsed: 1.00 s. mem usage=0.50 GB. avail mem=30.00 GB.\n"
    )
    for option in ({"current": str(file)}, {"calibrate": str(file)}):
        with pytest.raises(InputError, match=r"its weights take 1\.20 GiB a rank .*another model"):
            recommend(RICH, Question(gpu_mem="141", **option))
    lighter = Deployment(weights_bytes=round(1.2 * GIB))
    assert recommend(RICH, Question(gpu_mem="141", current=str(file), deployment=lighter)).engines
