"""The traffic that an answer is for: how often a decode step serves how many requests, at which context.

As JSON: ``{"schema": 1, "kind": "histogram", "decode": [{"requests": 8, "weight": 0.4, "mean_kv_tokens": 900}]}``, with
``prefill`` (``tokens``, ``weight``), ``max_running_requests``, ``chunk_size``, ``source``, ``weighting`` and
``lines_skipped`` optional. Weights need not add up to one.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

from graphtune.errors import InputError

SCHEMA = 1
Weighting = Literal["per_step", "per_second", "every_40th_step"]

KEYS = {
    "schema",
    "kind",
    "decode",
    "prefill",
    "max_running_requests",
    "chunk_size",
    "source",
    "weighting",
    "lines_skipped",
}


@dataclass(frozen=True)
class DecodeShare:
    """Steps with ``requests`` running requests; ``mean_kv_tokens`` null takes the context of the question."""

    requests: int
    weight: float
    mean_kv_tokens: float | None = None


@dataclass(frozen=True)
class PrefillShare:
    """Prefill steps of ``tokens`` tokens."""

    tokens: int
    weight: float


@dataclass(frozen=True)
class Workload:
    """A histogram. ``weighting`` says what one unit of weight is; ``lines_skipped`` counts what a reader left out."""

    decode: tuple[DecodeShare, ...]
    prefill: tuple[PrefillShare, ...]
    max_running_requests: int
    chunk_size: int | None
    source: str
    weighting: Weighting
    lines_skipped: int = 0
    kind: Literal["histogram"] = "histogram"

    def up_to(self, max_running_requests: int) -> Workload:
        """The same traffic without steps of more requests than that."""
        kept = tuple(share for share in self.decode if share.requests <= max_running_requests)
        return replace(self, decode=kept, max_running_requests=min(self.max_running_requests, max_running_requests))

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def uniform(max_running_requests: int) -> Workload:
    """Every number of requests from one to the maximum equally often."""
    if max_running_requests < 1:
        raise InputError("needs at least one running request", where="--max-running")
    shares = tuple(DecodeShare(requests, 1.0) for requests in range(1, max_running_requests + 1))
    return Workload(shares, (), max_running_requests, None, "uniform", "per_step")


def steady(requests: int) -> Workload:
    """Always the same number of requests."""
    if requests < 1:
        raise InputError(f"steady {requests} needs at least one request", where="--workload")
    return Workload((DecodeShare(requests, 1.0),), (), requests, None, f"steady {requests}", "per_step")


def parse_workload(content: str | bytes, file: str) -> Workload:
    """The histogram in JSON text; ``file`` locates errors."""
    try:
        values = json.loads(content)
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", where=file) from error
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error.msg}", where=f"{file}:{error.lineno}") from error
    if not isinstance(values, dict):
        raise InputError("must hold a JSON object", where=file)
    if values.get("kind") != "histogram":
        raise InputError(
            f"kind {values.get('kind')!r} is not read here", where=f"{file}: kind", action="Use histogram."
        )
    if values.get("schema", SCHEMA) != SCHEMA:
        raise InputError(f"schema {values['schema']!r} is not {SCHEMA}", where=f"{file}: schema")
    if unknown := sorted(set(values) - KEYS):
        raise InputError(f"unknown key {unknown[0]!r}", where=file, action=f"Known keys: {', '.join(sorted(KEYS))}.")
    decode = tuple(_decode_share(row, at) for row, at in _rows(values, "decode", file))
    prefill = tuple(_prefill_share(row, at) for row, at in _rows(values, "prefill", file))
    if not decode and not prefill:
        raise InputError("has no steps", where=f"{file}: decode")
    if math.fsum(share.weight for share in decode or prefill) <= 0:
        raise InputError("all weights are zero", where=f"{file}: {'decode' if decode else 'prefill'}")
    largest = max((share.requests for share in decode), default=1)
    limit = _optional_count(values, "max_running_requests", file)
    if limit is not None and limit < largest:
        raise InputError(
            f"{limit} is below the {largest} requests of a decode step", where=f"{file}: max_running_requests"
        )
    weighting = values.get("weighting", "per_step")
    if weighting not in get_args(Weighting):
        known = ", ".join(get_args(Weighting))
        raise InputError(f"{weighting!r} is no weighting", where=f"{file}: weighting", action=f"Known: {known}.")
    return Workload(
        decode=decode,
        prefill=prefill,
        max_running_requests=limit or largest,
        chunk_size=_optional_count(values, "chunk_size", file),
        source=str(values.get("source") or file),
        weighting=cast(Weighting, weighting),
        lines_skipped=_optional_count(values, "lines_skipped", file, least=0) or 0,
    )


def _rows(values: dict[str, Any], key: str, file: str) -> list[tuple[dict[str, Any], str]]:
    rows = values.get(key) or []
    if not isinstance(rows, list):
        raise InputError("must be a list", where=f"{file}: {key}")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError("must be an object", where=f"{file}: {key}[{index}]")
    return [(row, f"{file}: {key}[{index}]") for index, row in enumerate(rows)]


def _decode_share(row: dict[str, Any], where: str) -> DecodeShare:
    _only(row, {"requests", "weight", "mean_kv_tokens"}, where)
    mean = row.get("mean_kv_tokens")
    tokens = None if mean is None else _number(mean, f"{where}.mean_kv_tokens", least=1)
    return DecodeShare(
        _count(row.get("requests"), f"{where}.requests"), _number(row.get("weight"), f"{where}.weight"), tokens
    )


def _prefill_share(row: dict[str, Any], where: str) -> PrefillShare:
    _only(row, {"tokens", "weight"}, where)
    return PrefillShare(_count(row.get("tokens"), f"{where}.tokens"), _number(row.get("weight"), f"{where}.weight"))


def _only(row: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(row) - known):
        raise InputError(f"unknown key {unknown[0]!r}", where=where, action=f"Known keys: {', '.join(sorted(known))}.")


def _count(value: Any, where: str, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{value!r} is not a whole number of at least {least}", where=where)
    return value


def _optional_count(values: dict[str, Any], key: str, file: str, least: int = 1) -> int | None:
    value = values.get(key)
    return None if value is None else _count(value, f"{file}: {key}", least)


def _number(value: Any, where: str, least: float = 0.0) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < least:
        raise InputError(f"{value!r} is not a number of at least {least:g}", where=where)
    return float(value)
