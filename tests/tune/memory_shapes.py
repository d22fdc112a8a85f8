"""Decode forwards of two models by shapes, and the growth of a pool read on an H200."""

from __future__ import annotations

from graphtune.config_file import Keys
from graphtune.model_shape import ModelShape, model_shape
from graphtune.results import AllocationTrace
from graphtune.tune.block_pool import BlockPool
from graphtune.tune.memory_only import decode_trace
from tests.synthetic import LLAMA_8B as LLAMA_8B_CONFIG

QWEN_06B_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_8B = model_shape(Keys(LLAMA_8B_CONFIG, "config.json"))
QWEN_06B = model_shape(Keys(QWEN_06B_CONFIG, "config.json"))

SGLANG = (1, 2, 4, 8, 12, 16, 24, 32, *range(40, 257, 8))
GROWTH_PER_SIZE_ASCENDING = [
    *(22, 0, 0, 2, 0, 0, 0, 20, 0, 12, 14, 18, 18, 20, 42, 24, 26, 28),
    *(30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 82, 64),
]


def trace(shape: ModelShape, size: int, *, hold_output: bool) -> AllocationTrace:
    return decode_trace(shape, 1, size, hold_output=hold_output)


def capture(pool: BlockPool, shape: ModelShape, size: int, *, first: bool, hold_output: bool) -> None:
    """Play one size into ``pool`` as a capture would."""
    of = trace(shape, size, hold_output=hold_output)
    if first:
        pool.free(pool.allocate(of.room_bytes))
    pool.play(of.pool)
