"""`graphtune lint`: every kind of input, exit codes, one message for bad input."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphtune.engines import ENGINES

CAPTURE_32 = "[2026-03-04 05:00:05 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4, 8, 12, 16, 24, 32], avail mem=7.10 GB"


def decode_line(requests: int, graph: bool, second: int, rank: str = "TP0") -> str:
    return (
        f"[2026-03-04 05:06:{second:02d} {rank}] Decode batch, #running-req: {requests}, #token: 600, token usage: 0.10, "
        f"cuda graph: {graph}, gen throughput (token/s): 1.0, #queue-req: 0"
    )


def run(*args: str, text: str | None = None) -> tuple[int, str]:
    from graphtune.cli.app import app

    result = CliRunner().invoke(app, ["lint", *args], input=text)
    return result.exit_code, result.output


def test_the_command_says_five_of_six() -> None:
    args = ["--engine", "vllm", "--max-num-seqs", "6", "--spec-tokens", "6", "--max-cudagraph-capture-size", "42"]
    code, text = run(*args)
    assert code == 1
    assert "covers 5 of 6 requests" in text
    assert "mend: --max-cudagraph-capture-size 42 → --max-cudagraph-capture-size 48" in text
    code, text = run(*args, "--json")
    data = json.loads(text)
    assert (code, data["exit_code"], data["schema"]) == (1, 1, 1)
    assert data["verdicts"][0]["code"] == "gap"


def test_the_command_takes_a_launch_command_in_quotes() -> None:
    code, text = run(
        "vllm serve some/model --max-num-seqs 8 -cc.cudagraph_mode=FULL_DECODE_ONLY -O3", "--gpu-mem", "80"
    )
    assert code == 0
    assert "vllm 0.33, from command" in text


def test_short_flags_of_an_engine_are_not_taken_for_help() -> None:
    code, text = run("--engine", "vllm", "-cc.cudagraph_mode=FULL_DECODE_ONLY", "--max-num-seqs", "8", "-tp", "2")
    assert code == 0
    assert "Usage" not in text


def test_the_command_takes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 6\nspec-tokens: 6\nmax-cudagraph-capture-size: 42\n")
    code, text = run("--engine", "vllm", "--config", str(file))
    assert code == 1
    assert "covers 5 of 6" in text
    # A flag beside the file counts over it.
    assert run("--engine", "vllm", "--config", str(file), "--max-num-seqs", "5")[0] == 0
    yaml = tmp_path / "trt.yaml"
    yaml.write_text("cuda_graph_config:\n  enable_padding: true\n  batch_sizes: [1, 2, 4]\n")
    code, text = run(f"trtllm-serve model --max_batch_size 8 --extra_llm_api_options {yaml}")
    assert code == 1
    assert "covers 4 of 8 requests" in text
    json_file = tmp_path / "sglang.json"
    json_file.write_text(json.dumps({"cuda-graph-config": {"decode": {"bs": [1, 2]}}, "max-running-requests": 4}))
    code, text = run("--engine", "sglang", "--config", str(json_file))
    assert code == 1
    assert "covers 2 of 4 requests" in text


def test_the_command_takes_a_log(tmp_path: Path) -> None:
    code, text = run("--log", "-", text="\n".join([CAPTURE_32, decode_line(67, False, 1)]))
    assert code == 1
    assert "above the largest size 32" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "no engine is named"),
        (["--engine", "lmdeploy"], "unknown engine 'lmdeploy'"),
        (["--engine", "vllm", "serve"], "neither a flag nor a launch command"),
        (["echo hello world"], "does not say which engine"),
        (["--engine", "sglang", "vllm serve m"], "the command starts vllm, not sglang"),
        (["vllm serve 'm"], "cannot be read"),
        (["--engine", "vllm", "--config", "/nowhere/x.yaml"], "no such file"),
        (["--log", "/nowhere/x.log"], "no such file"),
        (["--log", "x", "--max-num-seqs", "3"], "a log is checked alone"),
        (["--engine", "vllm", "--gpu-mem", "big"], "not a memory size"),
        (["--engine", "vllm", "--compute-capability", "nine"], "no compute capability"),
        (["--engine", "vllm", "--dense-share", "2"], "no share"),
        (["--engine", "vllm", "--engine-version", "new"], "is not a version"),
    ],
)
def test_bad_input_gets_one_message_and_exit_2(args: list[str], says: str) -> None:
    code, text = run(*args)
    assert code == 2
    assert says in text


@pytest.mark.parametrize("content", ["a: [1", "- 1\n- 2\n", "a: 1\na: 2\n", "\x00"])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    for engine in ENGINES:
        code, text = run("--engine", engine, "--config", str(file))
        assert code == 2
        assert "bad.yaml" in text


@pytest.mark.field_data
def test_field_logs_by_lint(field_data: Path) -> None:
    code, text = run("--log", str(field_data / "logs" / "vllm-0.22.1-default.log"))
    assert code == 0
    assert "graphs took 666 MiB, the engine estimated 512 MiB" in text
    assert run("--log", str(field_data / "logs" / "sglang-0.5.16-default.log"))[0] == 0
