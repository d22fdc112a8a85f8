"""Bytes by shapes against published figures, and a deployment that differs from what was swept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.engines.sglang.engine import SGLang
from graphtune.errors import InputError
from graphtune.model_config import ModelConfig
from graphtune.tune.model_bytes import KV_WIDTHS, Deployment, kv_bytes, model_bytes
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation_text import as_text
from graphtune.units import GIB
from tests.synthetic import LLAMA_8B, write_sweep
from tests.tune.answers import SPARSE, checked

CONFIG = ModelConfig.from_mapping(LLAMA_8B)


def test_a_token_of_llama_3_8b_takes_128_kib() -> None:
    of = model_bytes(CONFIG, "bfloat16")
    assert of.bytes_per_kv_token == 8 * 256 * 32 * 2 == 131072
    assert of.weights_bytes == CONFIG.weights_bytes(2) == 16_060_522_496


@pytest.mark.parametrize(
    ("kv_dtype", "per_token"),
    [("bfloat16", 131072), ("fp8", 65536), ("fp8_e4m3", 65536), ("mxfp8", 65536 + 2048), ("fp4", 32768 + 4096)],
)
def test_kv_types_with_their_block_scales(kv_dtype: str, per_token: int) -> None:
    assert model_bytes(CONFIG, "bfloat16", Deployment(kv_dtype)).bytes_per_kv_token == per_token
    assert kv_bytes(1, kv_dtype) >= 1 and kv_dtype in KV_WIDTHS


def test_a_shard_holds_its_part_and_never_less_than_one_kv_head() -> None:
    whole, half, many = (model_bytes(CONFIG, "bfloat16", Deployment(shard=n)) for n in (1, 2, 32))
    assert half.bytes_per_kv_token * 2 == whole.bytes_per_kv_token
    assert many.bytes_per_kv_token * 8 == whole.bytes_per_kv_token
    assert half.weights_bytes < 0.51 * whole.weights_bytes
    sharded = CONFIG.shard(4)
    assert model_bytes(sharded, "bfloat16") == model_bytes(CONFIG, "bfloat16", Deployment(shard=4))
    assert model_bytes(sharded, "bfloat16", Deployment(shard=2)) == half
    with pytest.raises(InputError, match="--shard"):
        model_bytes(CONFIG, "bfloat16", Deployment(shard=3))


def test_stated_weights_stand() -> None:
    assert model_bytes(CONFIG, "bfloat16", Deployment(weights_bytes=38 * GIB)).weights_bytes == 38 * GIB


@pytest.mark.parametrize("bad", [{"kv_dtype": "fp3"}, {"weights_bytes": 0}])
def test_what_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Deployment(**bad)


def memory(**changes: Any) -> dict[str, Any]:
    question = Question(gpu_mem="80", engines=("vllm",), deployment=Deployment(**changes))
    found: dict[str, Any] = checked(recommend(SPARSE, question))["engines"]["vllm"]["memory"]
    return found


def test_a_recommendation_for_a_deployment_that_differs() -> None:
    plain, fp8, heavy = memory(), memory(kv_dtype="fp8"), memory(weights_bytes=38 * GIB)
    assert fp8["bytes_per_kv_token"] * 2 == plain["bytes_per_kv_token"]
    assert abs(fp8["kv_tokens"] - 2 * plain["kv_tokens"]) <= 32
    assert plain["kv_bytes"] - heavy["kv_bytes"] == heavy["weights_bytes"] - plain["weights_bytes"]
    data = checked(recommend(SPARSE, Question(gpu_mem="80", deployment=Deployment(shard=2))))
    assert "other_shard" in {warning["code"] for warning in data["warnings"]}
    assert all(answer["memory"]["weights_bytes"] < plain["weights_bytes"] for answer in data["engines"].values())


def test_the_command_reads_the_options(tmp_path: Path) -> None:
    folder = str(write_sweep(SPARSE, tmp_path / "sweep"))
    asked = ["recommend", folder, "--engine", "vllm", "--gpu-mem", "80", "--json"]
    done = CliRunner().invoke(app, [*asked, "--kv-dtype", "fp8", "--weights", "38GiB"])
    found = json.loads(done.stdout)["engines"]["vllm"]["memory"]
    assert (found["weights_bytes"], found["bytes_per_kv_token"]) == (38 * GIB, 65536)
    for bad in (["--kv-dtype", "fp3"], ["--weights", "38"], ["--shard", "3"]):
        done = CliRunner().invoke(app, [*asked, *bad])
        assert done.exit_code == 2 and "Traceback" not in done.output


def test_a_pool_that_cuts_the_list_starts_another_round_with_a_list_that_it_does_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SGLang, "request_pool", lambda self, kv_tokens, serving: 20)
    answer = recommend(SPARSE, Question(gpu_mem="80", engines=("sglang",)))
    data = checked(answer)["engines"]["sglang"]
    first, last = data["memory"]["rounds"]
    assert first["top"] > 20 >= last["top"] == max(data["decode"]["capture_sizes"])
    assert [one["request_pool"] for one in (first, last)] == [20, 20]
    assert last["kv_tokens"] == data["memory"]["kv_tokens"]
    assert "settled in 2 rounds" in " ".join(as_text(answer).split())
