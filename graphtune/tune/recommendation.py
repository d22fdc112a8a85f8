"""The answer as data, and as the JSON of ``recommend --json`` (docs/recommendation.schema.json).

A null in the JSON has its reason under ``missing``, by path, where ``*`` stands for one step of a path. Keys are only
ever added within schema 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from graphtune.engines.base import Dispatch, Flags, Padding
from graphtune.results import Environment
from graphtune.stats import Noise, Ratio
from graphtune.tune.bucket_worth import BucketWorth, Cliff
from graphtune.tune.calibrate import Calibration
from graphtune.tune.kv_budget import KvBudget
from graphtune.tune.simulation import Simulation
from graphtune.tune.workload import Workload
from graphtune.units import GpuMemory

SCHEMA = 1

Objective = Literal["step", "throughput", "p99-itl", "startup"]
Status = Literal["ok", "nothing_fits", "partial"]

COMPILE_MISSING = "compiled decode steps are not measured by this version"
BOUND_MISSING = "bytes that are a bound have no lower end"
EAGER_MISSING = "nothing is captured"
CHOSEN_MISSING = "it is the chosen list itself"
SAME_WORKLOAD = "the traffic is that at the top, the same for all engines"
NOT_SIMULATED = "only request traces are simulated"
NOT_ASKED = "give --current to compare with what a server runs now"
KEEPS_UP = "the server keeps up"
SETTING_MISSING = "this engine sizes its KV cache by a fraction only"
POOL_MISSING = "this engine's limit of running requests does not depend on its KV cache"
PEAK_MISSING = "no peak was sampled for what is captured here; only the engine's own reserve stands for it"
GENERAL_REASONS = frozenset({COMPILE_MISSING, BOUND_MISSING, EAGER_MISSING, CHOSEN_MISSING, NOT_SIMULATED})


@dataclass(frozen=True)
class Caution:
    """Something that limits an answer, and what to do about it."""

    code: str
    message: str
    action: str


@dataclass(frozen=True)
class Simulated:
    """What a request trace comes to under one list. Times are in seconds; they are null for the reason in ``absent``.

    ``overload`` says how the server falls behind, null when it keeps up.
    """

    requests_per_s: float
    tokens_per_s: float
    ttft_p99_s: float | None
    inter_token_p99_s: float | None
    preemptions: int
    overload: str | None
    absent: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Simulation) -> Simulated:
        absent = {
            name: found.absent[key]
            for key, name in (("ttft", "ttft_p99_s"), ("inter_token", "inter_token_p99_s"))
            if key in found.absent
        }
        return cls(
            requests_per_s=found.requests_per_s,
            tokens_per_s=found.tokens_per_s,
            ttft_p99_s=found.ttft.p99_s if found.ttft else None,
            inter_token_p99_s=found.inter_token.p99_s if found.inter_token else None,
            preemptions=found.preemptions,
            overload=found.overload,
            absent=absent if found.overload else {**absent, "overload": KEEPS_UP},
        )


@dataclass(frozen=True)
class ListAnswer:
    """One capture list with its figures on the traffic. Without sizes everything runs eager.

    ``*_from`` say how a figure came about; ``chosen_over_this`` is the expected step of the chosen list over that of
    this one. All lists but ties have ``tokens_per_s`` and ``inter_token_p99_us`` (see ``objective``), ``buckets`` (what
    each earns) and ``cliff`` (steps above the top). ``absent`` maps the name of a null field to the reason.
    """

    unit: str
    capture_sizes: tuple[int, ...]
    backend: str
    order: str | None
    output: str | None
    workspace: str | None
    expected_step_us: float | None
    coverage: float | None
    padding_waste: float | None
    graph_bytes: int | None
    graph_bytes_interval: tuple[int, int] | None
    capture_peak_bytes: int | None
    capture_s: float | None
    kv_tokens: int | None
    expected_step_from: str | None
    graph_bytes_from: str | None
    capture_s_from: str | None
    bytes_of_list: str | None
    evidence: tuple[str, ...]
    chosen_over_this: Ratio | None = None
    simulated: Simulated | None = None
    tokens_per_s: float | None = None
    inter_token_p99_us: float | None = None
    buckets: tuple[BucketWorth, ...] = ()
    cliff: Cliff | None = None
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def is_eager(self) -> bool:
        return not self.capture_sizes

    def without(self, name: str, reason: str) -> ListAnswer:
        """The same, saying why a field is null."""
        return replace(self, absent={**self.absent, name: reason})


@dataclass(frozen=True)
class CurrentAnswer:
    """What a server runs now, from its launch ``command`` or its ``log``, against the recommended list.

    ``change`` is recommended minus current, by name; ``edits`` are the changed flags in words and ``command`` the whole
    launch with them, null for the reason in ``absent``.
    """

    source: str
    list: ListAnswer
    padding: Padding
    leave_it: bool
    message: str
    change: dict[str, float | None]
    edits: tuple[str, ...]
    command: Flags | None
    absent: dict[str, str]


@dataclass(frozen=True)
class JointAnswer:
    """The lists of both phases together. ``one_list``: the engine captures every size for both.

    ``graph_bytes`` is the sum of both. On a trace ``max_running_requests`` is the limit that gives the most tokens per
    second, ``tokens_per_s``, with all of it there at once; else it is as asked, null where it is left to the engine.
    """

    one_list: bool
    decode_sizes: tuple[int, ...]
    prefill_sizes: tuple[int, ...]
    decode_backend: str
    prefill_backend: str
    graph_bytes: int
    capture_s: float | None
    kv_tokens: int | None
    max_running_requests: int | None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class EngineAnswer:
    """The answer for one engine. ``message`` says in one sentence what was found.

    ``steps_share`` is the share of the asked traffic that the figures cover: steps that KV cannot hold or that lie
    beyond the measured sizes are left out. ``most_coverage`` is the highest graph coverage of a list within the limits.
    ``workload`` is what was asked of this engine. For a trace: ``load`` is how many times as dense as recorded it
    arrives, ``overload`` how the server falls behind under it, ``settled`` whether the batches are those that the
    recommended list makes.
    """

    engine: str
    version: str
    dispatch: Dispatch
    status: Status
    message: str
    decode: ListAnswer | None
    default: ListAnswer | None
    eager: ListAnswer | None
    ties: tuple[ListAnswer, ...]
    runner_up: ListAnswer | None
    memory: KvBudget | None
    flags: Flags | None
    steps_share: float
    largest_step: int | None
    most_coverage: float | None = None
    workload: Workload | None = None
    load: float | None = None
    overload: str | None = None
    settled: bool = True
    current: CurrentAnswer | None = None
    prefill: ListAnswer | None = None
    prefill_default: ListAnswer | None = None
    prefill_eager: ListAnswer | None = None
    prefill_share: float | None = None
    joint: JointAnswer | None = None
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ParetoPoint:
    """A candidate that none beats in both bytes and step time; ``defaults`` are the engine's own list."""

    engine: str
    graph_bytes: int
    expected_step_us: float
    capture_s: float | None
    decode_sizes: tuple[int, ...]
    prefill_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What the user allows; null is no limit. ``context_tokens`` is the mean KV tokens per request.

    ``slo_inter_token_us`` bounds the 99th percentile of the gaps between tokens.
    """

    context_tokens: float
    max_running_requests: int | None = None
    min_kv_tokens: int | None = None
    max_graph_bytes: int | None = None
    max_capture_s: float | None = None
    max_graphs: int | None = None
    objective: Objective = "step"
    slo_inter_token_us: float | None = None


@dataclass(frozen=True)
class SweepFacts:
    """Which measurement an answer rests on."""

    path: str
    recipe: str
    recipe_sha: str
    model: str
    finished_at: str | None
    environment: Environment | None
    latency_device: str
    statistic: str
    attention: str


@dataclass(frozen=True)
class Recommendation:
    """The whole answer. ``gpu`` is null when the device's memory is not known.

    ``assumed`` names the options of the question that were not given and stand for traffic. ``calibration`` says how
    figures of one engine were fitted to a server's log.
    """

    status: Status
    sweep: SweepFacts
    workload: Workload
    limits: Limits
    gpu: GpuMemory | None
    noise: Noise
    eager_overhead_us: float
    engines: tuple[EngineAnswer, ...]
    pareto: tuple[ParetoPoint, ...]
    warnings: tuple[Caution, ...]
    assumed: tuple[str, ...] = ()
    calibration: Calibration | None = None
    absent: dict[str, str] = field(default_factory=dict)

    def engine(self, name: str) -> EngineAnswer:
        return next(answer for answer in self.engines if answer.engine == name)


def as_json(of: Recommendation) -> dict[str, Any]:
    """Plain data for ``json.dumps``; valid against the published schema."""
    missing = dict(of.absent)
    calibration = _calibration(of.calibration, missing)
    engines = {
        answer.engine: _engine(answer, f"engines.{answer.engine}", missing, of.workload) for answer in of.engines
    }
    if of.sweep.finished_at is None:
        missing["sweep.finished_at"] = "the sweep has not finished"
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
