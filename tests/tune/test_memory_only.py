"""Memory of models that were not swept: by shapes, under the engines' own lists, latency null with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.config_file import Keys
from graphtune.errors import InputError
from graphtune.model_shape import model_shape
from graphtune.results import CaptureList
from graphtune.tune.block_pool import TORCH_RULES
from graphtune.tune.memory_only import as_json, decode_trace, memory_advice
from graphtune.tune.memory_only_text import as_text
from graphtune.tune.memory_prediction import Outside, played_predictor
from graphtune.tune.model_bytes import Deployment
from graphtune.units import MIB
from tests.synthetic import LLAMA_8B, write_sweep
from tests.test_model_shape import DEEPSEEK_V3, MIXTRAL
from tests.tune import memory_shapes
from tests.tune.answers import SPARSE

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "memory-only.schema.json").read_text())


def config(folder: Path, mapping: dict[str, Any] = MIXTRAL) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(mapping))
    return folder


@pytest.mark.parametrize(("sizes", "pool_mib"), [(memory_shapes.SGLANG, 72), ((1, 2, 4, 8, 16, 32, 64, 128), 38)])
def test_by_shapes_alone_a_list_of_llama_8b_takes_what_was_read_on_an_h200(
    sizes: tuple[int, ...], pool_mib: int
) -> None:
    shape = model_shape(Keys(LLAMA_8B, "config.json"))
    of = CaptureList("own", "decode", "full", sizes)
    traces = {size: decode_trace(shape, 1, size) for size in sizes}
    prediction = played_predictor(TORCH_RULES, of, traces, Outside(1.2 * MIB, 0, 1)).predict(of)
    assert prediction is not None and prediction.torch_bytes == pool_mib * MIB
    assert prediction.outside_bytes == round(1.2 * MIB * len(sizes))


def test_budgets_of_a_mixture_of_experts(tmp_path: Path) -> None:
    advice = memory_advice(config(tmp_path / "mixtral"), SPARSE, gpu_mem="141")
    assert advice.model == "mixtral" and advice.fits
    assert advice.weights_bytes == pytest.approx(93.4e9, rel=0.01) and advice.bytes_per_kv_token == 131072
    data = as_json(advice)
    assert data["latency"] is None and "not swept" in data["missing"]["latency"]
    for name, one in data["engines"].items():
        low, high = one["graph_bytes_interval"]
        assert 0 < low < one["graph_bytes"] < high and one["memory"]["kv_tokens"] > 0, name
    json.dumps(data, allow_nan=False)
    text = as_text(advice)
    assert "8 experts: memory only" in text and "Latency: none" in text
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("--"))


def test_a_latent_cache_and_ranks(tmp_path: Path) -> None:
    folder = config(tmp_path / "deepseek", DEEPSEEK_V3)
    advice = memory_advice(folder, SPARSE, gpu_mem="141", engines=("sglang",), deployment=Deployment(shard=8))
    assert advice.bytes_per_kv_token == 576 * 61 * 2 and advice.fits
    assert advice.weights_bytes == pytest.approx(673.3e9 / 8, rel=0.01)
    whole = memory_advice(folder, SPARSE, gpu_mem="141", engines=("sglang",))
    text = " ".join(as_text(whole).split())
    assert not whole.fits and "does not fit: short by" in text and "(--shard N)" in text
    assert "GiB needed, KV for 1,024 tokens included, of 139" in text and "--mem-fraction-static" not in text


def test_without_a_card_there_is_no_budget(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--gpu-mem"):
        memory_advice(config(tmp_path / "mixtral"), SPARSE, gpu_mem=None)


def test_the_command_answers_for_a_config_that_was_not_swept(tmp_path: Path) -> None:
    sweep = str(write_sweep(replace(SPARSE, recipe={"model": LLAMA_8B}), tmp_path / "sweep"))
    folder = str(config(tmp_path / "mixtral"))
    done = CliRunner().invoke(app, ["recommend", sweep, "--model", folder, "--gpu-mem", "141", "--json"])
    assert done.exit_code == 0
    jsonschema.validate(json.loads(done.stdout), SCHEMA)
    none_fits = CliRunner().invoke(app, ["recommend", sweep, "--model", folder, "--gpu-mem", "1", "--json"])
    assert none_fits.exit_code == 1
    jsonschema.validate(json.loads(none_fits.stdout), SCHEMA)
    done = CliRunner().invoke(app, ["recommend", sweep, "--model", folder, "--gpu-mem", "24"])
    assert done.exit_code == 1 and "does not fit" in done.stdout
    done = CliRunner().invoke(app, ["recommend", sweep, "--model", folder])
    assert done.exit_code == 2 and "--gpu-mem" in done.output
    done = CliRunner().invoke(app, ["recommend", sweep, "--model", "unknown-9b"])
    assert done.exit_code == 2 and "was not swept" in done.output
