"""Keys of a Hugging Face config.json: which are read, which say nothing about the computation, which forbid it.

A key that is not listed here could change the computation, and most that turn up do not (notes of training tools,
licences, dates). Refusing them all would refuse published models that are right; dropping them would hide the one
that matters. So there are three answers: listed as harmless, refused by name or pattern when in effect, and everything
else handed back as *unknown*, for callers to warn about.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# fmt: off
READ = frozenset(
    (
        "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
        "rope_scaling", "rope_parameters", "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias",
        "torch_dtype", "dtype", "sliding_window", "use_sliding_window", "layer_types",
    )
)

# Tokens, generation, training, bookkeeping. pretraining_tp only splits the same products; max_window_layers has no
# effect while use_sliding_window is off; chunk_size_feed_forward computes the same in pieces.
HARMLESS = frozenset(
    (
        "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "embd_pdrop", "resid_pdrop",
        "classifier_dropout", "initializer_range", "use_cache", "pretraining_tp", "max_window_layers",
        "transformers_version", "is_llama_config", "unsloth_version", "unsloth_fixed", "gradient_checkpointing",
        "use_return_dict", "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states",
        "output_scores", "torchscript", "tf_legacy_loss", "use_bfloat16", "problem_type", "id2label", "label2id",
        "num_labels", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix", "model_max_length",
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
        "mask_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
        "begin_suppress_tokens", "bad_words_ids", "max_length", "min_length", "max_new_tokens", "do_sample",
        "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
        "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty", "is_decoder",
        "tie_encoder_decoder", "chunk_size_feed_forward", "cross_attention_hidden_size", "license", "license_name",
        "language", "tags", "datasets", "model_name", "name",
    )
)
# fmt: on

# Refused unless the value is one that leaves the computation alone: null, false, 0, empty, or the value given here.
REFUSED: Mapping[str, Any] = {
    # layers that are not one dense attention and one dense MLP
    "moe_layer_freq": None,
    "first_k_dense_replace": None,
    "decoder_sparse_step": None,
    "mlp_only_layers": None,
    "block_configs": None,
    "num_nextn_predict_layers": None,
    "num_kv_shared_layers": None,
    "cla_share_factor": None,
    "use_parallel_residual": None,
    "parallel_attn": None,
    "add_cross_attention": None,
    "is_encoder_decoder": None,
    "pruned_heads": None,
    "hidden_activation": "silu",
    "activation_function": "silu",
    # attention that is not softmax(q k / sqrt(head_dim)) over the whole past
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "v_head_dim": None,
    "attention_chunk_size": None,
    "attn_temperature_tuning": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "qkv_clip": None,
    "attention_sinks": None,
    "attention_sink_size": None,
    "scale_attn_by_inverse_layer_idx": None,
    # norms and biases elsewhere than in the families built here
    "use_qk_norm": None,
    "qk_norm": None,
    "qk_layernorm": None,
    "use_post_norm": None,
    "post_norm": None,
    "norm_after": None,
    "bias": None,
    "use_bias": None,
    "qkv_bias": None,
    "attention_out_bias": None,
    "lm_head_bias": None,
    # positions
    "partial_rotary_factor": 1,
    "rotary_pct": 1,
    "rotary_dim": None,
    "rope_interleaved": None,
    "rope_interleave": None,
    "rope_ratio": 1,
    "rope_local_base_freq": None,
    "original_max_position_embeddings": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,
    "position_embedding_type": "rope",
    # scales
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "attention_multiplier": None,
    "logits_scaling": 1,
    "logit_scale": 1,
    "scale_emb": 1,
    "scale_depth": None,
    "dim_model_base": None,
    # stored in another form
    "quantization": None,
    "compression_config": None,
    # a model inside a model
    "text_config": None,
    "llm_config": None,
    "thinker_config": None,
    "language_config": None,
    "vision_config": None,
    "audio_config": None,
}

# Families of keys, so that next year's spelling of the same feature is caught too.
REFUSED_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(^|_)moe(_|$)",
        r"expert",
        r"lora_rank$",
        r"quantiz|^quant_|_quant$",
        r"sliding|window",
        r"softcap|soft_cap",
        r"mamba|(^|_)ssm(_|$)|linear_attn|linear_attention|linear_num_|conv_kernel|lightning",
        r"sparse_attention|index_topk|index_n_heads",
        r"alibi|mrope|nope",
        r"altup|laurel|per_layer_input",
    )
)


def without_effect(key: str, value: Any) -> bool:
    """True when ``value`` leaves the computation as it is: null, false, 0, empty, or the listed neutral value."""
    if value is None or value is False or value == 0 or value == "" or value == [] or value == {}:
        return True
    neutral = REFUSED.get(key)
    return neutral is not None and value == neutral


def refused_keys(mapping: Mapping[str, Any]) -> list[str]:
    """Keys in effect whose computation is not built here, in the order of the file."""
    return [
        key
        for key, value in mapping.items()
        if key not in READ
        and key not in HARMLESS
        and (key in REFUSED or any(pattern.search(key) for pattern in REFUSED_PATTERNS))
        and not without_effect(key, value)
    ]


def unknown_keys(mapping: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that no table knows, sorted; a leading underscore marks private notes of the library that wrote them."""
    return tuple(
        sorted(
            key
            for key in mapping
            if key not in READ
            and key not in HARMLESS
            and key not in REFUSED
            and not key.startswith("_")
            and not any(pattern.search(key) for pattern in REFUSED_PATTERNS)
        )
    )
