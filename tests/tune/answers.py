"""Checks of answers that several test modules make, and a sweep that is quick to ask."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from graphtune.results import CaptureList, Execution
from graphtune.store import Sweep
from graphtune.tune.recommendation_json import as_json
from tests.synthetic import MIB, captured_list, cell_result, point, sweep

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "recommendation.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def nulls(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all nulls, written as under ``missing``."""
    if value is None:
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from nulls(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from nulls(item, f"{path}[{index}]")


OPTIONAL = re.compile(
    r"limits\.|workload\.(chunk_size|decode\[\d+\]\.mean_kv_tokens)|sweep\.environment\.|engines\.\w+\.dispatch\.|gpu\.card"
)
"""Nulls that are a choice not made or a fact of the environment, not a figure that is missing."""


def checked(answer: Any) -> dict[str, Any]:
    """The JSON of an answer: valid, and every null figure has a reason."""
    data: dict[str, Any] = json.loads(json.dumps(as_json(answer), allow_nan=False))
    VALIDATOR.validate(data)
    patterns = [re.compile(re.escape(path).replace(r"\*", r"[^.]+")) for path in data["missing"]]
    for path in nulls(data):
        if not OPTIONAL.match(path):
            assert any(pattern.fullmatch(path) for pattern in patterns), f"{path} is null without a reason"
    return data


def codes(data: dict[str, Any]) -> set[str]:
    return {warning["code"] for warning in data["warnings"]}


def sparse_sweep() -> Sweep:
    """Powers of two and a coarse list: few enough candidates to ask many questions of."""
    lists = [
        captured_list(CaptureList("powers", "decode", "full", (1, 2, 4, 8, 16, 32, 64))),
        captured_list(CaptureList("coarse", "decode", "full", (1, 8, 24, 64)), position=2, each_bytes=4 * MIB),
    ]
    sizes = (1, 2, 4, 8, 16, 24, 32, 64)

    def step_us(size: int, context: int, execution: Execution) -> float:
        extra = 0.0 if execution == "graph" else max(0.0, 2500.0 - 40 * size)
        return 4000.0 + 40 * size + 0.03 * size * context + extra

    runs: tuple[Execution, ...] = ("graph", "eager")
    points = [point(s, c, run, step_us(s, c, run)) for s in sizes for c in (256, 1024) for run in runs]
    return sweep([cell_result(lists, points, process=process) for process in (1, 2)])


SPARSE = sparse_sweep()
