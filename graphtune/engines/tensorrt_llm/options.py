"""TensorRT-LLM's settings: nested YAML, with a few flags of the server command over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphtune.engines.base import Serving
from graphtune.engines.launch import Launch, Option
from graphtune.engines.options import Reading, Spec, read_options

TABLE: dict[str, Spec] = {
    "--max-batch-size": Spec("int"),
    "--max-num-tokens": Spec("int"),
    "--max-seq-len": Spec("int"),
    "--tp-size": Spec("int", "tp"),
    "--tensor-parallel-size": Spec("int", "tp"),
    "--pp-size": Spec("int", "pp"),
    "--kv-cache-free-gpu-memory-fraction": Spec("float"),
    "--free-gpu-memory-fraction": Spec("float", "kv_cache_free_gpu_memory_fraction"),
    "--backend": Spec("text"),
}
GRAPH_KEYS = frozenset(
    {
        "enable_padding",
        "max_batch_size",
        "batch_sizes",
        "mode",
        "num_tokens",
        "max_num_token",
        "seq_lens",
        "max_seq_len",
    }
)
ENCODE_KEYS = frozenset({"num_tokens", "max_num_token", "seq_lens", "max_seq_len"})
PREFILL_BACKENDS = ("disabled", "piecewise", "breakable")


@dataclass(frozen=True)
class Settings:
    """What the settings come to. ``graphs`` False when ``cuda_graph_config`` is null."""

    graphs: bool
    padding: bool
    sizes: tuple[int, ...] | None
    largest: int | None
    serving: Serving
    where: Mapping[str, str]
    max_seq_len: int | None = None
    autodeploy: bool = False
    prefill_backend: str = "disabled"
    prefill_sizes: tuple[int, ...] | None = None
    draft_model: bool = False


def read(launch: Launch, *, older: bool) -> tuple[Settings, Reading]:
    """Settings of a launch; refusals are what the engine's strict models or its own checks would stop at.

    ``older`` releases, up to 1.2, have no prefill keys.
    """
    reading = read_options([_dashed(option) for option in launch.options], TABLE, {}, {})
    where = {name: given.where for name, given in reading.values.items()}

    def setting(*path: str) -> Any:
        value = launch.setting(path)
        if value is not None:
            where.setdefault(path[-1] if path[0] != "cuda_graph_config" else ".".join(path), launch.where(path))
        return value

    graph = setting("cuda_graph_config")
    written = isinstance(launch.settings, Mapping) and "cuda_graph_config" in launch.settings
    if graph is not None and not isinstance(graph, Mapping):
        reading.refuse(launch.where(("cuda_graph_config",)), f"cuda_graph_config is {graph!r}", "a mapping, or null")
        graph = None
    for key in graph or ():
        if key not in GRAPH_KEYS:
            reading.refuse(
                launch.where(("cuda_graph_config", key)),
                f"unknown key {key!r}",
                f"keys are {', '.join(sorted(GRAPH_KEYS))}",
            )
    sizes = _sizes(launch, ("cuda_graph_config", "batch_sizes"), reading, setting)
    largest = _count(launch, ("cuda_graph_config", "max_batch_size"), reading, setting, least=0)
    padding = setting("cuda_graph_config", "enable_padding")
    if padding is not None and not isinstance(padding, bool):
        reading.refuse(
            launch.where(("cuda_graph_config", "enable_padding")), f"{padding!r} is refused", "true or false"
        )
    mode = setting("cuda_graph_config", "mode")
    if mode not in (None, "decode", "encode"):
        reading.refuse(launch.where(("cuda_graph_config", "mode")), f"mode {mode!r} is refused", "decode or encode")
    speculative = setting("speculative_config")
    draft = speculative.get("max_draft_len", 0) if isinstance(speculative, Mapping) else 0
    batch = reading.get("max_batch_size") or _count(launch, ("max_batch_size",), reading, setting)
    tokens = reading.get("max_num_tokens") or _count(launch, ("max_num_tokens",), reading, setting)
    fraction = reading.get("kv_cache_free_gpu_memory_fraction")
    if fraction is None:
        fraction = setting("kv_cache_config", "free_gpu_memory_fraction")
    if fraction is not None and not (isinstance(fraction, int | float) and 0 <= fraction <= 1):
        reading.refuse(
            where.get("free_gpu_memory_fraction", "--kv_cache_free_gpu_memory_fraction"),
            f"{fraction!r} is refused",
            "0 to 1",
        )
        fraction = None
    serving = Serving(
        tp=reading.get("tp", 1),
        pp=reading.get("pp", 1),
        max_running_requests=batch,
        max_batched_tokens=tokens,
        spec_tokens=draft if isinstance(draft, int) and draft > 0 else 0,
        padding=bool(padding),
        mem_fraction=fraction,
    )
    encode = mode == "encode" or (mode is None and bool(ENCODE_KEYS & set(graph or ())))
    backend, prefill = _prefill(launch, reading, setting, older)
    settings = Settings(
        not (written and graph is None) and not encode,
        bool(padding),
        sizes,
        largest,
        serving,
        where,
        max_seq_len=reading.get("max_seq_len") or _count(launch, ("max_seq_len",), reading, setting),
        autodeploy=(reading.get("backend") or setting("backend")) == "_autodeploy",
        prefill_backend=backend,
        prefill_sizes=prefill,
        draft_model=isinstance(speculative, Mapping)
        and speculative.get("decoding_type") not in (None, "NGram", "Lookahead"),
    )
    return settings, reading


def _dashed(option: Option) -> Option:
    return replace(option, name=option.name.replace("_", "-")) if option.name.startswith("--") else option


def _count(launch: Launch, path: tuple[str, ...], reading: Reading, setting: Any, least: int = 1) -> int | None:
    value = setting(*path)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        reading.refuse(launch.where(path), f"{path[-1]} is {value!r}", f"a whole number of at least {least}")
        return None
    return value


def _sizes(launch: Launch, path: tuple[str, ...], reading: Reading, setting: Any) -> tuple[int, ...] | None:
    """A list of sizes. Sizes below 1 are kept: the engine does not check them, lint does."""
    value = setting(*path)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        reading.refuse(launch.where(path), f"{path[-1]} is {value!r}", "a list of whole numbers")
        return None
    wrong = [index for index, size in enumerate(value) if isinstance(size, bool) or not isinstance(size, int)]
    for index in wrong:
        reading.refuse(launch.where((*path, index)), f"{value[index]!r} is not a whole number", "whole numbers")
    if wrong:
        for index, size in enumerate(value):
            if index not in wrong and size < 1:
                reading.refuse(launch.where((*path, index)), f"size {size} is not checked by the engine", "at least 1")
        return None
    return tuple(value)


def _prefill(launch: Launch, reading: Reading, setting: Any, older: bool) -> tuple[str, tuple[int, ...] | None]:
    backend = setting("prefill_cuda_graph_backend")
    sizes = _sizes(launch, ("prefill_capture_num_tokens",), reading, setting)
    alias = setting("torch_compile_config", "enable_piecewise_cuda_graph")
    if sizes is None:
        sizes = _sizes(launch, ("torch_compile_config", "capture_num_tokens"), reading, setting)
    for key, value in (
        ("prefill_cuda_graph_backend", backend),
        ("prefill_capture_num_tokens", setting("prefill_capture_num_tokens")),
    ):
        if older and value is not None:
            reading.refuse(launch.where((key,)), f"{key} does not exist before 1.3", "torch_compile_config")
    if backend is not None and backend not in PREFILL_BACKENDS:
        reading.refuse(
            launch.where(("prefill_cuda_graph_backend",)), f"{backend!r} is refused", ", ".join(PREFILL_BACKENDS)
        )
        backend = None
    if alias is True and backend not in (None, "piecewise"):
        where = launch.where(("torch_compile_config", "enable_piecewise_cuda_graph"))
        reading.refuse(where, f"it contradicts prefill_cuda_graph_backend {backend}", "one of the two")
    if backend == "breakable" and launch.setting(("torch_compile_config",)) is not None:
        reading.refuse(
            launch.where(("torch_compile_config",)), "breakable graphs reject torch_compile_config", "one of the two"
        )
    if backend == "breakable" and launch.setting(("lora_config",)) is not None:
        reading.refuse(launch.where(("lora_config",)), "breakable graphs reject LoRA", "one of the two")
    return backend or ("piecewise" if alias is True else "disabled"), sizes
