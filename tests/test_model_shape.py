"""Weights and KV cache of published models by their config.json, and files that are not understood."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.config_file import Keys
from graphtune.errors import InputError, ModelNotSupported
from graphtune.model_config import ModelConfig
from graphtune.model_shape import ModelShape, model_shape, read_model_shape
from tests.synthetic import LLAMA_8B

ROOT = Path(__file__).parents[1]

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def shape(mapping: dict[str, Any]) -> ModelShape:
    return model_shape(Keys(mapping, "config.json"))


@pytest.mark.parametrize(
    ("mapping", "billions"),
    [(LLAMA_8B, 8.03), (MIXTRAL, 46.70), (QWEN3_30B_A3B, 30.53), (DEEPSEEK_V3, 671.03)],
    ids=["llama", "mixtral", "qwen3 moe", "deepseek"],
)
def test_parameters_of_published_models(mapping: dict[str, Any], billions: float) -> None:
    assert round(shape(mapping).parameters / 1e9, 2) == billions


def test_the_swept_families_come_out_as_the_capture_engine_loads_them() -> None:
    for file in sorted((ROOT / "recipes/configs").glob("*.json")):
        loaded, counted = ModelConfig.from_path(file), read_model_shape(file)
        # Biases and the norms of heads are left out: a few parts in a hundred thousand.
        assert counted.parameters == pytest.approx(loaded.parameter_count(), rel=2e-3), file
        assert counted.kv_values_per_token() * 2 == loaded.kv_bytes_per_token(2)


def test_a_latent_is_cached_once_and_not_split_over_ranks() -> None:
    of = shape(DEEPSEEK_V3)
    assert of.kv_values_per_token() == of.kv_values_per_token(8) == (512 + 64) * 61
    assert shape(MIXTRAL).kv_values_per_token(4) * 4 == shape(MIXTRAL).kv_values_per_token()
    assert shape(QWEN3_30B_A3B).kv_values_per_token(16) * 4 == shape(QWEN3_30B_A3B).kv_values_per_token()


def test_quantised_weights_with_their_scales() -> None:
    fp8 = shape(DEEPSEEK_V3)
    assert fp8.quantised == "fp8" and fp8.linear_bytes == 1 + Fraction(4, 128 * 128)
    awq = shape({**LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}})
    assert awq.linear_bytes == Fraction(1, 2) + (2 + Fraction(1, 2)) / 128
    assert 5.2 < awq.weights_bytes() / 2**30 < 5.5
    packed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
    assert shape({**LLAMA_8B, "quantization_config": packed}).linear_bytes == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "exl2"}}, 'quant_method: "exl2" is not counted'),
        ({"quantization_config": {"quant_method": "gptq"}}, "bits: is missing"),
        ({"torch_dtype": "int3"}, "is not known"),
        ({"hidden_size": "large"}, "hidden_size: must be a whole number"),
        ({"mlp_only_layers": "all", "num_experts": 4, "num_experts_per_tok": 1}, "must be a list of whole numbers"),
    ],
)
def test_files_that_are_not_understood_name_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        shape({**LLAMA_8B, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["mamba_d_state", "vision_config", "is_encoder_decoder"])
def test_layers_of_another_kind_are_refused(key: str) -> None:
    with pytest.raises(ModelNotSupported, match=key):
        shape({**LLAMA_8B, key: {"a": 1}})
    with pytest.raises(ModelNotSupported, match="layer_types"):
        shape({**LLAMA_8B, "layer_types": ["linear_attention", "full_attention"]})


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.text(max_size=4), st.lists(st.integers(-2, 3)), st.just({})
)


@given(st.sampled_from([LLAMA_8B, MIXTRAL, QWEN3_30B_A3B, DEEPSEEK_V3]), st.data())
def test_any_spoiled_file_gives_a_shape_or_says_what_is_wrong(mapping: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(mapping)))
    try:
        made = shape({**mapping, key: data.draw(VALUES)})
    except InputError as error:
        assert "config.json" in str(error)
    else:
        assert made.weights_bytes() > 0 and made.kv_values_per_token() > 0


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert read_model_shape(tmp_path) == shape(MIXTRAL)
