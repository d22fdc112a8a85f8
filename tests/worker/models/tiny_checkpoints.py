"""Tiny random checkpoints written by transformers, and a plain attention that keeps keys and values in lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from graphtune.worker.models.decoder import Decoder

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN3 = {**SHAPE, "head_dim": 20}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {**SHAPE, "num_key_value_heads": 4}),
    "llama3.1": ("Llama", {**SHAPE, "rope_scaling": LLAMA3_ROPE}),
    "llama_biased": ("Llama", {**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("Llama", {**SHAPE, "tie_word_embeddings": True, "head_dim": 16}),
    "mistral": ("Mistral", {**SHAPE, "sliding_window": None, "head_dim": 8}),
    "qwen2_tied": ("Qwen2", {**SHAPE, "tie_word_embeddings": True}),
    "qwen3_tied": ("Qwen3", {**QWEN3, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", QWEN3),
    "qwen3_biased": ("Qwen3", {**QWEN3, "attention_bias": True}),
}


class DenseAttention:
    """Causal attention of packed tokens: ``rows[i]`` is the sequence of token i, its past kept per layer."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.past: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads, group, out = q.shape[1], q.shape[1] // k.shape[1], []
        for token, row in enumerate(self.rows):
            past = self.past.setdefault((layer, row), [])
            past.append((k[token].clone(), v[token].clone()))
            keys = torch.stack([key for key, _ in past], 1).repeat_interleave(group, 0)
            values = torch.stack([value for _, value in past], 1).repeat_interleave(group, 0)
            scores = (keys @ q[token].unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
            out.append((scores.softmax(-1).unsqueeze(1) @ values).reshape(heads * q.shape[-1]))
        return torch.stack(out)


def save_checkpoint(name: str, folder: Path, **saving: Any) -> transformers.PreTrainedModel:
    """Write a checkpoint whose every value matters: norms differ from 1, biases from 0, logits from each other."""
    family, keys = CHECKPOINTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**keys, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if "norm" in tensor_name:
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() == 1:
                tensor.normal_(0, 0.3)
            else:
                tensor.normal_(0, tensor.shape[1] ** -0.5)
    model.save_pretrained(folder, safe_serialization=True, **saving)
    return model


def all_logits(decoder: Decoder, sequences: list[list[int]], prefill: list[int]) -> list[torch.Tensor]:
    """Logits of every position of every sequence: one packed prefill, then decode steps of one token each."""
    attend = DenseAttention()
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while any(count < len(tokens) for count, tokens in zip(done, sequences, strict=True)):
        ids, positions, rows = [], [], []
        for row, tokens in enumerate(sequences):
            stop = done[row] + (1 if done[row] else prefill[row])
            ids += tokens[done[row] : stop]
            positions += range(done[row], min(stop, len(tokens)))
            rows += [row] * len(tokens[done[row] : stop])
            done[row] = min(stop, len(tokens))
        attend.rows = rows
        # Both widths of index are allowed; servers use int64 for positions.
        step = decoder.forward(torch.tensor(ids, dtype=torch.int32), torch.tensor(positions), attend)
        for row, line in zip(rows, step, strict=True):
            logits[row].append(line)
    return [torch.stack(lines) for lines in logits]
