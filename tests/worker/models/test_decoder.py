"""The decoder against Hugging Face transformers, and what a recording may rely on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import CHECKPOINTS, SHAPE, DenseAttention, all_logits, save_checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphtune.model_config import ModelConfig
from graphtune.worker.models.decoder import Decoder

CPU = torch.device("cpu")
SEQUENCES = [
    torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (44, 9)
]


def load(folder: Path, **changes: Any) -> Decoder:
    config = dataclasses.replace(ModelConfig.from_path(folder), **changes)
    return Decoder.from_safetensors(config, folder, dtype=torch.float32, device=CPU)


def random_decoder(dtype: torch.dtype = torch.float32, seed: int = 0, **keys: Any) -> Decoder:
    mapping = {"model_type": "qwen3", **SHAPE, "head_dim": 16, **keys}
    return Decoder(ModelConfig.from_mapping(mapping), dtype=dtype, device=CPU, seed=seed)


def reference(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0] for tokens in sequences]


def relative_error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    a, b = torch.cat(found), torch.cat(wanted)
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    """Prefill of two sequences of different lengths, then four decode steps, every position compared."""
    model = save_checkpoint(name, tmp_path)
    wanted = reference(model, SEQUENCES)
    found = all_logits(load(tmp_path), SEQUENCES, prefill=[40, 5])
    assert relative_error(found, wanted) <= 1e-5
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama3.1", {"rope_scaling": None}),
        ("llama2", {"rope_theta": 9000.0}),
        ("llama2", {"rms_norm_eps": 1e-2}),
    ],
)
def test_the_comparison_sees_a_wrong_switch(name: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    model = save_checkpoint(name, tmp_path)
    found = all_logits(load(tmp_path, **wrong), SEQUENCES, prefill=[40, 5])
    assert relative_error(found, reference(model, SEQUENCES)) > 1e-3


def test_logits_rows_are_those_rows() -> None:
    decoder, rows = random_decoder(), torch.tensor([4, 1])
    ids, positions = torch.tensor([3, 9, 27, 81, 5]), torch.arange(5)
    logits = []
    for chosen in (None, rows):
        attend = DenseAttention()
        attend.rows = [0] * 5
        logits.append(decoder.forward(ids, positions, attend, chosen))
    assert logits[1].shape == (2, 96)
    torch.testing.assert_close(logits[1], logits[0][rows])


def test_bfloat16_is_near_float32() -> None:
    """The 16-bit path rounds where servers round: between kernels, not inside norms and rope."""
    exact, rounded = random_decoder(), random_decoder(torch.bfloat16)
    for name, tensor in exact.named_tensors().items():
        if name != "rope.cos_sin":
            tensor.mul_(10 if "norm" not in name else 1)
            rounded.named_tensors()[name].copy_(tensor)
            tensor.copy_(rounded.named_tensors()[name])
    found = all_logits(rounded, SEQUENCES, prefill=[40, 5])
    assert found[0].dtype == torch.bfloat16
    assert relative_error([lines.float() for lines in found], all_logits(exact, SEQUENCES, prefill=[40, 5])) <= 3e-2


# Random weights


def test_random_weights_are_seeded_and_have_the_right_spread() -> None:
    first, again, other = random_decoder(), random_decoder(), random_decoder(seed=1)
    for name, tensor in first.named_tensors().items():
        assert torch.equal(tensor, again.named_tensors()[name])
        if name.endswith("_norm"):
            assert bool((tensor == 1).all())
        elif name != "rope.cos_sin":
            assert not torch.equal(tensor, other.named_tensors()[name])
            residual = name.endswith((".o", ".down"))
            want = 1.0 if name == "embedding" else 0.02 / (2 * first.config.num_layers) if residual else 0.02
            assert 0.85 * want < float(tensor.std()) < 1.15 * want


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_equal_the_arithmetic_of_the_config(name: str, ranks: int, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    config = ModelConfig.from_path(tmp_path).shard(ranks)
    for dtype in (torch.float32, torch.bfloat16):
        decoder = Decoder(config, dtype=dtype, device=CPU, seed=0)
        assert decoder.weights_bytes == config.weights_bytes(dtype.itemsize)
        assert decoder.rope_cache_bytes == config.rope_cache_bytes()
        total = sum(tensor.nbytes for tensor in decoder.named_tensors().values())
        assert total == decoder.weights_bytes + decoder.rope_cache_bytes


def test_there_is_no_second_copy_of_a_weight() -> None:
    """Every tensor that a forward reads shares storage with a named one."""
    decoder = random_decoder(tie_word_embeddings=True)
    owners = {tensor.untyped_storage().data_ptr() for tensor in decoder.named_tensors().values()}
    read = [decoder._embedding, decoder._lm_head, decoder._first_norm, decoder._cos_sin]
    read += [tensor for layer in decoder._layers for tensor in layer if tensor is not None]
    assert {tensor.untyped_storage().data_ptr() for tensor in read} == owners


def test_a_shard_runs_with_one_ranks_shapes() -> None:
    config = random_decoder().config.shard(2)
    decoder = Decoder(config, dtype=torch.float32, device=CPU, seed=0)
    shapes: list[tuple[int, ...]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shapes.append((*q.shape, *k.shape, *v.shape))
        return q.reshape(len(q), -1)

    logits = decoder.forward(torch.tensor([1, 2, 3]) % config.vocab_size, torch.arange(3), attend)
    assert shapes == [(3, 2, 16, 3, 1, 16, 3, 1, 16)] * 3
    assert logits.shape == (3, 64)


# What a recording relies on


class _NoHostReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        forbidden = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        assert not forbidden, f"{func} depends on values"
        assert "lift_fresh" not in str(func), "a constant is made inside the forward"
        return func(*args, **(kwargs or {}))


class _NoConversions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in {"tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__index__", "__float__"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_forward_reads_nothing_on_the_host(mode: Any, index: torch.dtype) -> None:
    decoder = random_decoder(attention_bias=True)
    ids, positions = torch.tensor([3, 9], dtype=index), torch.tensor([0, 7], dtype=index)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.reshape(2, -1)

    plain = decoder.forward(ids, positions, attend)
    with mode(), _NoHostReads(), _NoConversions():
        recorded = decoder.forward(ids, positions, attend)
    assert torch.equal(plain, recorded)


def test_a_forward_writes_to_no_weight_and_makes_nothing_that_stays() -> None:
    decoder = random_decoder()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in decoder.named_tensors().items()}
    with torch.inference_mode():
        decoder.forward(torch.tensor([1]), torch.tensor([63]), lambda layer, q, k, v: q.reshape(1, -1))
    for name, tensor in decoder.named_tensors().items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1])


def test_weights_made_under_inference_mode_are_ordinary_tensors() -> None:
    with torch.inference_mode():
        decoder = random_decoder()
    assert not any(tensor.is_inference() for tensor in decoder.named_tensors().values())


def test_attend_may_return_and_receive_strided_views() -> None:
    """q, k and v are views of one projection: keys sit between queries and values of the same token."""
    decoder = random_decoder()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert q.stride() == k.stride() == v.stride() == (8 * 16, 16, 1)
        return q.new_zeros((2, 128))[:, :64]

    assert decoder.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), attend).isfinite().all()
