"""A commented recipe for a model: nobody should have to write YAML by hand."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from graphtune.kv_pool import DTYPE_BYTES
from graphtune.model_config import ModelConfig
from graphtune.plan import STEP_TOKENS
from graphtune.recipe import config_file, model_name_of
from graphtune.units import format_bytes

DENSE_CONTEXT = 1024
OTHER_CONTEXTS = {
    512: (1, 4, 16, 32, 64, 128, 256),
    2048: (64, 128, 192, 256),
    4096: (1, 2, 4, 8, 16, 32, 64, 128),
    16384: (1, 2, 4, 8, 12, 16, 24, 32),
}


def recipe_text(model: Path, written_to: Path | None) -> str:
    """YAML for the model at ``model`` (a config.json or a folder). Its path is relative to ``written_to``'s folder.

    Raises InputError where there is no model or it is not supported.
    """
    file = config_file(model)
    config = ModelConfig.from_path(file)
    dtype = config.dtype or "bfloat16"
    weights = format_bytes(config.weights_bytes(DTYPE_BYTES[dtype]))
    load_note = "the folder holds safetensors" if any(file.parent.glob("*.safetensors")) else "no safetensors there now"
    model_name = model_name_of(file)
    return TEMPLATE.format(
        title=f"{model_name}: {config.num_layers} layers, hidden size {config.hidden_size}, {weights} of weights",
        name=re.sub(r"[^a-z0-9._-]", "-", model_name.lower()).strip("._-")[:80] or "model",
        model=json.dumps(_place(file, written_to)),
        load_note=load_note,
        dtype=dtype,
        contexts=_contexts(config.max_position_embeddings),
        batches=_batches(config.max_position_embeddings),
    )


def _place(file: Path, written_to: Path | None) -> str:
    """The model's path as the recipe names it: relative where the two lie close together."""
    if written_to is None:
        return str(file)
    whole = file.parent.resolve() / file.name
    near = os.path.relpath(whole, written_to.parent.resolve())
    return str(whole) if near.startswith(os.path.join("..", "..")) else near


def _contexts(positions: int) -> str:
    """The dense context and those beside it that the model has positions for."""
    dense = min(DENSE_CONTEXT, max(positions - STEP_TOKENS, 1))
    lines = [f"    - {dense}"]
    for tokens, sizes in OTHER_CONTEXTS.items():
        if tokens != dense and tokens + STEP_TOKENS <= positions:
            lines.append(f"    - {{tokens: {tokens}, sizes: [{', '.join(str(size) for size in sizes)}]}}")
    return "\n".join(lines)


def _batches(positions: int) -> str:
    """Several requests with prefixes, where the model has positions for them."""
    sizes = [size for size in (32, 128, 256, 512, 1024, 2048, 4096, 8192) if size // 4 + 512 <= positions]
    if not sizes:
        return "[]"
    listed = ", ".join(str(size) for size in sizes)
    return f"[{{requests: 4, prefix: 512, sizes: [{listed}]}}]  # beside one request without a prefix"


TEMPLATE = """\
# {title}
# Run it: graphtune sweep THIS_FILE --dry-run, then without --dry-run. Keys left out keep the defaults shown.
name: {name}
# A config.json or a model folder; a relative path starts at this file.
model: {model}
load: random                  # or safetensors ({load_note}); step times follow the shapes
dtype: {dtype}
seed: 0
shard: 1                      # N: the shapes of one rank of N, without collectives
phases: [decode, prefill]
attention: auto               # flashinfer on a GPU, sdpa on a CPU
page_size: 16                 # KV tokens per page: 1, 16 or 64; with 1 a step stages one index per token
kv_tokens: auto               # as many as the timed steps need and the device has room for
processes: 2                  # repeats in fresh processes; their difference is the noise

decode:
  # Capture lists, in requests. An engine's own default list for this device, optionally up to a size of your choice,
  # or your own: {{name: mine, sizes: [1, 2, 4, 8]}}. Step times are measured once, on the union of all lists.
  lists:
    - {{engine: sglang, max: 256}}
    - vllm
    - tensorrt_llm
    - powers_of_two
  backends: [eager, full]     # full: one CUDA graph per size; eager: what a size without a graph costs
  order: [descending, ascending]
  output: [shared, per_size]
  workspace: [shared, per_size]
  sharing: together           # product: every combination of output and workspace
  # KV tokens per request. A plain number times every size; {{tokens: N, sizes: [...]}} only those.
  contexts:
{contexts}
  profile_sizes: [1, 16, 64, 256]   # launches and idle share of an eager step

prefill:
  # The same for prefill; sizes are new tokens of a batch, of all its requests together.
  lists:
    - {{engine: sglang, max: 8192}}
  backends: [eager, breakable, full]  # breakable: attention runs between graphs; full: in them, experimental
  full_up_to: 2048            # above, launching is no part of the time and each takes long
  order: [descending]
  waste_cap: 2.0              # padded tokens per real one above which a prefill runs eager; none: no cap
  batches: {batches}
  profile_sizes: [64, 512]

measure:                      # sampling of each time stops at this relative noise, or after max_seconds
  min_samples: 7
  noise: 0.02
  max_seconds: 0.3

memory:                       # captures for memory alone: every size by itself, and random lists per sharing setting,
  fit: 4                      # by which predictions of other lists are checked,
  held_out: 8                 # and which are kept back, so that their error is that of a prediction

limits:
  cell_timeout_s: 1800        # a process that takes longer is stopped and stored as a time-out
"""
