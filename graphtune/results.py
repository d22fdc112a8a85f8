"""What a cell measured. Plain frozen data, no torch: written by the worker, read by everything else.

Units are in field names (``_bytes``, ``_us``, ``_s``). A missing value is ``None`` plus a status or reason, never 0.
Samples are stored; statistics are derived where they are shown (see ``stats.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = 1

Phase = Literal["decode", "prefill"]
Execution = Literal["graph", "eager"]
Status = Literal["ok", "failed", "timeout", "oom", "skipped", "capture_failed"]
Order = Literal["descending", "ascending"]
Sharing = Literal["shared", "per_size"]
StopRule = Literal["noise", "time", "count"]


@dataclass(frozen=True)
class CaptureList:
    """One list of bucket sizes with the settings it is captured under.

    ``sizes`` ascend without duplicates, in requests (decode) or tokens (prefill). ``backend`` is ``full`` (the whole
    forward recorded) or ``breakable`` (segments between eager attention) on every device: on a GPU it records CUDA
    graphs, on the CPU tapes (``Environment.graph_mechanism`` says which). ``waste_cap``: padded tokens per real one
    above which a prefill runs eager; None is no cap. ``request_slots``: requests that every replay of a full prefill
    has, those without tokens included.
    """

    name: str
    phase: Phase
    backend: str
    sizes: tuple[int, ...]
    order: Order = "descending"
    output: Sharing = "shared"
    workspace: Sharing = "shared"
    waste_cap: float | None = None
    request_slots: int | None = None


@dataclass(frozen=True)
class Samples:
    """At most 20 stored samples of one quantity in microseconds, out of ``taken``; ``stop`` is the rule that ended it.

    ``us`` is what statistics are made of. Samples taken while something disturbed the machine are in ``disturbed_us``;
    where too few others were left they are in ``us``, and ``flags`` say what disturbed them.
    """

    us: tuple[float, ...]
    taken: int
    stop: StopRule
    flags: tuple[str, ...] = ()
    disturbed_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Point:
    """Latency of one step at one (size, context, execution). Three times are kept apart.

    ``gpu_us``: CUDA events directly around the replay (or the eager forward), the device idle before.
    ``host_us``: step entry to the return of the last launch, the device idle before; split into ``plan_us`` (metadata
    and plan), ``fill_us`` (static buffers; null for eager) and ``launch_us``.
    ``step_us``: steps in a row, each ended by waiting for its output, wall time per step, lengths advancing.
    ``overlap_us``: the same with the next step prepared once the shared tensors have been read.

    Of a prefill, ``raw_size`` counts new tokens of all ``requests`` together and ``context_tokens`` is each request's
    cached prefix. A prefill is launched in many parts, segments or kernels, so ``gpu_us`` holds the waits for them, and
    ``step_us`` is the same run's wall time from the device being idle to the logits.
    """

    phase: Phase
    raw_size: int
    padded_size: int
    context_tokens: int
    execution: Execution
    backend: str
    attention: str
    gpu_us: Samples | None
    host_us: Samples | None
    step_us: Samples | None
    plan_us: Samples | None = None
    fill_us: Samples | None = None
    launch_us: Samples | None = None
    overlap_us: Samples | None = None
    status: Status = "ok"
    reason: str | None = None
    requests: int | None = None


@dataclass(frozen=True)
class EventRun:
    """A stretch of an allocator's events, ``repeats`` times over: n above 0 asks for n bytes, below 0 frees the block
    that was asked for -n requests ago."""

    repeats: int
    events: tuple[int, ...]


@dataclass(frozen=True)
class AllocationTrace:
    """What one capture asked of the allocator, recorded alone in an empty pool.

    ``pool``: requests of the graph pool, after ``room_bytes`` that were taken and given back at once at the start of
    the pool. ``beside``: requests of torch's own pool meanwhile, warm-ups included (empty on the CPU). ``holes`` are
    the free blocks that torch's pool had before, as (bytes, how many), ``small_holes`` those in segments for small
    requests. ``shared_output_bytes`` is a buffer that all sizes of a list share and that the largest one needs in full;
    it is not among the requests.
    """

    room_bytes: int
    pool: tuple[EventRun, ...]
    beside: tuple[EventRun, ...] = ()
    holes: tuple[tuple[int, int], ...] = ()
    shared_output_bytes: int = 0
    small_holes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class KernelCount:
    """A kernel, or another kind of node such as ``memcpy``, and how many nodes of a graph run it."""

    name: str
    nodes: int


@dataclass(frozen=True)
class Capture:
    """One captured size. Seconds are split; bytes are differences between ledger readings around the capture.

    ``trace`` is there for lists of one size that were captured for memory alone. ``kernels`` is what the graph holds,
    most nodes first; null where it was not asked for or the mechanism cannot tell.
    """

    size: int
    warmup_s: float | None
    record_s: float | None
    instantiate_s: float | None
    pool_growth_bytes: int | None
    retained_bytes: int | None
    peak_bytes: int | None
    nodes: int | None
    segments: int | None
    key: str = ""
    status: Status = "ok"
    reason: str | None = None
    trace: AllocationTrace | None = None
    kernels: tuple[KernelCount, ...] | None = None


@dataclass(frozen=True)
class GateCheck:
    """Correctness of one captured size: replay against eager, over the raw sizes tried. Errors are ‖d‖/‖ref‖."""

    size: int
    raw_sizes: tuple[int, ...]
    equal_at_padded: bool | None
    error_at_padded: float | None
    error_at_raw: float | None
    tolerance_at_raw: float
    kv_untouched: bool | None
    passed: bool
    reason: str | None = None


@dataclass(frozen=True)
class CapturedList:
    """One capture list as captured in a process: its captures in capture order, bytes, seconds and gate.

    ``graph_bytes``: device bytes after all captures minus before the first. ``torch_bytes`` is the part that torch's
    allocator owns, ``outside_torch_bytes`` the rest: graph executables. A driver keeps the latter for the next graphs
    of a process, so only a process's first list shows them; ``outside_source`` says ``measured`` there and
    ``composed`` where they are those of the first list with the same sizes. ``leftover_bytes``: torch's bytes after
    tear-down minus before the first capture (4 MiB is the limit for going on in the same process). ``flags`` say what
    disturbed the machine meanwhile, which the seconds hold and the bytes do not. ``pool_segments``: stretches of device
    memory that the pool is made of once the list is captured.
    """

    list: CaptureList
    position_in_process: int
    status: Status
    reason: str | None
    captures: tuple[Capture, ...]
    gate: tuple[GateCheck, ...]
    graph_bytes: int | None
    pool_bytes: int | None
    outside_torch_bytes: int | None
    peak_bytes: int | None
    capture_s: float | None
    leftover_bytes: int | None
    torch_bytes: int | None = None
    outside_source: Literal["measured", "composed"] | None = None
    flags: tuple[str, ...] = ()
    pool_segments: int | None = None

    @property
    def gate_green(self) -> bool:
        """True when every size of the list was captured, checked and passed."""
        checked = {check.size for check in self.gate if check.passed}
        return self.status == "ok" and checked == set(self.list.sizes)


@dataclass(frozen=True)
class Mark:
    """Device memory at one moment, read after synchronise, garbage collection and emptying torch's cache.

    ``stage`` is one of context, weights, kv_cache, workspace, buffers, eager_warmup; then for each list before_list,
    capture (once per size), captured, replayed, measured, profiled, torn_down. ``nvml_process_bytes`` is null where a
    container hides processes; ``nvml_device_bytes`` is then the second reading. ``free_delta_bytes`` is the fall of
    the device's free bytes since before the context.
    """

    stage: str
    list_index: int | None
    size: int | None
    torch_allocated_bytes: int | None
    torch_reserved_bytes: int | None
    pool_bytes: int
    nvml_process_bytes: int | None
    nvml_device_bytes: int | None
    free_delta_bytes: int | None
    at_s: float


@dataclass(frozen=True)
class MemoryLedger:
    """Marks in order, the disagreement of the two device readings, and bytes that no listed cause explains."""

    marks: tuple[Mark, ...]
    second_reading: Literal["nvml_process", "nvml_device", "none"]
    disagreement_bytes: int | None
    unexplained_bytes: int | None


@dataclass(frozen=True)
class LaunchProfile:
    """What one step at one size does: kernel launches, time in kernels, wall time on the device, idle share.

    Of a breakable graph: its ``segments`` and the launches in the breaks between them.
    """

    size: int
    context_tokens: int
    execution: Execution
    launches: int
    kernel_us: float
    span_us: float
    idle_share: float
    phase: Phase = "decode"
    backend: str | None = None
    segments: int | None = None
    launches_in_breaks: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One profiled step in the order in which its kernels started, times in µs from the first thing seen.

    Kernel ``i`` is called ``names[kernels[i]]`` and ran from ``starts_us[i]`` for ``lengths_us[i]``. Host calls that
    launched them (one for a replay) are ``call_starts_us`` and ``call_lengths_us``, empty where the profiler saw none.
    ``left_out`` kernels came after the last one stored.
    """

    size: int
    context_tokens: int
    execution: Execution
    names: tuple[str, ...]
    kernels: tuple[int, ...]
    starts_us: tuple[float, ...]
    lengths_us: tuple[float, ...]
    call_starts_us: tuple[float, ...] = ()
    call_lengths_us: tuple[float, ...] = ()
    left_out: int = 0
    phase: Phase = "decode"
    backend: str | None = None


