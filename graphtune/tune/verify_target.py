"""What is to be verified: one engine's lists in a recommendation, with the bytes that it states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphtune.errors import Finding, InputError
from graphtune.results import CaptureList, Phase
from graphtune.tune.block_pool import RULES
from graphtune.units import GpuMemory, format_bytes

BUDGET_TERMS = ("context", "weights", "workspace", "static_buffer", "kv")


@dataclass(frozen=True)
class Target:
    """What a recommendation says of one engine's decode list, and the prefill list beside it if there is one.

    ``held_bytes`` is the device memory of everything but graphs, the KV pool of ``kv_tokens`` included; both null where
    there is no budget. ``joint_bytes`` is the most that both lists are stated to take together.
    """

    engine: str
    sweep: str
    list: CaptureList
    context_tokens: float
    graph_bytes: int
    interval: tuple[int, int]
    peak_bytes: int
    capture_s: float | None
    kv_tokens: int | None
    held_bytes: int | None
    prefill: CaptureList | None = None
    joint_bytes: int | None = None

    @property
    def needed_bytes(self) -> int | None:
        """Device bytes at the peak of capturing."""
        return None if self.held_bytes is None else self.held_bytes + self.peak_bytes


def read_recommendation(file: Path) -> dict[str, Any]:
    """The JSON that ``recommend --json`` wrote. Raises InputError for anything else."""
    action = "Write one with `graphtune recommend --json > FILE`."
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot be read: {reason}", where=str(file), action=action) from error
    except ValueError as error:
        raise InputError(f"is not JSON: {error}", where=str(file), action=action) from error
    if not isinstance(data, dict) or not isinstance(data.get("engines"), dict) or data.get("schema") != 1:
        raise InputError("is not a recommendation of schema 1", where=str(file), action=action)
    return data


def target_of(data: Mapping[str, Any], engine: str | None, where: str) -> Target:
    """The list of one engine (the first that captures something when not named) in a recommendation's JSON.

    Raises InputError for an engine that is not in it and Finding where nothing is captured.
    """
    engines = data["engines"]
    if engine is not None and engine not in engines:
        raise InputError(f"holds no answer for {engine}", where=where, action=f"It has {', '.join(engines)}.")
    names = [engine] if engine is not None else list(engines)
    found = next((name for name in names if (engines[name].get("decode") or {}).get("capture_sizes")), None)
    if found is None:
        raise Finding("nothing is captured, so there is nothing to verify", where=where)
    try:
        return _target(found, data, engines[found])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"is no complete recommendation: {error!r}", where=where) from error


def _target(engine: str, data: Mapping[str, Any], answer: Mapping[str, Any]) -> Target:
    of, memory = answer["decode"], answer.get("memory")
    if of["graph_bytes"] is None or of["order"] is None:
        raise Finding("the bytes of this list are not known, so there is nothing to verify it against")
    low, high = of["graph_bytes_interval"] or (0, of["graph_bytes"])
    step = RULES[data["sweep"]["environment"]["graph_mechanism"]].segment_step_bytes
    prefill: Mapping[str, Any] = answer.get("prefill") or {}
    beside = bool(prefill.get("capture_sizes")) and prefill.get("graph_bytes") is not None
    return Target(
        engine=engine,
        sweep=str(data["sweep"]["path"]),
        list=_list("decode", of),
        context_tokens=float(data["limits"]["context_tokens"]),
        graph_bytes=int(of["graph_bytes"]),
        # A list that was measured has an interval without width; devices give memory in steps.
        interval=(max(0, int(low) - step), int(high) + step),
        peak_bytes=int(of["capture_peak_bytes"] or of["graph_bytes"]),
        capture_s=of["capture_s"],
        kv_tokens=None if memory is None else int(memory["kv_tokens"]),
        held_bytes=None if memory is None else sum(int(memory[f"{term}_bytes"]) for term in BUDGET_TERMS),
        prefill=_list("prefill", prefill) if beside else None,
        joint_bytes=int(of["graph_bytes"]) + int(prefill["graph_bytes"]) + step if beside else None,
    )


def _list(phase: Phase, of: Mapping[str, Any]) -> CaptureList:
    sizes = tuple(int(size) for size in of["capture_sizes"])
    return CaptureList("recommended", phase, of["backend"], sizes, of["order"], of["output"], of["workspace"])


def refuse_too_small(target: Target, gpu: GpuMemory | None) -> None:
    """Raise Finding when what the recommendation needs at its peak is more than ``gpu`` has: by how much, for what."""
    if gpu is None or target.needed_bytes is None or target.needed_bytes <= gpu.cuda_total_bytes:
        return
    short = target.needed_bytes - gpu.cuda_total_bytes
    held = target.held_bytes or 0
    raise Finding(
        f"nothing was captured: {format_bytes(held)} for everything but graphs and {format_bytes(target.peak_bytes)} "
        f"while capturing are {format_bytes(short)} more than the {format_bytes(gpu.cuda_total_bytes)} a process can "
        f"have ({gpu.rule})",
        action="Ask for a recommendation for this card: graphtune recommend --gpu-mem.",
    )
