"""Loading safetensors: merged layout, sharded index, rank slices, and one error that names all that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import all_logits, save_checkpoint

from graphtune.errors import InputError
from graphtune.model_config import ModelConfig
from graphtune.worker.models import weights
from graphtune.worker.models.decoder import Decoder

CPU = torch.device("cpu")


def load(folder: Path, ranks: int = 1, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.from_path(folder).shard(ranks)
    return Decoder.from_safetensors(config, folder, dtype=dtype, device=CPU)


def rewrite(folder: Path, change: Any) -> dict[str, torch.Tensor]:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return tensors


def test_a_sharded_index_equals_a_single_file(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path / "single")
    save_checkpoint("qwen3", tmp_path / "sharded", max_shard_size="30KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single, sharded = load(tmp_path / "single"), load(tmp_path / "sharded")
    for name, tensor in single.named_tensors().items():
        assert torch.equal(tensor, sharded.named_tensors()[name]), name


def test_copying_in_small_pieces_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("llama_biased", tmp_path)
    whole = load(tmp_path)
    monkeypatch.setattr(weights, "COPY_CHUNK_BYTES", 500)
    for name, tensor in load(tmp_path).named_tensors().items():
        assert torch.equal(tensor, whole.named_tensors()[name]), name


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    save_checkpoint("qwen2_tied", tmp_path)
    exact, rounded = load(tmp_path), load(tmp_path, dtype=torch.bfloat16)
    for name, tensor in exact.named_tensors().items():
        other = rounded.named_tensors()[name]
        assert torch.equal(other, tensor if name == "rope.cos_sin" else tensor.bfloat16())


@pytest.mark.parametrize("name", ["llama_biased", "qwen3", "qwen2_tied"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_shard_takes_rank_zeros_slices(name: str, ranks: int, tmp_path: Path) -> None:
    """Against the checkpoint itself: leading heads, inner columns and tokens; one shared kv head when ranks exceed."""
    save_checkpoint(name, tmp_path)
    source = load_file(tmp_path / "model.safetensors")
    decoder = load(tmp_path, ranks)
    config, own = decoder.config, decoder.named_tensors()
    layer, q, kv, inner = "model.layers.1", config.q_size, config.kv_size, config.intermediate_size
    assert q == 4 * config.head_dim // ranks and inner == 80 // ranks and config.num_kv_heads == 1
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        target = own["layers.1.qkv" if kind == "weight" else "layers.1.qkv_bias"]
        heads = [source[f"{layer}.self_attn.{p}_proj.{kind}"] for p in "qkv"]
        assert torch.equal(target, torch.cat([heads[0][:q], heads[1][:kv], heads[2][:kv]]))
    assert torch.equal(own["layers.1.o"], source[f"{layer}.self_attn.o_proj.weight"][:, :q])
    assert torch.equal(own["layers.1.down"], source[f"{layer}.mlp.down_proj.weight"][:, :inner])
    gate, up = (source[f"{layer}.mlp.{p}_proj.weight"][:inner] for p in ("gate", "up"))
    assert torch.equal(own["layers.1.gate_up"], torch.cat([gate, up]))
    if config.mlp_bias:
        assert torch.equal(own["layers.1.down_bias"], source[f"{layer}.mlp.down_proj.bias"])
    assert torch.equal(own["embedding"], source["model.embed_tokens.weight"][: config.vocab_size])
    assert config.vocab_size == 128 // ranks


def test_rows_of_a_padded_vocabulary_are_zero(tmp_path: Path) -> None:
    """A vocabulary of 20 is padded to 64 before it is split over 2 ranks, so rank 0 holds 32 rows, 12 of them empty."""
    save_checkpoint("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name][:20].clone() for name in tables}))
    own = load(tmp_path, 2).named_tensors()
    for name in ("embedding", "lm_head"):
        assert own[name].shape[0] == 32
        assert bool((own[name][20:] == 0).all()) and bool((own[name][:20] != 0).any())


def test_every_misfit_is_named_in_one_error(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.self_attn.q_norm.weight"]
        tensors["model.layers.0.mlp.router.weight"] = torch.zeros(2, 2)
        tensors["model.norm.weight"] = torch.zeros(49)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(80, 48, dtype=torch.int8)

    rewrite(tmp_path, damage)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    message = caught.value.message
    assert "missing: model.layers.0.self_attn.q_norm.weight" in message
    assert "unexpected: model.layers.0.mlp.router.weight" in message
    assert "model.norm.weight (49,), expected (48,)" in message
    assert "model.layers.2.mlp.up_proj.weight I8" in message
    assert caught.value.where == str(tmp_path)


def test_biases_without_a_place_are_not_dropped(tmp_path: Path) -> None:
    save_checkpoint("llama_biased", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(InputError, match=r"unexpected: .*q_proj.bias|unexpected: .*k_proj.bias"):
        load(tmp_path)


def test_nothing_is_allocated_before_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("qwen3", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    monkeypatch.setattr("graphtune.worker.models.decoder.allocate", lambda *_: pytest.fail("allocated"))
    with pytest.raises(InputError, match=r"missing: model\.norm\.weight"):
        load(tmp_path)


def test_a_head_in_a_tied_model_must_be_the_embedding(tmp_path: Path) -> None:
    save_checkpoint("qwen3_tied", tmp_path)
    tokens = [[1, 2, 3]]
    plain = all_logits(load(tmp_path), tokens, prefill=[2])
    tensors = rewrite(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert torch.equal(all_logits(load(tmp_path), tokens, prefill=[2])[0], plain[0])
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"unexpected: lm_head\.weight"):
        load(tmp_path)


def test_old_rotary_tables_are_left_out(tmp_path: Path) -> None:
    save_checkpoint("llama2", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    load(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path, max_shard_size="30KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    name, tensor = next(iter(load_file(files[0]).items()))
    save_file({**load_file(files[1]), name: tensor}, files[1])
    with pytest.raises(InputError, match=f"in two files: {name}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not JSON"),
        ('{"weight_map": {}}', "names no tensor"),
        ('{"weight_map": {"a": 3}}', "must be text"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not a file beside the index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "not a file beside the index"),
    ],
)
def test_a_bad_index_is_an_input_error(index: str, message: str, tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=message):
        load(tmp_path)


def test_missing_and_broken_files_are_input_errors(tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="not a usable safetensors file"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(InputError, match="holds neither"):
        load(tmp_path)