@dataclass(frozen=True)
class Environment:
    """Where and with what a cell ran. Never a host name, user name or path.

    ``commit`` is that of the code under test, as the sweep was told or found it.
    """

    device: Literal["cuda", "cpu"]
    graph_mechanism: Literal["cuda_graph", "tape"]
    device_name: str
    graphtune: str
    python: str
    torch: str
    flashinfer: str | None
    cutlass_dsl: bool
    driver: str | None
    cuda: str | None
    nvml_total_bytes: int | None
    cuda_total_bytes: int | None
    compute_capability: str | None
    allocator_settings: str | None
    clock_mhz_before: int | None = None
    clock_mhz_after: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    other_processes: int | None = None
    launch_cost_us: float | None = None
    commit: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of the model as loaded; ``shard_of`` is N when the shapes are those of one rank of N, else 1.

    ``attention_kernels`` (decode), ``prefill_kernels`` (attention too) and ``layer_kernels`` name what ran.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    kv_pool_bytes: int
    kv_tokens: int
    workspace_bytes: int
    static_buffer_bytes: int
    parameters: int
    shard_of: int
    load: str
    attention_kernels: str | None = None
    layer_kernels: str | None = None
    prefill_kernels: str | None = None


@dataclass(frozen=True)
class CellResult:
    """One process: what it was asked (``cell`` is the canonical JSON of a Cell), what it measured, how it ended."""

    schema: int
    cell_id: str
    cell: dict[str, Any]
    status: Status
    reason: str | None
    environment: Environment | None
    model: ModelFacts | None
    captured_lists: tuple[CapturedList, ...]
    points: tuple[Point, ...]
    ledger: MemoryLedger | None
    launch_profiles: tuple[LaunchProfile, ...]
    admission: dict[str, int]
    phase_seconds: dict[str, float]
    started_at: str
    finished_at: str
    log_path: str | None = None
    unmeasured: tuple[CaptureList, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    timelines: tuple[Timeline, ...] = ()

    @property
    def purpose(self) -> str:
        """What the process was for, see ``plan.Cell``."""
        return str(self.cell.get("purpose", "main"))
