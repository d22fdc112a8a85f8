"""Weights in the merged layout the decoder runs on: allocate, fill at random, or copy from safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from graphtune.config_file import Keys, read_json
from graphtune.errors import InputError
from graphtune.model_config import ModelConfig

INIT_STD = 0.02
EMBEDDING_STD = 1.0
COPY_CHUNK_BYTES = 64 << 20
STORED_DTYPES = ("BF16", "F16", "F32", "F64")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ROPE_TABLE = ".rotary_emb.inv_freq"
NAMES_SHOWN = 8


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint and where rank 0's share of it goes.

    ``shape`` is that of the whole model; the leading ``taken`` of it fill ``target`` from row ``row`` on.
    """

    source: str
    shape: tuple[int, ...]
    taken: tuple[int, ...]
    target: str
    row: int = 0


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder by name: query, key and value rows merged, gate and up rows merged."""
    hidden, inner, qkv = config.hidden_size, config.intermediate_size, config.q_size + 2 * config.kv_size
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        own: dict[str, tuple[int, ...] | None] = {
            "input_norm": (hidden,),
            "qkv": (qkv, hidden),
            "qkv_bias": (qkv,) if config.qkv_bias else None,
            "q_norm": (config.head_dim,) if config.qk_norm else None,
            "k_norm": (config.head_dim,) if config.qk_norm else None,
            "o": (hidden, config.q_size),
            "o_bias": (hidden,) if config.o_bias else None,
            "post_norm": (hidden,),
            "gate_up": (2 * inner, hidden),
            "gate_up_bias": (2 * inner,) if config.mlp_bias else None,
            "down": (hidden, inner),
            "down_bias": (hidden,) if config.mlp_bias else None,
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items() if shape is not None}
    shapes["final_norm"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


def allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Uninitialised tensors of ``weight_shapes``."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in weight_shapes(config).items()}


def fill_random(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Norms are one, everything else is normal, in place, in the order of the names.

    Standard deviations are 0.02, 1 for the embedding, and 0.02 / (2 · layers) for the two products of a layer that are
    added to the residual. With 0.02 throughout, every layer replaces most of the residual and amplifies rounding: two
    kernels for the same bf16 product then part by 3.6e-2 at the logits of 32 layers, more than trained weights do, and
    a tolerance on that difference would test the initialisation.
    """
    device = next(iter(tensors.values())).device
    layers = sum(name.endswith(".down") for name in tensors)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("_norm"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, _std(name, layers), generator=generator)


def _std(name: str, layers: int) -> float:
    if name == "embedding":
        return EMBEDDING_STD
    return INIT_STD / (2 * layers) if name.endswith((".o", ".down")) else INIT_STD


def parts(config: ModelConfig) -> Iterator[Part]:
    """How a Hugging Face checkpoint of the whole model fills the tensors of ``config``, which may be rank 0 of a shard.

    Rank 0 takes the leading rows (heads, inner columns, tokens) of everything that is split, and keeps the biases of
    the two row-parallel products, which one rank adds.
    """
    whole = config.whole or config
    hidden, rows = config.hidden_size, min(config.vocab_size, whole.vocab_size)

    def linear(
        name: str, target: str, out: tuple[int, int], inner: tuple[int, int], bias: bool, row: int = 0
    ) -> Iterator[Part]:
        """``out`` and ``inner`` are (whole, taken) sizes of a product's rows and columns."""
        yield Part(f"{name}.weight", (out[0], inner[0]), (out[1], inner[1]), target, row)
        if bias:
            yield Part(f"{name}.bias", (out[0],), (out[1],), f"{target}_bias", row)

    full, q = (hidden, hidden), (whole.q_size, config.q_size)
    kv, inner = (whole.kv_size, config.kv_size), (whole.intermediate_size, config.intermediate_size)
    yield Part("model.embed_tokens.weight", (whole.vocab_size, hidden), (rows, hidden), "embedding")
    for layer in range(config.num_layers):
        source, target = f"model.layers.{layer}", f"layers.{layer}"
        attention, mlp, bias = f"{source}.self_attn", f"{source}.mlp", config.qkv_bias
        yield Part(f"{source}.input_layernorm.weight", (hidden,), (hidden,), f"{target}.input_norm")
        yield from linear(f"{attention}.q_proj", f"{target}.qkv", q, full, bias)
        yield from linear(f"{attention}.k_proj", f"{target}.qkv", kv, full, bias, row=config.q_size)
        yield from linear(f"{attention}.v_proj", f"{target}.qkv", kv, full, bias, row=config.q_size + config.kv_size)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                head = (config.head_dim,)
                yield Part(f"{attention}.{name}.weight", head, head, f"{target}.{name}")
        yield from linear(f"{attention}.o_proj", f"{target}.o", full, q, config.o_bias)
        yield Part(f"{source}.post_attention_layernorm.weight", (hidden,), (hidden,), f"{target}.post_norm")
        yield from linear(f"{mlp}.gate_proj", f"{target}.gate_up", inner, full, config.mlp_bias)
        yield from linear(f"{mlp}.up_proj", f"{target}.gate_up", inner, full, config.mlp_bias, row=inner[1])
        yield from linear(f"{mlp}.down_proj", f"{target}.down", full, inner, config.mlp_bias)
    yield Part("model.norm.weight", (hidden,), (hidden,), "final_norm")
    if not config.tie_word_embeddings:
        yield Part("lm_head.weight", (whole.vocab_size, hidden), (rows, hidden), "lm_head")


