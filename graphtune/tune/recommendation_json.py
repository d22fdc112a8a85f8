"""The answer as the JSON of ``recommend --json`` (docs/recommendation.schema.json).

A null in the JSON has its reason under ``missing``, by path, where ``*`` stands for one step of a path. Keys are only
ever added within schema 1.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from graphtune.engines.base import Flags
from graphtune.stats import Ratio
from graphtune.tune.bucket_worth import BucketWorth
from graphtune.tune.calibrate import Calibration
from graphtune.tune.interpolation import Interpolation
from graphtune.tune.kv_budget import KvBudget
from graphtune.tune.recommendation import (
    BOUND_MISSING,
    CHOSEN_MISSING,
    EAGER_MISSING,
    KEEPS_UP,
    NOT_SIMULATED,
    CurrentAnswer,
    EngineAnswer,
    JointAnswer,
    ListAnswer,
    Recommendation,
    Simulated,
)
from graphtune.tune.workload import Workload

SCHEMA = 1
COMPILE_MISSING = "compiled decode steps are not measured by this version"
SAME_WORKLOAD = "the traffic is that at the top, the same for all engines"
NOT_ASKED = "give --current to compare with what a server runs now"
SETTING_MISSING = "this engine sizes its KV cache by a fraction only"
POOL_MISSING = "this engine's limit of running requests does not depend on its KV cache"
PEAK_MISSING = "no peak was sampled for what is captured here; only the engine's own reserve stands for it"
GENERAL_REASONS = frozenset({COMPILE_MISSING, BOUND_MISSING, EAGER_MISSING, CHOSEN_MISSING, NOT_SIMULATED})


def as_json(of: Recommendation) -> dict[str, Any]:
    """Plain data for ``json.dumps``; valid against the published schema."""
    missing = dict(of.absent)
    calibration = _calibration(of.calibration, missing)
    engines = {
        answer.engine: _engine(answer, f"engines.{answer.engine}", missing, of.workload) for answer in of.engines
    }
    if of.sweep.finished_at is None:
        missing["sweep.finished_at"] = "the sweep has not finished"
    interpolation = _interpolation(of.interpolation, missing)
    gpu = None
    if of.gpu is None:
        missing.setdefault("gpu", "the memory of the device is not known")
    else:
        gpu = {
            "nvml_total_bytes": of.gpu.nvml_total_bytes,
            "cuda_total_bytes": of.gpu.cuda_total_bytes,
            "cuda_total_assumed": of.gpu.cuda_total_assumed,
            "rule": of.gpu.rule,
            "card": of.gpu.card,
        }
    return {
        "schema": SCHEMA,
        "status": of.status,
        "missing": dict(sorted(missing.items())),
        "sweep": asdict(of.sweep),
        "workload": of.workload.as_dict(),
        "assumed": list(of.assumed),
        "limits": asdict(of.limits),
        "gpu": gpu,
        "noise": {
            "relative": of.noise.relative,
            "assumed": of.noise.assumed,
            "points": of.noise.points,
            "sentence": of.noise.words,
        },
        "interpolation": interpolation,
        "eager_overhead_us": of.eager_overhead_us,
        "calibration": calibration,
        "engines": engines,
        "pareto": [
            {**asdict(p), "decode_sizes": list(p.decode_sizes), "prefill_sizes": list(p.prefill_sizes)}
            for p in of.pareto
        ],
        "warnings": [asdict(warning) for warning in of.warnings],
    }


def _calibration(of: Calibration | None, missing: dict[str, str]) -> dict[str, Any] | None:
    if of is None:
        missing["calibration"] = "give --calibrate to fit the figures to a server's log"
        return None
    figures = {
        "bytes": of.bytes_line and asdict(of.bytes_line),
        "seconds": of.seconds_line and asdict(of.seconds_line),
        "eager_overhead_us": of.eager_overhead_us,
        "graph_ratio": of.graph_ratio,
    }
    missing |= {f"calibration.{name}": "the log does not say" for name, value in figures.items() if value is None}
    return {"engine": of.engine, "source": of.source, "lists": of.lists, **figures, "sentence": of.sentence}


def _interpolation(of: Interpolation, missing: dict[str, str]) -> dict[str, Any]:
    if of.relative is None:
        missing["interpolation.relative"] = of.words
    if of.padded_relative is None:
        missing["interpolation.padded_relative"] = "no padded replay was timed between two others of its bucket"
    return {
        "relative": of.relative,
        "points": of.points,
        "padded_relative": of.padded_relative,
        "padded_points": of.padded_points,
        "sentence": of.words,
    }


def _engine(answer: EngineAnswer, path: str, missing: dict[str, str], asked: Workload) -> dict[str, Any]:
    missing |= {f"{path}.{name}": reason for name, reason in answer.absent.items()}
    if answer.memory is not None and answer.memory.activation_peak_bytes is None:
        missing[f"{path}.memory.activation_peak_bytes"] = PEAK_MISSING
    if answer.memory is not None and answer.memory.kv_bytes_setting is None:
        missing[f"{path}.memory.kv_cache_setting"] = SETTING_MISSING
    if answer.memory is not None and any(one.request_pool is None for one in answer.memory.rounds):
        missing[f"{path}.memory.*.request_pool"] = POOL_MISSING
    workload = None
    if answer.workload is None or answer.workload == asked:
        missing["engines.*.workload"] = SAME_WORKLOAD
    else:
        workload = answer.workload.as_dict()
    if answer.load is None:
        missing |= {"engines.*.load": NOT_SIMULATED, "engines.*.overload": NOT_SIMULATED}
    elif answer.overload is None:
        missing[f"{path}.overload"] = KEEPS_UP
    return {
        "version": answer.version,
        "dispatch": asdict(answer.dispatch),
        "status": answer.status,
        "message": answer.message,
        "steps_share": answer.steps_share,
        "largest_step": answer.largest_step,
        "decode": _list(answer.decode, f"{path}.decode", missing),
        "prefill": _list(answer.prefill, f"{path}.prefill", missing),
        "prefill_default": _list(answer.prefill_default, f"{path}.prefill_default", missing),
        "prefill_eager": _list(answer.prefill_eager, f"{path}.prefill_eager", missing),
        "prefill_share": answer.prefill_share,
        "joint": _joint(answer.joint, f"{path}.joint", missing),
        "memory": _memory(answer.memory),
        "default": _list(answer.default, f"{path}.default", missing),
        "eager": _list(answer.eager, f"{path}.eager", missing),
        "ties": [_tie(tie) for tie in answer.ties],
        "runner_up": _list(answer.runner_up, f"{path}.runner_up", missing),
        "current": _current(answer.current, f"{path}.current", missing),
        "workload": workload,
        "load": answer.load,
        "overload": answer.overload,
        "settled": answer.settled,
        "flags": _flags(answer.flags),
    }


def _list(answer: ListAnswer | None, path: str, missing: dict[str, str]) -> dict[str, Any] | None:
    if answer is None:
        return None
    absent = {**answer.absent, "compile_max_size": COMPILE_MISSING}
    if answer.cliff is not None and answer.cliff.cost_us is None:
        absent["cliff.cost_us"] = "graphs of the sizes above the top were not measured"
    if answer.simulated is None:
        absent.setdefault("simulated", NOT_SIMULATED)
    else:
        absent |= {f"simulated.{name}": reason for name, reason in answer.simulated.absent.items()}
    for name, reason in absent.items():
        place = "engines" + path.count(".") * ".*" if reason in GENERAL_REASONS else path
        missing[f"{place}.{name}"] = reason
    interval = answer.graph_bytes_interval
    return {
        "backend": answer.backend,
        "unit": answer.unit,
        "capture_sizes": list(answer.capture_sizes),
        "order": answer.order,
        "output": answer.output,
        "workspace": answer.workspace,
        "compile_max_size": None,
        "expected_step_us": answer.expected_step_us,
        "coverage": answer.coverage,
        "padding_waste": answer.padding_waste,
        "graph_bytes": answer.graph_bytes,
        "graph_bytes_interval": list(interval) if interval else None,
        "capture_peak_bytes": answer.capture_peak_bytes,
        "capture_s": answer.capture_s,
        "kv_tokens": answer.kv_tokens,
        "values": {
            "expected_step_us": answer.expected_step_from,
            "graph_bytes": answer.graph_bytes_from,
            "capture_s": answer.capture_s_from,
        },
        "bytes_of_list": answer.bytes_of_list,
        "evidence": list(answer.evidence),
        "chosen_over_this": _ratio(answer.chosen_over_this),
        "simulated": _simulated(answer.simulated),
        "tokens_per_s": answer.tokens_per_s,
        "inter_token_p99_us": answer.inter_token_p99_us,
        "buckets": [_bucket(bucket, f"{path}.buckets[{at}]", missing) for at, bucket in enumerate(answer.buckets)],
        "cliff": asdict(answer.cliff) if answer.cliff else None,
    }


def _bucket(of: BucketWorth, path: str, missing: dict[str, str]) -> dict[str, Any]:
    missing |= {f"{path}.{name}": reason for name, reason in of.absent.items()}
    values = asdict(of)
    del values["absent"]
    return values


def _simulated(of: Simulated | None) -> dict[str, Any] | None:
    if of is None:
        return None
    values = asdict(of)
    del values["absent"]
    return values


def _current(of: CurrentAnswer | None, path: str, missing: dict[str, str]) -> dict[str, Any] | None:
    if of is None:
        missing["engines.*.current"] = NOT_ASKED
        return None
    missing |= {f"{path}.{name}": reason for name, reason in of.absent.items()}
    return {
        "source": of.source,
        "list": _list(of.list, f"{path}.list", missing),
        "leave_it": of.leave_it,
        "message": of.message,
        "change": of.change,
        "edits": list(of.edits),
        "padding": of.padding,
        "command": None if of.command is None else _launch(of.command),
    }


JOINT_MISSING = {
    "capture_s": "the capture of one of the lists was not timed",
    "kv_tokens": "there is no KV budget",
    "max_running_requests": "it is left to the engine",
    "tokens_per_s": NOT_SIMULATED,
}


def _joint(of: JointAnswer | None, path: str, missing: dict[str, str]) -> dict[str, Any] | None:
    if of is None:
        return None
    values = asdict(of)
    missing |= {f"{path}.{name}": reason for name, reason in JOINT_MISSING.items() if values[name] is None}
    return {**values, "decode_sizes": list(of.decode_sizes), "prefill_sizes": list(of.prefill_sizes)}


def _ratio(of: Ratio | None) -> dict[str, Any] | None:
    if of is None:
        return None
    return {
        "combined": of.combined,
        "by_process": list(of.by_process),
        "tolerance": of.tolerance,
        "assumed": of.assumed,
        "faster": of.faster,
    }


def _tie(answer: ListAnswer) -> dict[str, Any]:
    return {
        "capture_sizes": list(answer.capture_sizes),
        "expected_step_us": answer.expected_step_us,
        "coverage": answer.coverage,
        "graph_bytes": answer.graph_bytes,
    }


def _memory(of: KvBudget | None) -> dict[str, Any] | None:
    if of is None:
        return None
    return {
        "cuda_total_bytes": of.cuda_total_bytes,
        "context_bytes": of.context_bytes,
        "weights_bytes": of.weights_bytes,
        "workspace_bytes": of.workspace_bytes,
        "static_buffer_bytes": of.static_buffer_bytes,
        "activation_peak_bytes": of.activation_peak_bytes,
        "graph_bytes": of.graph_bytes,
        "reserve_bytes": of.reserve_bytes,
        "kv_bytes": of.kv_bytes,
        "kv_tokens": of.kv_tokens,
        "bytes_per_kv_token": of.bytes_per_kv_token,
        "max_running_requests": of.max_running_requests,
        "short_by_bytes": of.short_by_bytes,
        "kv_cache_setting": of.kv_bytes_setting,
        "own": {
            "fraction": of.own_fraction,
            "reserve_bytes": of.own_reserve_bytes,
            "kv_tokens": of.own_kv_tokens,
            "kv_tokens_gained": of.kv_tokens_gained,
        },
        "rounds": [asdict(one) for one in of.rounds],
        "fraction": {
            "setting": of.fraction_setting,
            "value": of.fraction,
            "base": of.fraction_base,
            "base_bytes": of.fraction_base_bytes,
            "changed": of.fraction_changed,
        },
    }


def _launch(of: Flags) -> dict[str, Any]:
    return {"args": list(of.args)} | ({"yaml": of.yaml} if of.yaml is not None else {})


def _flags(flags: Flags | None) -> dict[str, Any] | None:
    if flags is None:
        return None
    return {"yaml": flags.yaml} if flags.yaml is not None else {"args": list(flags.args)}
