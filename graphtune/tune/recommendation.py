"""The answer as data. ``recommendation_json`` writes it as JSON, ``recommendation_text`` for people."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from graphtune.engines.base import Dispatch, Engine, Flags, Padding
from graphtune.results import Environment
from graphtune.stats import Noise, Ratio
from graphtune.tune.bucket_worth import BucketWorth, Cliff
from graphtune.tune.calibrate import Calibration
from graphtune.tune.interpolation import Interpolation
from graphtune.tune.kv_budget import KvBudget
from graphtune.tune.simulation import Simulation
from graphtune.tune.workload import Workload
from graphtune.units import GpuMemory

Objective = Literal["step", "throughput", "p99-itl", "startup"]
Status = Literal["ok", "nothing_fits", "partial"]

BOUND_MISSING = "bytes that are a bound have no lower end"
EAGER_MISSING = "nothing is captured"
CHOSEN_MISSING = "it is the chosen list itself"
NOT_SIMULATED = "only request traces are simulated"
KEEPS_UP = "the server keeps up"


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
    beyond the measured sizes are left out. ``shorter_share`` is the share whose size was measured at shorter contexts
    only, the longest of which stands in. ``most_coverage`` is the highest graph coverage of a list within the limits.
    ``workload`` is what was asked of this engine; ``kv_holds`` the largest of its steps that KV holds, where it holds
    not all of them. For a trace: ``load`` is how many times as dense as recorded it arrives, ``overload`` how the
    server falls behind under it, ``settled`` whether the batches are those that the recommended list makes.
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
    shorter_share: float = 0.0
    workload: Workload | None = None
    load: float | None = None
    overload: str | None = None
    settled: bool = True
    kv_holds: int | None = None
    current: CurrentAnswer | None = None
    prefill: ListAnswer | None = None
    prefill_default: ListAnswer | None = None
    prefill_eager: ListAnswer | None = None
    prefill_share: float | None = None
    joint: JointAnswer | None = None
    absent: dict[str, str] = field(default_factory=dict)

    @classmethod
    def without_lists(
        cls, engine: Engine, message: str, absent: dict[str, str], memory: KvBudget | None = None
    ) -> EngineAnswer:
        """Nothing fits, for the reason that ``message`` gives; ``absent`` says why each field is null."""
        return cls(
            engine=engine.name,
            version=engine.version,
            dispatch=engine.dispatch,
            status="nothing_fits",
            message=message,
            decode=None,
            default=None,
            eager=None,
            ties=(),
            runner_up=None,
            memory=memory,
            flags=None,
            steps_share=0.0,
            largest_step=None,
            absent=absent,
        )


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
    interpolation: Interpolation
    eager_overhead_us: float
    engines: tuple[EngineAnswer, ...]
    pareto: tuple[ParetoPoint, ...]
    warnings: tuple[Caution, ...]
    assumed: tuple[str, ...] = ()
    calibration: Calibration | None = None
    absent: dict[str, str] = field(default_factory=dict)

    def engine(self, name: str) -> EngineAnswer:
        return next(answer for answer in self.engines if answer.engine == name)
