"""ModelConfig: the shapes and switches of a dense decoder, read from an unmodified Hugging Face config.json.

Built: Llama 2 and 3.x, Mistral without a sliding window, Qwen2 / Qwen2.5, Qwen3 dense. Anything that would change the
computation and is not built raises ModelNotSupported with the key and its value. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from graphtune.config_file import Keys, read_json, shown
from graphtune.errors import InputError, ModelNotSupported
from graphtune.model_keys import refused_keys, unknown_keys

# Engines pad the vocabulary to a multiple of this before they split it over ranks.
VOCAB_PADDING = 64
ROPE_CACHE_BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class Family:
    """What a model type fixes beyond its keys. ``None`` for a bias means that the key of config.json decides."""

    architecture: str
    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    head_dim: int | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", qkv_bias=None, o_bias=None, mlp_bias=None, qk_norm=False),
    "mistral": Family("MistralForCausalLM", qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False),
    # 128 is what transformers takes for a Qwen3 file without head_dim; the other families derive it.
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=None, o_bias=None, mlp_bias=False, qk_norm=True, head_dim=128),
}
DTYPES = ("bfloat16", "float16", "float32")
# What transformers takes for all four families when the file does not say.
DEFAULT_ROPE_THETA = 10000.0
ROPE_READ = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    )
)


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling: long wavelengths stretched by ``factor``, short ones kept, a blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder. Frozen; sizes are those of one rank when ``shard_of`` is above 1.

    ``rope_scaling`` is None for plain rope. ``dtype`` is the published one (bfloat16, float16, float32) or None.
    ``unknown_keys`` are keys of the file that no table of model_keys knows: they are probably notes, so they do not
    stop anything, and they might not be, so callers warn about them. ``whole`` is the unsharded model of a shard.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str | None = None
    unknown_keys: tuple[str, ...] = ()
    shard_of: int = 1
    whole: ModelConfig | None = None

    @classmethod
    def from_path(cls, path: str | Path) -> ModelConfig:
        """Read a config.json, or the one in a folder. Raises InputError with file, line and key."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        mapping, text = read_json(file, missing="Name a Hugging Face config.json or a model folder that holds one.")
        return _parse(Keys(mapping, str(file), text))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
        """The same from the parsed content; ``where`` names its source in errors. Raises InputError only."""
        return _parse(Keys(mapping, where))

    @property
    def q_size(self) -> int:
        """Width of the query projection: heads × head size."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or value) projection: kv heads × head size."""
        return self.num_kv_heads * self.head_dim

    def parameter_count(self) -> int:
        """Parameters, counted per matrix: embedding (twice when untied), layers, final norm.

        A layer is qkv (q + 2 kv rows of hidden), o, gate, up and down, two norms, q/k norms and biases where present.
        Equals the count of the published checkpoint for ``shard_of`` 1; for a shard it is one rank's.
        """
        hidden, inner, qkv = self.hidden_size, self.intermediate_size, self.q_size + 2 * self.kv_size
        layer = qkv * hidden + hidden * self.q_size + 3 * inner * hidden + 2 * hidden
        layer += qkv * self.qkv_bias + hidden * self.o_bias + (2 * inner + hidden) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + hidden

    def weights_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the parameters at ``dtype_bytes`` each (2 for bfloat16); the rope cache is not a weight."""
        return self.parameter_count() * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """KV cache bytes of one token: 2 (key and value) × kv heads × head size × layers × bytes per value."""
        return 2 * self.kv_size * self.num_layers * dtype_bytes

    def rope_cache_bytes(self) -> int:
        """Bytes of the cos/sin table: one fp32 row of head_dim values (cos half, sin half) per position."""
        return self.max_position_embeddings * self.head_dim * ROPE_CACHE_BYTES_PER_VALUE

    def shard(self, n: int) -> ModelConfig:
        """Shapes of rank 0 of ``n`` under tensor parallelism, collectives absent.

        Query heads and the intermediate size divide by ``n``. KV heads divide too, or each rank keeps one copy when
        there are fewer than ranks. The vocabulary is padded to a multiple of 64 and then split, rounding up, as the
        engines do. Hidden size, norms and layer count stay. Raises InputError where a size does not divide.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InputError(f"shard is {n!r}; it must be a whole number of ranks, 1 or more")
        if self.shard_of != 1:
            what = f"these are already the shapes of one rank of {self.shard_of}"
            raise InputError(what, action="Shard the whole model.")
        if n == 1:
            return self
        ranks_split = self.num_kv_heads % n == 0 or n % self.num_kv_heads == 0
        for name, size, divides in (
            ("num_attention_heads", self.num_heads, self.num_heads % n == 0),
            ("num_key_value_heads", self.num_kv_heads, ranks_split),
            ("intermediate_size", self.intermediate_size, self.intermediate_size % n == 0),
        ):
            if not divides:
                raise InputError(
                    f"{name} = {size} cannot be split over {n} ranks",
                    action=f"Choose a shard that divides {size}.",
                )
        padded = -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        return replace(
            self,
            num_heads=self.num_heads // n,
            num_kv_heads=max(1, self.num_kv_heads // n),
            intermediate_size=self.intermediate_size // n,
            vocab_size=-(-padded // n),
            shard_of=n,
            whole=self,
        )


def _parse(keys: Keys) -> ModelConfig:
    model_type = _model_type(keys)
    family = FAMILIES[model_type]
    _refuse_unbuilt(keys, model_type)
    heads = keys.integer("num_attention_heads")
    # Only the first Llama files leave this out; elsewhere an absent key is a file cut short.
    kv_default = heads if model_type == "llama" or "num_key_value_heads" in keys.mapping else None
    kv_heads = keys.integer("num_key_value_heads", kv_default)
    if heads % kv_heads:
        keys.fail("num_key_value_heads", f"num_attention_heads = {heads} is not a multiple of {kv_heads}")
    hidden = keys.integer("hidden_size")
    if family.head_dim is None and not keys.given("head_dim") and hidden % heads:
        keys.fail("hidden_size", f"{hidden} is not a multiple of num_attention_heads = {heads}, and head_dim is absent")
    head_dim = keys.integer("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        keys.fail("head_dim", f"{head_dim} is odd; rope turns pairs of values")
    layers = keys.integer("num_hidden_layers")
    kinds = keys.words("layer_types")
    if kinds is not None and len(kinds) != layers:
        keys.fail("layer_types", f"names {len(kinds)} layers, num_hidden_layers = {layers}")
    rope_theta, rope_scaling, rope_unknown = _rope(keys)
    attention_bias = keys.flag("attention_bias")
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=keys.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        dtype=_dtype(keys),
        unknown_keys=tuple(sorted((*unknown_keys(keys.mapping), *rope_unknown))),
    )


def _model_type(keys: Keys) -> str:
    """The family, from ``architectures`` and ``model_type``; either may be absent, both must agree."""
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    named, model_type = keys.words("architectures"), keys.word("model_type")
    wrong: dict[str, Any] = {}
    if named and (len(named) != 1 or named[0] not in by_architecture):
        wrong["architectures"] = named
    if model_type is not None and model_type not in FAMILIES:
        wrong["model_type"] = model_type
    if wrong:
        _refuse(keys, {**wrong, **{key: keys.mapping[key] for key in refused_keys(keys.mapping)}})
    by_name = by_architecture[named[0]] if named else model_type
    if by_name is None:
        keys.fail("model_type", "is missing, and so is architectures", "One of the two must name the model.")
    if model_type not in (None, by_name):
        keys.fail("model_type", f"{shown(model_type)} does not go with architectures = {shown(named)}")
    return by_name


def _refuse(keys: Keys, found: Mapping[str, Any]) -> NoReturn:
    listed = ", ".join(f"{key} = {shown(value)}" for key, value in found.items())
    raise ModelNotSupported(
        f"this model computes something that is not built here: {listed}",
        where=keys.place(next(iter(found))),
        action=f"Built: dense models of type {', '.join(sorted(FAMILIES))}, unquantised, with full attention.",
    )


def _refuse_unbuilt(keys: Keys, model_type: str) -> None:
    """ModelNotSupported for every key in effect that changes the computation and is not built."""
    mapping, family = keys.mapping, FAMILIES[model_type]
    found = {key: mapping[key] for key in refused_keys(mapping)}
    if keys.word("hidden_act") not in (None, "silu", "swish"):
        found["hidden_act"] = mapping["hidden_act"]
    if keys.flag("use_sliding_window"):
        found["use_sliding_window"] = True
    if set(keys.words("layer_types") or ()) - {"full_attention"}:
        found["layer_types"] = sorted(set(mapping["layer_types"]))
    # Qwen files keep a window that use_sliding_window turns off. A Mistral file without the key means 4096.
    if model_type in ("llama", "mistral") and keys.given("sliding_window"):
        found["sliding_window"] = mapping["sliding_window"]
    if model_type == "mistral" and "sliding_window" not in mapping:
        found["sliding_window"] = "absent: 4096 for Mistral, and null turns it off"
    if family.qkv_bias is not None and keys.given("attention_bias") and keys.flag("attention_bias") != family.qkv_bias:
        found["attention_bias"] = mapping["attention_bias"]
    if family.mlp_bias is not None and keys.flag("mlp_bias") != family.mlp_bias:
        found["mlp_bias"] = mapping["mlp_bias"]
    for section in ("rope_scaling", "rope_parameters"):
        rope = keys.section(section)
        kind = _rope_type(rope)
        if kind not in ("default", "llama3"):
            found[f"{section}.rope_type"] = kind
        others = {key: value for key, value in rope.mapping.items() if key not in ROPE_READ}
        nested = [key for key, value in others.items() if isinstance(value, Mapping)]
        found.update({f"{section}.{key}": others[key] for key in (*refused_keys(others), *nested)})
    if found:
        _refuse(keys, found)


def _rope_type(rope: Keys) -> str:
    """``rope_type`` or its old spelling ``type``; both must agree. Plain rope is ``default``."""
    new, old = rope.word("rope_type"), rope.word("type")
    if new is not None and old is not None and new != old:
        rope.fail("rope_type", f"{shown(new)} contradicts type = {shown(old)}")
    return new or old or "default"


def _rope(keys: Keys) -> tuple[float, Llama3Rope | None, list[str]]:
    """theta, scaling and unknown keys, from rope_theta + rope_scaling (old) or rope_parameters (new spelling)."""
    old, new = keys.section("rope_scaling"), keys.section("rope_parameters")
    if old.mapping and new.mapping:
        keys.fail("rope_scaling", "is given together with rope_parameters", "Keep one of the two spellings.")
    rope = new if new.mapping else old
    outer = keys.number("rope_theta", DEFAULT_ROPE_THETA)
    theta = rope.number("rope_theta", outer)
    if keys.given("rope_theta") and theta != outer:
        rope.fail("rope_theta", f"{theta:g} contradicts rope_theta = {outer:g} outside")
    read, scaling = {"rope_type", "type", "rope_theta"}, None
    if _rope_type(rope) == "llama3":
        read = set(ROPE_READ)
        scaling = Llama3Rope(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            rope.fail("low_freq_factor", f"must be below high_freq_factor = {scaling.high_freq_factor:g}")
    unread = [key for key in rope.mapping if key not in read]
    return theta, scaling, [rope.prefix + key for key in unread if key in ROPE_READ or unknown_keys({key: None})]


def _dtype(keys: Keys) -> str | None:
    """The published dtype under its old (torch_dtype) or new (dtype) key."""
    old, new = keys.word("torch_dtype"), keys.word("dtype")
    if old and new and old != new:
        keys.fail("dtype", f"{shown(new)} contradicts torch_dtype = {shown(old)}")
    dtype = (new or old or "").removeprefix("torch.")
    if dtype and dtype not in DTYPES:
        _refuse(keys, {"dtype" if new else "torch_dtype": dtype})
    return dtype or None