class Checkpoint:
    """The safetensors of a folder, checked as a whole against a ModelConfig before anything is copied.

    Opening raises one InputError that names every missing, unexpected, wrongly shaped or oddly stored tensor.
    ``model.safetensors`` is taken before an index, as transformers does. Rotary tables that old files carry are not
    weights and are left out; an LM head in a tied model must equal the embedding.
    """

    def __init__(self, folder: str | Path, config: ModelConfig, stack: ExitStack) -> None:
        self.folder = Path(folder)
        self.config = config
        self.parts = tuple(parts(config))
        self._tensors: dict[str, Any] = {}
        twice = []
        for file in self._files():
            try:
                handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise InputError(f"is not a usable safetensors file: {error}", where=str(file)) from error
            twice += [name for name in names if name in self._tensors]
            self._tensors |= {
                name: handle.get_slice(name) for name in names if not name.endswith(".rotary_emb.inv_freq")
            }
        self._check(twice)

    def copy_into(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy every part to its rows, at most 64 MiB at a time; rows of a padded vocabulary beyond the end are 0."""
        for part in self.parts:
            source, target = self._tensors[part.source], tensors[part.target]
            for start, stop in _row_chunks(part.taken, target.element_size()):
                piece = source[start:stop] if len(part.taken) == 1 else source[start:stop, : part.taken[1]]
                target[part.row + start : part.row + stop].copy_(piece)
            if part.target in ("embedding", "lm_head"):
                target[part.taken[0] :].zero_()

    def _files(self) -> list[Path]:
        single, index = self.folder / SINGLE_FILE, self.folder / INDEX_FILE
        if single.is_file():
            return [single]
        if not index.is_file():
            action = "Point to the folder of a downloaded model, or use random weights."
            raise InputError(f"holds neither {SINGLE_FILE} nor {INDEX_FILE}", where=str(self.folder), action=action)
        content, text = read_json(index, missing="")
        keys = Keys(content, str(index), text)
        listed = keys.section("weight_map")
        if not listed.mapping:
            keys.fail("weight_map", "names no tensor")
        names = {name: listed.word(name) or "" for name in listed.mapping}
        files = sorted(set(names.values()))
        for file in files:
            if Path(file).name != file or not (self.folder / file).is_file():
                keys.fail("weight_map", f"names {file!r}, which is not a file beside the index")
        return [self.folder / file for file in files]

    def _check(self, twice: list[str]) -> None:
        wanted = {part.source: part for part in self.parts}
        shapes = {name: tuple(tensor.get_shape()) for name, tensor in self._tensors.items()}
        extra = set(shapes) - set(wanted)
        if self.config.tie_word_embeddings and "lm_head.weight" in extra:
            extra -= {"lm_head.weight"} if self._head_is_the_embedding() else set()
        both = sorted(set(wanted) & set(shapes))
        faults = {
            "missing": sorted(set(wanted) - set(shapes)),
            "unexpected": sorted(extra),
            "in two files": sorted(twice),
            "of another shape": [
                f"{name} {shapes[name]}, expected {wanted[name].shape}"
                for name in both
                if shapes[name] != wanted[name].shape
            ],
            "stored in a form that is not built": [
                f"{name} {self._tensors[name].get_dtype()}"
                for name in both
                if self._tensors[name].get_dtype() not in STORED_DTYPES
            ],
        }
        told = [f"{what}: {_listed(names)}" for what, names in faults.items() if names]
        if told:
            raise InputError(
                f"the tensors do not fit the model; {'; '.join(told)}",
                where=str(self.folder),
                action="Use the weights that belong to this config.json.",
            )

    def _head_is_the_embedding(self) -> bool:
        head, embedding = self._tensors["lm_head.weight"], self._tensors.get("model.embed_tokens.weight")
        if embedding is None or head.get_shape() != embedding.get_shape() or head.get_dtype() != embedding.get_dtype():
            return False
        chunks = _row_chunks(tuple(head.get_shape()), 4)
        return all(torch.equal(head[start:stop], embedding[start:stop]) for start, stop in chunks)


def _row_chunks(shape: tuple[int, ...], element_size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) row ranges of at most COPY_CHUNK_BYTES each."""
    row_bytes = element_size * (shape[1] if len(shape) == 2 else 1)
    step = max(1, COPY_CHUNK_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
