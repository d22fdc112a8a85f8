"""Changing SGLang flags: sizes, largest size, limits and backend, in the spelling the launch already uses."""

from __future__ import annotations

import json
from typing import Any

from graphtune.engines.launch import Launch
from graphtune.results import Phase

JSON = "--cuda-graph-config"


def _json(launch: Launch) -> dict[str, Any]:
    for option in reversed(launch.options):
        if option.name == JSON and option.values:
            try:
                value = json.loads(option.values[0])
            except (json.JSONDecodeError, RecursionError):
                return {}
            return value if isinstance(value, dict) else {}
    return {}


def _in_json(launch: Launch, phase: Phase, key: str) -> bool:
    settings = _json(launch).get(phase)
    return isinstance(settings, dict) and key in settings


def _with_json(launch: Launch, phase: Phase, key: str, value: Any) -> Launch:
    config = _json(launch)
    settings = dict(config.get(phase) or {})
    settings[key] = value
    return launch.with_option(JSON, json.dumps({**config, phase: settings}, separators=(",", ":")))


def with_sizes(launch: Launch, phase: Phase, sizes: tuple[int, ...]) -> Launch:
    if _in_json(launch, phase, "bs"):
        return _with_json(launch, phase, "bs", list(sizes))
    return launch.with_option(f"--cuda-graph-bs-{phase}", *(str(size) for size in sizes))


def with_largest(launch: Launch, phase: Phase, largest: int) -> Launch:
    if _in_json(launch, phase, "max_bs"):
        return _with_json(launch, phase, "max_bs", largest)
    return launch.with_option(f"--cuda-graph-max-bs-{phase}", str(largest))


def with_backend(launch: Launch, phase: Phase, backend: str) -> Launch:
    if _in_json(launch, phase, "backend"):
        return _with_json(launch, phase, "backend", backend)
    return launch.with_option(f"--cuda-graph-backend-{phase}", backend)


def with_fraction(launch: Launch, fraction: float) -> Launch:
    return launch.with_option("--mem-fraction-static", f"{fraction:g}")


def with_limit(launch: Launch, requests: int) -> Launch:
    return launch.with_option("--max-running-requests", str(requests))
