"""ModelConfig: what is read, what is refused by name, what bad input says, and the arithmetic."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.errors import InputError, ModelNotSupported
from graphtune.model_config import Llama3Rope, ModelConfig

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "sliding_window": None,
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "use_sliding_window": False,
}
FAMILIES = {"llama": LLAMA_8B, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(base), **changes}


def without(base: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in base.items() if key not in keys}


# What is read


def test_llama_reads_every_shape_and_switch() -> None:
    model = ModelConfig.from_mapping(LLAMA_8B)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (32, 32, 8, 128)
    assert (model.q_size, model.kv_size, model.vocab_size) == (4096, 1024, 128256)
    assert model.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    assert (model.rope_theta, model.rms_norm_eps, model.dtype) == (500000.0, 1e-5, "bfloat16")
    assert not (model.qkv_bias or model.o_bias or model.mlp_bias or model.qk_norm or model.tie_word_embeddings)
    assert model.unknown_keys == () and model.shard_of == 1


def test_families_fix_biases_and_norms() -> None:
    qwen2, qwen3 = ModelConfig.from_mapping(QWEN2), ModelConfig.from_mapping(QWEN3)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (False, False, False, True)
    biased = ModelConfig.from_mapping(changed(LLAMA_8B, attention_bias=True, mlp_bias=True))
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    biased = ModelConfig.from_mapping(changed(QWEN3, attention_bias=True))
    assert (biased.qkv_bias, biased.o_bias) == (True, True)


def test_new_spellings_equal_the_old_ones() -> None:
    new = without(LLAMA_8B, "rope_theta", "rope_scaling", "torch_dtype")
    new["rope_parameters"] = {**LLAMA_8B["rope_scaling"], "rope_theta": 500000.0}
    new["dtype"] = "torch.bfloat16"
    assert ModelConfig.from_mapping(new) == ModelConfig.from_mapping(LLAMA_8B)
    old_type = changed(LLAMA_8B)
    old_type["rope_scaling"]["type"] = old_type["rope_scaling"].pop("rope_type")
    assert ModelConfig.from_mapping(old_type) == ModelConfig.from_mapping(LLAMA_8B)


@pytest.mark.parametrize("plain", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_plain_rope_has_four_spellings(plain: dict[str, Any] | None) -> None:
    model = ModelConfig.from_mapping(changed(LLAMA_8B, rope_scaling=plain))
    assert model.rope_scaling is None and model.rope_theta == 500000.0


def test_absent_keys_take_what_transformers_takes() -> None:
    model = ModelConfig.from_mapping(without(LLAMA_8B, "num_key_value_heads", "rms_norm_eps", "rope_theta"))
    assert (model.num_kv_heads, model.rms_norm_eps, model.rope_theta) == (32, 1e-6, 10000.0)
    assert ModelConfig.from_mapping(without(QWEN3, "head_dim")).head_dim == 128
    assert ModelConfig.from_mapping(without(QWEN2, "architectures")).model_type == "qwen2"
    assert ModelConfig.from_mapping(without(QWEN2, "model_type")).model_type == "qwen2"
    with pytest.raises(InputError, match="num_key_value_heads: is missing"):
        ModelConfig.from_mapping(without(MISTRAL, "num_key_value_heads"))


def test_unknown_keys_are_handed_back_and_do_not_stop_anything() -> None:
    model = ModelConfig.from_mapping(changed(QWEN2, brewed_by="someone", _name_or_path="x", wobble=3))
    assert model.unknown_keys == ("brewed_by", "wobble")
    scaling = {"rope_type": "default", "factor": 2.0, "shimmer": 1}
    assert ModelConfig.from_mapping(changed(QWEN3, rope_scaling=scaling)).unknown_keys == (
        "rope_scaling.factor",
        "rope_scaling.shimmer",
    )


@pytest.mark.parametrize(
    "harmless",
    [
        {"num_experts": 0},
        {"quantization_config": None},
        {"partial_rotary_factor": 1.0},
        {"pretraining_tp": 2},
        {"attn_logit_softcapping": None},
        {"rope_interleaved": False},
        {"hidden_act": "swish"},
    ],
)
def test_keys_without_effect_change_nothing(harmless: dict[str, Any]) -> None:
    assert ModelConfig.from_mapping(changed(LLAMA_8B, **harmless)) == ModelConfig.from_mapping(LLAMA_8B)


# What is refused by name


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"num_experts": 8}),
        ("llama", {"num_local_experts": 8}),
        ("llama", {"n_routed_experts": 256}),
        ("llama", {"moe_intermediate_size": 768}),
        ("llama", {"kv_lora_rank": 512}),
        ("llama", {"q_lora_rank": 1536}),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"attn_logit_softcapping": 50.0}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"no_rope_layers": [1, 1, 0]}),
        ("llama", {"rope_interleaved": True}),
        ("llama", {"sliding_window": 4096}),
        ("llama", {"text_config": {"hidden_size": 4}}),
        ("llama", {"embedding_multiplier": 12.0}),
        ("llama", {"attention_chunk_size": 8192}),
        ("llama", {"torch_dtype": "float8_e4m3fn"}),
        ("mistral", {"sliding_window": 4096}),
        ("mistral", {"attention_bias": True}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"layer_types": ["full_attention"] * 23 + ["sliding_attention"]}),
        ("qwen2", {"attention_bias": False}),
        ("qwen3", {"mlp_bias": True}),
        ("qwen3", {"layer_types": ["linear_attention"] * 28}),
    ],
)
def test_a_computation_that_is_not_built_is_refused_by_name(family: str, change: dict[str, Any]) -> None:
    with pytest.raises(ModelNotSupported) as caught:
        ModelConfig.from_mapping(changed(FAMILIES[family], **change))
    assert f"{next(iter(change))} = " in caught.value.message


def test_an_absent_window_is_a_window_for_mistral() -> None:
    with pytest.raises(ModelNotSupported, match="sliding_window"):
        ModelConfig.from_mapping(without(MISTRAL, "sliding_window"))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "mrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scalings_that_are_not_built_are_refused_by_name(kind: str, key: str) -> None:
    with pytest.raises(ModelNotSupported, match=f'rope_scaling.rope_type = "{kind}"'):
        ModelConfig.from_mapping(changed(QWEN3, rope_scaling={key: kind, "factor": 2.0}))


def test_rope_inside_is_refused_by_name() -> None:
    for inside in ({"partial_rotary_factor": 0.25}, {"mrope_section": [16, 24, 24]}, {"full_attention": {}}):
        rope = {"rope_type": "default", "rope_theta": 1e6, **inside}
        with pytest.raises(ModelNotSupported, match=f"rope_parameters.{next(iter(inside))}"):
            ModelConfig.from_mapping(changed(without(QWEN3, "rope_theta"), rope_parameters=rope))


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "LlamaForSequenceClassification", "Qwen3MoeForCausalLM"])
def test_other_architectures_are_refused_by_name(name: str) -> None:
    with pytest.raises(ModelNotSupported, match=name):
        ModelConfig.from_mapping(changed(LLAMA_8B, architectures=[name]))


def test_architecture_and_type_must_agree() -> None:
    with pytest.raises(InputError, match="does not go with"):
        ModelConfig.from_mapping(changed(LLAMA_8B, model_type="qwen2"))
    with pytest.raises(InputError, match="must name the model"):
        ModelConfig.from_mapping(without(LLAMA_8B, "model_type", "architectures"))


# Bad input

REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [0, -1, "4096", 4096.0, True, [4096], None])
def test_an_ill_typed_size_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_mapping(changed(LLAMA_8B, **{key: value}), where="my.json")
    assert caught.value.where == f"my.json: {key}"
    with pytest.raises(InputError, match=f"{key}: is missing"):
        ModelConfig.from_mapping(without(LLAMA_8B, key))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"hidden_size": 4100}, "hidden_size"),
        ({"head_dim": 63}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "type": "default"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling"),
        ({"rope_scaling": None, "rope_parameters": {"rope_theta": 2.0}}, "rope_parameters.rope_theta"),
        ({"rope_scaling": {**LLAMA_8B["rope_scaling"], "low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor"),
        ({"dtype": "float32"}, "dtype"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ],
)
def test_inconsistent_keys_are_named(change: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_mapping(changed(LLAMA_8B, **change))
    assert caught.value.where == f"config.json: {key}"
    assert not isinstance(caught.value, ModelNotSupported)


def test_head_dim_given_frees_hidden_size() -> None:
    assert ModelConfig.from_mapping(changed(LLAMA_8B, hidden_size=4100, head_dim=128)).q_size == 4096


def test_a_file_error_names_file_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(changed(LLAMA_8B, vocab_size=0), indent=2))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "vocab_size" in text)
    for path in (file, tmp_path, str(tmp_path)):
        with pytest.raises(InputError) as caught:
            ModelConfig.from_path(path)
        assert caught.value.where == f"{file}:{line}: vocab_size"


def test_a_line_is_that_of_the_key_in_its_own_section(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**without(LLAMA_8B, "rope_scaling"), "rope_parameters": {"rope_theta": "x"}}, indent=2))
    lines = file.read_text().splitlines()
    with pytest.raises(InputError) as caught:
        ModelConfig.from_path(file)
    assert caught.value.where is not None
    assert "rope_theta" in lines[int(caught.value.where.split(":")[-2]) - 1]
    assert caught.value.where.endswith(f":{len(lines) - 2}: rope_parameters.rope_theta")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{\n  "a": 1,\n  oops\n}', ":3:3"),
        ("", ":1:1"),
        ('{"a": 1} x', ":1:10"),
        ("[1, 2]", ""),
        ('{"a": 1, "a": 2}', ""),
        ("9" * 5000, ""),
        ("[" * 100000, ""),
    ],
)
def test_malformed_json_names_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        ModelConfig.from_path(file)
    assert caught.value.where == f"{file}{place}"


def test_unreadable_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        ModelConfig.from_path(tmp_path / "absent.json")
    with pytest.raises(InputError, match="no such file"):
        ModelConfig.from_path(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(InputError, match="UTF-8"):
        ModelConfig.from_path(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        ModelConfig.from_path("a\0b")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_damage_is_an_input_error_or_a_sound_model(data: st.DataObject) -> None:
    """Keys deleted and replaced at random, inside rope too: an InputError, or shapes that hold together."""
    mapping = changed(data.draw(st.sampled_from(list(FAMILIES.values()))))
    if mapping.get("rope_scaling") and data.draw(st.booleans()):
        mapping["rope_parameters"] = mapping.pop("rope_scaling")
    target = mapping
    nested = mapping.get("rope_scaling") or mapping.get("rope_parameters")
    if nested and data.draw(st.booleans()):
        target = nested
    for key in data.draw(st.lists(st.sampled_from(sorted(target)), max_size=3, unique=True)):
        if data.draw(st.booleans()):
            del target[key]
        else:
            target[key] = data.draw(JSON)
    mapping.update(data.draw(st.dictionaries(st.text(max_size=5), JSON, max_size=2)))
    try:
        model = ModelConfig.from_mapping(mapping)
    except InputError as error:
        assert error.where and error.where.startswith("config.json")
        return
    assert model.num_heads % model.num_kv_heads == 0 and model.head_dim % 2 == 0
    assert model.parameter_count() > 0 and model.kv_bytes_per_token(2) > 0


@given(JSON)
def test_any_content_is_an_input_error(content: Any) -> None:
    with pytest.raises(InputError):
        ModelConfig.from_mapping(content)


# Arithmetic


def test_counts_equal_the_published_ones() -> None:
    llama, qwen3, qwen2 = (ModelConfig.from_mapping(mapping) for mapping in (LLAMA_8B, QWEN3, QWEN2))
    assert llama.parameter_count() == 8_030_261_248
    assert llama.weights_bytes(2) == 16_060_522_496
    assert llama.kv_bytes_per_token(2) == 131_072
    assert llama.rope_cache_bytes() == 64 << 20
    assert qwen3.parameter_count() == 596_049_920
    assert qwen2.parameter_count() == 494_032_768


def test_a_shard_has_one_ranks_shapes() -> None:
    model = ModelConfig.from_mapping(LLAMA_8B)
    rank = model.shard(4)
    assert (rank.num_heads, rank.num_kv_heads, rank.intermediate_size, rank.vocab_size) == (8, 2, 3584, 32064)
    assert (rank.hidden_size, rank.num_layers, rank.head_dim) == (4096, 32, 128)
    assert rank.shard_of == 4 and rank.whole == model
    assert model.shard(1) is model
    assert model.shard(16).num_kv_heads == 1
    assert rank.kv_bytes_per_token(2) == model.kv_bytes_per_token(2) // 4


def test_a_vocabulary_is_padded_to_64_then_split_rounding_up() -> None:
    model = ModelConfig.from_mapping(changed(LLAMA_8B, vocab_size=32001))
    assert model.shard(2).vocab_size == 32064 // 2
    odd = changed(LLAMA_8B, vocab_size=100, num_attention_heads=30, num_key_value_heads=6, head_dim=128)
    assert ModelConfig.from_mapping(changed(odd, intermediate_size=14337)).shard(3).vocab_size == 43


@pytest.mark.parametrize(
    ("n", "base", "key"),
    [
        (3, LLAMA_8B, "num_attention_heads"),
        (16, changed(LLAMA_8B, num_key_value_heads=32, num_attention_heads=96, head_dim=128, intermediate_size=16), ""),
        (6, changed(LLAMA_8B, num_attention_heads=24, num_key_value_heads=4, head_dim=128), "num_key_value_heads"),
        (8, changed(LLAMA_8B, intermediate_size=14340), "intermediate_size"),
    ],
)
def test_a_shard_that_does_not_divide_is_refused(n: int, base: dict[str, Any], key: str) -> None:
    model = ModelConfig.from_mapping(base)
    if not key:
        assert model.shard(n).num_kv_heads == 2
        return
    with pytest.raises(InputError, match=key):
        model.shard(n)


@pytest.mark.parametrize("n", [0, -2, True, 2.0, "2"])
def test_a_shard_is_a_whole_number(n: Any) -> None:
    with pytest.raises(InputError, match="shard is"):
        ModelConfig.from_mapping(LLAMA_8B).shard(n)


def test_a_shard_cannot_be_sharded_again() -> None:
    with pytest.raises(InputError, match="already"):
        ModelConfig.from_mapping(LLAMA_8B).shard(2).shard(2)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.sampled_from([2, 4]), st.integers(1, 500))
def test_ranks_together_are_the_whole_model(n: int, kv_groups: int, group: int, vocab: int) -> None:
    """n ranks hold every query head, kv head and inner column once, and every token at least once."""
    kv_heads = n * kv_groups
    model = ModelConfig.from_mapping(
        changed(
            QWEN3,
            num_key_value_heads=kv_heads,
            num_attention_heads=kv_heads * group,
            intermediate_size=n * 24,
            vocab_size=vocab,
        )
    )
    rank = model.shard(n)
    assert (rank.num_heads * n, rank.num_kv_heads * n) == (model.num_heads, model.num_kv_heads)
    assert rank.intermediate_size * n == model.intermediate_size
    assert 0 <= rank.vocab_size * n - vocab < 64 + n


# The published files themselves


@pytest.mark.field_data
def test_published_files_are_read_or_refused_by_name(field_data: Path) -> None:
    folder = field_data / "configs"
    refused = {"deepseek-v3": "kv_lora_rank", "mixtral-8x7b-v0.1": "num_local_experts", "qwen3-30b-a3b": "num_experts"}
    seen = set()
    for file in sorted(folder.glob("*.json")):
        if file.stem in refused:
            with pytest.raises(ModelNotSupported, match=f"{refused[file.stem]} = "):
                ModelConfig.from_path(file)
            seen.add(file.stem)
        else:
            assert ModelConfig.from_path(file).unknown_keys == ()
    assert seen == set(refused)
