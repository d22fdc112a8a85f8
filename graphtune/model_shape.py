"""Sizes of a model that was not swept, from its config.json: dense, mixture of experts, latent attention, quantised.

Nothing here computes: only what decides bytes is read. A model whose attention or layers are of another kind is
refused by the key that says so, because a wrong weight count would be worse than none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from graphtune.config_file import Keys, read_json, shown
from graphtune.errors import ModelNotSupported

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DTYPE_OF_NONE = "bfloat16"

OTHER_LAYERS = (
    *("mamba_d_state", "ssm_cfg", "linear_conv_kernel_dim", "layers_block_type", "hybrid_override_pattern"),
    *("is_encoder_decoder", "text_config", "llm_config", "vision_config", "audio_config", "thinker_config"),
    *("index_topk", "kv_sharing", "num_kv_shared_layers", "block_configs"),
)
"""Keys of layers whose weights or cache are not counted here."""

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""Spellings of the number of experts in a layer."""


@dataclass(frozen=True)
class Latent:
    """Latent attention: the ranks that queries and keys are made through, and the parts of a head."""

    query_rank: int | None
    kv_rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class Experts:
    """Experts of a layer: ``count`` of ``width`` each, ``used`` per token, ``shared`` always; ``dense_layers`` have
    none."""

    count: int
    width: int
    used: int
    shared: int
    dense_layers: int


