"""Changing TensorRT-LLM settings: sizes, largest size, padding and limits in the YAML."""

from __future__ import annotations

from graphtune.engines.launch import Launch
from graphtune.results import Phase

GRAPHS = "cuda_graph_config"


def with_sizes(launch: Launch, phase: Phase, sizes: tuple[int, ...]) -> Launch:
    """Set the list; a maximum beside it is dropped, since the two must agree."""
    if phase == "prefill":
        return launch.with_setting(("prefill_capture_num_tokens",), list(sizes))
    launch = launch.with_setting((GRAPHS, "batch_sizes"), list(sizes))
    if launch.setting((GRAPHS, "max_batch_size")) is not None:
        rest = {key: value for key, value in launch.setting((GRAPHS,)).items() if key != "max_batch_size"}
        launch = launch.with_setting((GRAPHS,), rest)
    return launch


def with_largest(launch: Launch, largest: int) -> Launch:
    return launch.with_setting((GRAPHS, "max_batch_size"), largest)


def with_padding(launch: Launch, on: bool) -> Launch:
    return launch.with_setting((GRAPHS, "enable_padding"), on)


def with_fraction(launch: Launch, fraction: float) -> Launch:
    for name in ("--kv_cache_free_gpu_memory_fraction", "--free_gpu_memory_fraction"):
        if any(option.name.replace("-", "_") == name.replace("-", "_") for option in launch.options):
            dashed = "--" + name[2:].replace("_", "-")
            return launch.with_option(name, f"{fraction:g}", instead_of=(dashed,))
    return launch.with_setting(("kv_cache_config", "free_gpu_memory_fraction"), fraction)


def with_limit(launch: Launch, requests: int) -> Launch:
    if any(option.name.replace("_", "-") == "--max-batch-size" for option in launch.options):
        return launch.with_option("--max_batch_size", str(requests), instead_of=("--max-batch-size",))
    return launch.with_setting(("max_batch_size",), requests)
