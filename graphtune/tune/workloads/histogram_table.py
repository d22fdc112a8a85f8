"""Histograms in CSV: how often which batch size, or which number of prefill tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graphtune.errors import InputError
from graphtune.tune.workload import DecodeShare, PrefillShare, Weighting, Workload
from graphtune.tune.workloads.csv_table import Table, plain

REQUEST_NAMES = ("requests", "batch_size", "running_requests", "running", "batch")
TOKEN_NAMES = ("tokens", "prefill_tokens", "new_tokens")
STEP_NAMES = ("weight", "count", "steps", "iterations")
SECOND_NAMES = ("seconds", "duration_s", "time_s")
CONTEXT_NAMES = ("mean_kv_tokens", "context_tokens", "context")


def read_histograms(names: Sequence[str]) -> Workload:
    """One file of decode steps (``requests``), one of prefill steps (``tokens``), or both. Raises InputError.

    The column of weights says what they are: ``steps``, ``count`` or ``weight`` of steps, or ``seconds``.
    """
    decode: tuple[DecodeShare, ...] = ()
    prefill: tuple[PrefillShare, ...] = ()
    weighting: Weighting = "per_step"
    skipped = 0
    for name in names:
        table = Table(name)
        requests, tokens = (table.column(*map(plain, some)) for some in (REQUEST_NAMES, TOKEN_NAMES))
        if requests and tokens:
            raise InputError(
                "mixed units: one table holds requests and tokens", where=name, action="Give each a file of its own."
            )
        weights, unit = _weights(table)
        if requests is not None:
            if decode:
                raise InputError("is a second table of decode steps", where=name)
            decode, weighting = _decode(table, requests, weights), unit
        elif tokens is not None:
            if prefill:
                raise InputError("is a second table of prefill steps", where=name)
            if unit == "per_second":
                raise InputError(
                    "seconds of prefill do not say how many steps", where=name, action="Give a column 'steps'."
                )
            prefill = _prefill(table, tokens, weights)
        else:
            raise table.missing("batch sizes or tokens", (*REQUEST_NAMES, *TOKEN_NAMES))
        skipped += table.lines_skipped
    largest = max((share.requests for share in decode), default=1)
    source = ", ".join(Path(name).name for name in names)
    return Workload(decode, prefill, largest, None, source, weighting, skipped)


def _weights(table: Table) -> tuple[str, Weighting]:
    steps, seconds = (table.column(*map(plain, some)) for some in (STEP_NAMES, SECOND_NAMES))
    if steps and seconds:
        raise InputError("mixed units: one table holds steps and seconds", where=table.name, action="Leave one out.")
    if seconds:
        return seconds, "per_second"
    if steps is None:
        raise table.missing("weights", (*STEP_NAMES, *SECOND_NAMES))
    return steps, "per_step"


def _decode(table: Table, requests: str, weights: str) -> tuple[DecodeShare, ...]:
    context = table.column(*map(plain, CONTEXT_NAMES))
    shares = []
    for row in table:
        tokens = float(row.whole(context, "KV tokens")) if context and row.cells[context] else None
        shares.append(DecodeShare(row.whole(requests, "requests"), row.number(weights, "weight"), tokens))
    _some(table, [share.weight for share in shares])
    return tuple(sorted(shares, key=lambda share: share.requests))


def _prefill(table: Table, tokens: str, weights: str) -> tuple[PrefillShare, ...]:
    shares = [PrefillShare(row.whole(tokens, "tokens"), row.number(weights, "weight")) for row in table]
    _some(table, [share.weight for share in shares])
    return tuple(sorted(shares, key=lambda share: share.tokens))


def _some(table: Table, weights: list[float]) -> None:
    if not weights:
        raise InputError("has no rows", where=table.name)
    if not sum(weights) > 0:
        raise InputError("all weights are zero", where=table.name)