@dataclass(frozen=True)
class ModelShape:
    """What decides the bytes of a model. ``linear_bytes`` are those of one value of a linear layer, scales included,
    where these are quantised; embeddings, norms, routers and the LM head stay in ``dtype``."""

    model_type: str
    dtype: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool
    latent: Latent | None
    experts: Experts | None
    quantised: str | None
    linear_bytes: Fraction

    @property
    def width(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        of = self.latent
        if of is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        whole = self.heads * (of.nope + of.rope)
        query = self.hidden * whole if of.query_rank is None else (self.hidden + whole) * of.query_rank
        keys = self.hidden * (of.kv_rank + of.rope) + of.kv_rank * self.heads * (of.nope + of.value)
        return query + keys + self.heads * of.value * self.hidden

    @property
    def linear_parameters(self) -> int:
        """Of attention and MLPs of all layers, experts included, routers not."""
        dense = 3 * self.hidden * self.inner
        of = self.experts
        if of is None:
            return self.layers * (self.attention_parameters + dense)
        sparse = 3 * self.hidden * of.width * (of.count + of.shared)
        mlps = of.dense_layers * dense + (self.layers - of.dense_layers) * sparse
        return self.layers * self.attention_parameters + mlps

    @property
    def other_parameters(self) -> int:
        """Embedding, LM head, norms and routers."""
        routers = (self.layers - self.experts.dense_layers) * self.hidden * self.experts.count if self.experts else 0
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + (2 * self.layers + 1) * self.hidden + routers

    @property
    def parameters(self) -> int:
        return self.linear_parameters + self.other_parameters

    def weights_bytes(self, ranks: int = 1) -> int:
        """Of one rank; what tensor parallelism leaves whole (norms, latent projections) is under 1 % of a model."""
        whole = math.ceil(self.linear_parameters * self.linear_bytes) + self.other_parameters * self.width
        return math.ceil(whole / ranks)

    def kv_values_per_token(self, ranks: int = 1) -> int:
        """Values of one token in the cache of one rank: a latent vector is not split over ranks."""
        if self.latent is not None:
            return self.layers * (self.latent.kv_rank + self.latent.rope)
        return self.layers * 2 * self.head_dim * max(1, self.kv_heads // ranks)

    @property
    def inner_per_token(self) -> int:
        """Width of the MLP that a token goes through: of its experts together, or the dense one where that is wider."""
        of = self.experts
        if of is None:
            return self.inner
        sparse = of.width * (of.used + of.shared)
        return max(sparse, self.inner) if of.dense_layers else sparse


def read_model_shape(path: Path) -> ModelShape:
    """The shape of a config.json, or of the one in a folder. Raises InputError with file, line and key."""
    file = path / "config.json" if path.is_dir() else path
    mapping, text = read_json(file, missing="Name a Hugging Face config.json or a model folder that holds one.")
    return model_shape(Keys(mapping, str(file), text))


def model_shape(keys: Keys) -> ModelShape:
    """The same from keys at hand."""
    for key in OTHER_LAYERS:
        if keys.mapping.get(key):
            _refuse(keys, key)
    kinds = set(keys.words("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        _refuse(keys, "layer_types")
    heads = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    dtype = (keys.word("torch_dtype") or keys.word("dtype") or DTYPE_OF_NONE).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        keys.fail("torch_dtype", f"{shown(dtype)} is not known", f"Known: {', '.join(DTYPE_BYTES)}.")
    quantised, linear_bytes = _quantised(keys, Fraction(DTYPE_BYTES[dtype]))
    layers = keys.integer("num_hidden_layers")
    return ModelShape(
        model_type=keys.word("model_type") or "",
        dtype=dtype,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim", max(1, hidden // heads)),
        inner=keys.integer("intermediate_size"),
        vocabulary=keys.integer("vocab_size"),
        tied=keys.flag("tie_word_embeddings"),
        latent=_latent(keys),
        experts=_experts(keys, layers),
        quantised=quantised,
        linear_bytes=linear_bytes,
    )


def _refuse(keys: Keys, key: str) -> NoReturn:
    raise ModelNotSupported(
        f"layers of this kind are not counted here: {key} = {shown(keys.mapping[key])}",
        where=keys.place(key),
        action="State the weights with --weights for a swept model of the same KV cache.",
    )


def _latent(keys: Keys) -> Latent | None:
    if not keys.given("kv_lora_rank"):
        return None
    return Latent(
        query_rank=keys.integer("q_lora_rank") if keys.given("q_lora_rank") else None,
        kv_rank=keys.integer("kv_lora_rank"),
        rope=keys.integer("qk_rope_head_dim"),
        nope=keys.integer("qk_nope_head_dim"),
        value=keys.integer("v_head_dim"),
    )


def _experts(keys: Keys, layers: int) -> Experts | None:
    name = next((name for name in EXPERTS if keys.given(name) and keys.mapping[name] != 0), None)
    if name is None:
        return None
    width = keys.integer("moe_intermediate_size", keys.integer("intermediate_size"))
    step = keys.integer("decoder_sparse_step", 1)
    first = _count(keys, "first_k_dense_replace")
    listed = _numbers(keys, "mlp_only_layers")
    dense = [layer for layer in range(layers) if layer < first or layer in listed or (layer + 1) % step]
    shared = _count(keys, "n_shared_experts")
    if keys.given("shared_expert_intermediate_size"):
        shared = math.ceil(keys.integer("shared_expert_intermediate_size") / width)
    return Experts(
        count=keys.integer(name),
        width=width,
        used=keys.integer("num_experts_per_tok"),
        shared=shared,
        dense_layers=len(dense),
    )


def _count(keys: Keys, key: str) -> int:
    """A whole number; absent, null and 0 are none."""
    value = keys.mapping.get(key)
    return 0 if value in (None, 0) else keys.integer(key)


def _numbers(keys: Keys, key: str) -> tuple[int, ...]:
    """A list of whole numbers; absent or null is an empty one."""
    value = keys.mapping.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
        keys.fail(key, f"must be a list of whole numbers, not {shown(value)}")
    return tuple(value)


def _quantised(keys: Keys, plain: Fraction) -> tuple[str | None, Fraction]:
    """The method and the bytes of one value of a linear layer, its share of scales and zero points included."""
    section = keys.section("quantization_config")
    if not section.mapping:
        return None, plain
    method = section.word("quant_method") or ""
    if method == "fp8":
        values = math.prod(_numbers(section, "weight_block_size"))
        return method, 1 + (Fraction(4, values) if values > 1 else Fraction(0))
    of = section
    if method == "compressed-tensors":
        groups = section.section("config_groups")
        of = groups.section(next(iter(groups.mapping), "")).section("weights")
    names = {"awq": "bits", "gptq": "bits", "compressed-tensors": "num_bits"}
    if method not in names:
        known = "fp8, awq, gptq and compressed-tensors"
        section.fail("quant_method", f"{shown(method)} is not counted here", f"Counted: {known}.")
    size = Fraction(of.integer(names[method]), 8)
    group = of.mapping.get("group_size")
    if isinstance(group, int) and group > 0:
        # A 16-bit scale per group, and a zero point of as many bits as a value.
        size += (2 + size) / group
    return method, size
