"""Changing vLLM flags: sizes, largest size, limits and mode, in the spelling the launch already uses."""

from __future__ import annotations

import json
from typing import Any

from graphtune.engines.launch import Launch, Option

JSON_NAMES = ("--compilation-config", "--compilation_config", "-cc")
SIZES, LARGEST, MODE = "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_mode"


def _json_option(launch: Launch, key: str) -> tuple[Option, dict[str, Any]] | None:
    """The JSON option that holds ``key`` (any JSON option for an empty key) and its content."""
    for option in reversed(launch.options):
        if option.name in JSON_NAMES and option.values:
            try:
                value = json.loads(option.values[0])
            except (json.JSONDecodeError, RecursionError):
                continue
            if isinstance(value, dict) and (not key or key in value):
                return option, value
    return None


def _dotted(launch: Launch, key: str) -> Option | None:
    names = {f"{name}.{key}" for name in JSON_NAMES}
    return next((option for option in reversed(launch.options) if option.name in names), None)


def _with_key(launch: Launch, key: str, value: Any, flag: str | None) -> Launch:
    """Set a compilation key where it is already set; else by its flag, or in the JSON, or as a dotted key."""
    found = _json_option(launch, key)
    if found is not None:
        option, config = found
        return launch.with_option(option.name, json.dumps({**config, key: value}, separators=(",", ":")))
    dotted = _dotted(launch, key)
    if dotted is not None:
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        return launch.with_option(dotted.name, text)
    if flag is not None:
        values = value if isinstance(value, list) else [value]
        return launch.with_option(flag, *(str(item) for item in values), instead_of=(flag.replace("-", "_"),))
    found = _json_option(launch, "")
    if found is not None:
        option, config = found
        return launch.with_option(option.name, json.dumps({**config, key: value}, separators=(",", ":")))
    return launch.with_option(f"-cc.{key}", value if isinstance(value, str) else json.dumps(value))


def _without_key(launch: Launch, key: str) -> Launch:
    found = _json_option(launch, key)
    if found is not None:
        option, config = found
        rest = {name: value for name, value in config.items() if name != key}
        launch = launch.with_option(option.name, json.dumps(rest, separators=(",", ":")))
    flag = "--" + key.replace("_", "-")
    return launch.without(flag, "--" + key, *(f"{name}.{key}" for name in JSON_NAMES))


def with_sizes(launch: Launch, sizes: tuple[int, ...]) -> Launch:
    """Set the list; a maximum beside it is dropped, since the two must agree."""
    return _with_key(_without_key(launch, LARGEST), SIZES, list(sizes), "--cudagraph-capture-sizes")


def with_largest(launch: Launch, largest: int) -> Launch:
    return _with_key(launch, LARGEST, largest, "--max-cudagraph-capture-size")


def with_mode(launch: Launch, mode: str) -> Launch:
    return _with_key(launch, MODE, mode, None)


def with_fraction(launch: Launch, fraction: float) -> Launch:
    option = "--gpu-memory-utilization"
    return launch.with_option(option, f"{fraction:g}", instead_of=("--gpu_memory_utilization",))


def with_limit(launch: Launch, requests: int) -> Launch:
    return launch.with_option("--max-num-seqs", str(requests), instead_of=("--max_num_seqs",))
