"""Builders of made-up sweeps for tests. The figures have the shape of measured ones and the meaning of none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from graphtune.decode_cells import padded_steps
from graphtune.plan import Cell, LatencyAt, Measure, PaddedTo, Skip
from graphtune.results import (
    SCHEMA,
    Capture,
    CapturedList,
    CaptureList,
    CellResult,
    Environment,
    Execution,
    GateCheck,
    LaunchProfile,
    Mark,
    MemoryLedger,
    ModelFacts,
    Phase,
    Point,
    Samples,
    Timeline,
)
from graphtune.store import Run, Sweep, SweepWriter
from graphtune.tune.workload import DecodeShare, PrefillShare, Workload

MIB = 1 << 20
GIB = 1 << 30

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}

SGLANG_LIST = (1, 2, 4, 8, 12, *range(16, 257, 8))
VLLM_LIST = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
TENSORRT_LIST = (1, 2, 4, *range(8, 129, 8))
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SPARSE_SIZES = (1, 4, 16, 32, 64, 128, 192, 256)


def environment(device: str = "cuda") -> Environment:
    on_gpu = device == "cuda"
    return Environment(
        device="cuda" if on_gpu else "cpu",
        graph_mechanism="cuda_graph" if on_gpu else "tape",
        device_name="NVIDIA H200" if on_gpu else "Synthetic CPU",
        graphtune="0.1.0",
        python="3.12.3",
        torch="2.11.0",
        flashinfer="0.6.13" if on_gpu else None,
        cutlass_dsl=on_gpu,
        driver="580.00" if on_gpu else None,
        cuda="13.0" if on_gpu else None,
        nvml_total_bytes=143771 * MIB if on_gpu else None,
        cuda_total_bytes=143157 * MIB if on_gpu else None,
        compute_capability="9.0" if on_gpu else None,
        allocator_settings=None,
        clock_mhz_before=1980 if on_gpu else None,
        clock_mhz_after=1965 if on_gpu else None,
        other_processes=0 if on_gpu else None,
        launch_cost_us=4.1 if on_gpu else None,
    )


def model_facts(weights_bytes: int = 16_060_522_496, kv_bytes_per_token: int = 131072) -> ModelFacts:
    return ModelFacts(
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_pool_bytes=300_000 * kv_bytes_per_token,
        kv_tokens=300_000,
        workspace_bytes=144 * MIB,
        static_buffer_bytes=3 * MIB,
        parameters=weights_bytes // 2,
        shard_of=1,
        load="random",
    )


def samples(median_us: float, count: int = 7, spread: float = 0.0, seed: int = 0) -> Samples:
    """Samples around a median; with an odd count the median is exact."""
    rng = random.Random(f"{median_us}:{seed}")
    half = [median_us * (1 + abs(rng.gauss(0, spread))) for _ in range(count // 2)]
    low = [median_us * (1 - abs(rng.gauss(0, spread))) for _ in range(count // 2)]
    us = [*half, *low, *([median_us] if count % 2 else [])]
    rng.shuffle(us)
    return Samples(us=tuple(us), taken=count, stop="noise")


def point(
    size: int,
    context_tokens: int,
    execution: Execution,
    step_us: float,
    *,
    gpu_us: float | None = None,
    host_parts_us: tuple[float, float, float] = (60.0, 20.0, 10.0),
    spread: float = 0.0,
    seed: int = 0,
) -> Point:
    """One point whose medians are the figures given; ``host_parts_us`` are plan, fill and launch."""
    plan, fill, launch = host_parts_us
    on_graph = execution == "graph"
    host = plan + launch + (fill if on_graph else 0.0)
    gpu = max(step_us - host, 1.0) if gpu_us is None else gpu_us

    def around(us: float) -> Samples:
        return samples(us, spread=spread, seed=seed)

    return Point(
        phase="decode",
        raw_size=size,
        padded_size=size,
        context_tokens=context_tokens,
        execution=execution,
        backend="full" if on_graph else "eager",
        attention="flashinfer",
        gpu_us=around(gpu),
        host_us=around(host),
        step_us=around(step_us),
        plan_us=around(plan),
        fill_us=around(fill) if on_graph else None,
        launch_us=around(launch),
        overlap_us=around(gpu + 20.0) if on_graph else None,
    )


def gate_check(size: int, passed: bool = True) -> GateCheck:
    return GateCheck(
        size=size,
        raw_sizes=tuple(sorted({1, max(1, size - 1), size})),
        equal_at_padded=passed,
        error_at_padded=0.0 if passed else 0.4,
        error_at_raw=0.004 if passed else 0.4,
        tolerance_at_raw=0.02,
        kv_untouched=passed,
        passed=passed,
        reason=None if passed else "replay differs from eager at the padded shape",
    )


def captured_list(
    of: CaptureList,
    *,
    position: int = 1,
    first_bytes: int = 90 * MIB,
    each_bytes: int = MIB,
    failing: Iterable[int] = (),
    gate: bool = True,
    seconds_each: float = 0.028,
) -> CapturedList:
    """A list as captured: the first capture costs ``first_bytes``, each further one ``each_bytes``."""
    bad = set(failing)
    order = sorted(of.sizes, reverse=of.order == "descending")
    captures = []
    for index, size in enumerate(order):
        growth = first_bytes if index == 0 else each_bytes
        captures.append(
            Capture(
                size=size,
                warmup_s=0.55 * seconds_each + size * 1e-5,
                record_s=0.35 * seconds_each,
                instantiate_s=0.10 * seconds_each,
                pool_growth_bytes=growth // 2,
                retained_bytes=growth,
                peak_bytes=growth + 5 * MIB,
                nodes=427,
                segments=1,
                key=str(size),
            )
        )
    total = sum(capture.retained_bytes or 0 for capture in captures)
    return CapturedList(
        list=of,
        position_in_process=position,
        status="ok",
        reason=None,
        captures=tuple(captures),
        gate=tuple(gate_check(size, size not in bad) for size in of.sizes) if gate else (),
        graph_bytes=total,
        pool_bytes=total // 2,
        outside_torch_bytes=total - total // 2,
        peak_bytes=total + 12 * MIB,
        capture_s=sum((c.warmup_s or 0) + (c.record_s or 0) + (c.instantiate_s or 0) for c in captures),
        leftover_bytes=0,
    )


def ledger(of: CapturedList, facts: ModelFacts, context_bytes: int = 700 * MIB) -> MemoryLedger:
    """Marks of a process that loads a model and captures one list; both readings agree."""
    marks: list[Mark] = []
    torch_bytes, outside, pool, at = 0, context_bytes - 180 * MIB, 0, 0.4

    def mark(stage: str, size: int | None = None, index: int | None = None) -> None:
        device = torch_bytes + pool + outside
        marks.append(
            Mark(
                stage,
                index,
                size,
                torch_bytes + pool - MIB,
                torch_bytes + pool,
                pool,
                None,
                device + 2 * MIB,
                device,
                at,
            )
        )

    mark("context")
    for stage, growth in (
        ("weights", facts.weights_bytes),
        ("kv_cache", facts.kv_pool_bytes),
        ("workspace", facts.workspace_bytes),
        ("buffers", facts.static_buffer_bytes),
    ):
        torch_bytes += growth
        at += 1.2
        mark(stage)
    outside += 180 * MIB
    at += 3.0
    mark("eager_warmup")
    for capture in of.captures:
        pool += capture.pool_growth_bytes or 0
        outside += (capture.retained_bytes or 0) - (capture.pool_growth_bytes or 0)
        at += 0.03
        mark("capture", capture.size, 0)
    mark("captured", index=0)
    mark("replayed", index=0)
    outside -= sum((c.retained_bytes or 0) - (c.pool_growth_bytes or 0) for c in of.captures)
    pool = 0
    mark("torn_down", index=0)
    return MemoryLedger(tuple(marks), "nvml_device", disagreement_bytes=2 * MIB, unexplained_bytes=0)


def decoder_us(raw_size: int, bucket: int, context_tokens: int) -> float:
    """Device time of a memory-bound decoder: a floor, tiles of 64 rows, rows, KV reads of the live ones."""
    return 4650 + 95 * math.ceil(bucket / 64) + 8 * bucket + raw_size * context_tokens * 131072 / 4.1e6


def padded_points(
    padded: Iterable[PaddedTo], context_tokens: int, device_us: Callable[[int, int], float]
) -> list[Point]:
    """Padded replays that take ``device_us`` of the raw size and the bucket."""
    return [
        replace(
            point(one.raw_size, context_tokens, "graph", 0.0),
            padded_size=bucket,
            gpu_us=samples(device_us(one.raw_size, bucket), count=3),
            **dict.fromkeys(("host_us", "step_us", "plan_us", "fill_us", "launch_us", "overlap_us")),
        )
        for one in padded
        for bucket in one.buckets
    ]


def latency_points(
    sizes: Sequence[int], context_tokens: int, *, bias: float = 1.0, spread: float = 0.004, seed: int = 0
) -> list[Point]:
    """Graph and eager points shaped like a memory-bound decoder, and what the host takes."""
    points = []
    for size in sizes:
        gpu = decoder_us(size, size, context_tokens) * bias
        plan = 70 + 0.15 * size
        points.append(
            point(
                size,
                context_tokens,
                "graph",
                gpu + plan + 35,
                gpu_us=gpu,
                host_parts_us=(plan, 22, 11),
                spread=spread,
                seed=seed,
            )
        )
        eager_gpu = max(gpu * 1.01, 6050 + 3 * size)
        eager_host = 6100.0 - plan
        points.append(
            point(
                size,
                context_tokens,
                "eager",
                eager_gpu + plan + 260,
                gpu_us=eager_gpu,
                host_parts_us=(plan, 0, eager_host),
                spread=spread,
                seed=seed,
            )
        )
    return points


def timelines(kernels: int = 427, context_tokens: int = 1024) -> tuple[Timeline, Timeline]:
    """An eager step whose launches leave gaps, and a replay of one call, of the same kernels."""
    names = ("void gemm<bf16, 128>(Params)", "void norm_kernel<float>(float*)", "paged_attention")
    lengths = [(10.4, 2.1, 19.3)[at % 3] for at in range(kernels)]
    lines = []
    for execution, gap in (("eager", 4.6), ("graph", 0.9)):
        starts, at_us = [], 8.0
        for length in lengths:
            starts.append(round(at_us, 2))
            at_us += length + gap
        calls = [round(start - 7.5, 2) for start in starts] if execution == "eager" else [0.0]
        lines.append(
            Timeline(
                size=1,
                context_tokens=context_tokens,
                execution="eager" if execution == "eager" else "graph",
                names=names,
                kernels=tuple(at % 3 for at in range(kernels)),
                starts_us=tuple(starts),
                lengths_us=tuple(lengths),
                call_starts_us=tuple(calls),
                call_lengths_us=(4.1,) * len(calls),
            )
        )
    return lines[0], lines[1]


@dataclass(frozen=True)
class SettingBytes:
    """Bytes of the first and each further capture under one setting."""

    first: int
    each: int


def setting_bytes(of: CaptureList) -> SettingBytes:
    if of.output == "shared" and of.workspace == "shared":
        return SettingBytes(90 * MIB, MIB) if of.order == "descending" else SettingBytes(40 * MIB, 27 * MIB)
    return SettingBytes(120 * MIB, 27 * MIB)


def cell_result(
    lists: Sequence[CapturedList],
    points: Sequence[Point],
    *,
    device: str = "cuda",
    process: int = 1,
    purpose: str = "main",
    facts: ModelFacts | None = None,
    profiles: Sequence[LaunchProfile] = (),
    with_ledger: bool = True,
    model_name: str = "synthetic-8b",
) -> CellResult:
    facts = facts or model_facts()
    contexts = sorted({p.context_tokens for p in points})
    latency = tuple(
        LatencyAt(tuple(sorted({p.raw_size for p in points if p.context_tokens == context})), context)
        for context in contexts
    )
    cell = Cell(
        model_name=model_name,
        model_config=LLAMA_8B,
        weights=None,
        dtype="bfloat16",
        shard=facts.shard_of,
        seed=0,
        phase="decode",
        attention="flashinfer" if device == "cuda" else "sdpa",
        page_size=16,
        kv_tokens=facts.kv_tokens,
        lists=tuple(of.list for of in lists),
        latency=latency,
        measure=Measure(),
        purpose=purpose,
        process=process,
    )
    return CellResult(
        schema=SCHEMA,
        cell_id=cell.id,
        cell=asdict(cell),
        status="ok",
        reason=None,
        environment=environment(device),
        model=facts,
        captured_lists=tuple(lists),
        points=tuple(points),
        ledger=ledger(lists[0], facts) if with_ledger and lists and device == "cuda" else None,
        launch_profiles=tuple(profiles),
        admission={"graph": 10, "above_top": 1},
        phase_seconds={"import": 4.1, "load": 6.2, "warm_up": 2.8, "capture": 1.1, "gate": 3.0, "latency": 24.0},
        started_at="2026-01-02T03:04:05+00:00",
        finished_at="2026-01-02T03:05:05+00:00",
    )


def failed_cell(reason: str = "out of memory while capturing size 512: short 136 MiB") -> CellResult:
    of = CaptureList("vllm", "decode", "full", VLLM_LIST, "ascending", "per_size", "per_size")
    done = cell_result([captured_list(of)], [], with_ledger=False, process=9)
    return replace(done, status="oom", reason=reason, captured_lists=(), model=None, environment=None)


def sweep(
    cells: Sequence[CellResult],
    *,
    path: Path = Path("reports/synthetic-8b-nvidia-h200"),
    skips: Sequence[Skip] = (),
    notes: Sequence[str] = (),
    device: str = "cuda",
    model_name: str = "synthetic-8b",
) -> Sweep:
    return Sweep(
        recipe_name="synthetic-8b",
        recipe={"name": "synthetic-8b"},
        recipe_sha="0" * 64,
        model_name=model_name,
        device="cuda" if device == "cuda" else "cpu",
        device_name=environment(device).device_name,
        started_at="2026-01-02T03:04:00+00:00",
        finished_at="2026-01-02T03:09:00+00:00",
        skips=tuple(skips),
        notes=tuple(notes),
        path=path,
        cells=tuple(cells),
    )


def small_sweep(
    sizes: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    graph_us: Sequence[float] | None = None,
    eager_us: Sequence[float] | None = None,
    processes: int = 1,
    failing: Iterable[int] = (),
    device: str = "cuda",
    context_tokens: int = 1024,
) -> Sweep:
    """One list, one context, exact medians: what arithmetic tests need."""
    graph = graph_us or [1000.0 + 10 * size for size in sizes]
    eager = eager_us or [3000.0 + 10 * size for size in sizes]
    of = CaptureList("main", "decode", "full", tuple(sizes))
    points = [point(s, context_tokens, "graph", us) for s, us in zip(sizes, graph, strict=True)]
    points += [point(s, context_tokens, "eager", us) for s, us in zip(sizes, eager, strict=True)]
    cells = [
        cell_result([captured_list(of, failing=failing)], points, process=process, device=device)
        for process in range(1, processes + 1)
    ]
    return sweep(cells, device=device)


def h200_sweep(path: Path = Path("reports/synthetic-8b-nvidia-h200")) -> Sweep:
    """A decode sweep as rich as a real one: four lists, four settings, two processes, controls, profiles, a failure."""
    main = CaptureList("sglang", "decode", "full", SGLANG_LIST)
    union = tuple(sorted({*SGLANG_LIST, *VLLM_LIST}))
    cells = []
    for process, bias in ((1, 1.0), (2, 1.004)):
        points = latency_points(union, 1024, bias=bias, seed=process)
        for context in (512, 4096, 16384):
            points += latency_points(SPARSE_SIZES, context, bias=bias, seed=process)
        if process == 1:
            points += padded_points(padded_steps(union), 1024, partial(decoder_us, context_tokens=1024))
        profiles = [
            LaunchProfile(size, 1024, "eager", 427, kernel, max(kernel * 1.02, 6050.0), max(0.02, 1 - kernel / 6050))
            for size, kernel in ((1, 4600.0), (16, 5200.0), (64, 7100.0), (256, 15200.0))
        ]
        timed = cell_result([captured_list(main)], points, process=process, profiles=profiles)
        cells.append(replace(timed, timelines=timelines()))
    position = 0
    lists = []
    for name, sizes in (
        ("sglang", SGLANG_LIST),
        ("vllm", VLLM_LIST),
        ("tensorrt_llm", TENSORRT_LIST),
        ("powers", POWERS),
    ):
        for order in ("descending", "ascending"):
            for sharing in ("shared", "per_size"):
                position += 1
                of = CaptureList(name, "decode", "full", sizes, order, sharing, sharing)
                cost = setting_bytes(of)
                lists.append(captured_list(of, position=position, first_bytes=cost.first, each_bytes=cost.each))
    cells.append(cell_result(lists, [], process=1, purpose="main"))
    control = CaptureList("powers", "decode", "full", POWERS)
    cells.append(cell_result([captured_list(control, first_bytes=92 * MIB)], [], purpose="control", with_ledger=False))
    cells.append(failed_cell())
    skips = [Skip("context 65536 at 256 requests", "needs 16,777,216 KV tokens, the pool holds 300,000")]
    return sweep(cells, path=path, skips=skips, notes=("random weights: outputs mean nothing, times do",))


PREFILL_LIST = (4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)


def prefill_points(
    buckets: Sequence[int] = PREFILL_LIST, *, backend: str = "breakable", bias: float = 1.0, eager: bool = True
) -> list[Point]:
    """Replays at every bucket and just over the one below, eager at the same raw sizes: a floor, then a slope."""

    def at(raw: int, padded: int, of: str, step_us: float) -> Point:
        execution: Execution = "eager" if of == "eager" else "graph"
        made = point(raw, 0, execution, step_us * bias)
        return replace(made, phase="prefill", padded_size=padded, backend=of, requests=1)

    found = []
    for below, bucket in zip((0, *buckets), buckets, strict=False):
        for raw in sorted({below + 1, bucket}):
            work = 18.0 * bucket + 0.0004 * raw * bucket
            found.append(at(raw, bucket, backend, max(4900.0, work) + 260.0))
            if eager:
                found.append(at(raw, raw, "eager", max(6500.0, 18.0 * raw + 0.0004 * raw * raw) + 240.0))
    return found


def prefill_cell(process: int = 1, bias: float = 1.0) -> CellResult:
    """A process that captured and timed prefill: breakable in full, one full recording of fewer buckets."""
    breakable = CaptureList("sglang", "prefill", "breakable", PREFILL_LIST)
    full = CaptureList("few", "prefill", "full", PREFILL_LIST[::4])
    points = prefill_points(bias=bias)
    points += prefill_points(full.sizes, backend="full", bias=bias * 0.97, eager=False)
    profiles = [
        LaunchProfile(64, 0, "eager", 427, 4900.0, 6700.0, 0.27, "prefill", "eager"),
        LaunchProfile(64, 0, "graph", 427, 4900.0, 5150.0, 0.05, "prefill", "breakable", 33, 96),
        LaunchProfile(1024, 0, "eager", 427, 18800.0, 18900.0, 0.01, "prefill", "eager"),
        LaunchProfile(1024, 0, "graph", 427, 18800.0, 18850.0, 0.003, "prefill", "breakable", 33, 96),
    ]
    lists = [captured_list(breakable, first_bytes=800 * MIB, each_bytes=9 * MIB), captured_list(full, position=2)]
    made = cell_result(lists, points, process=process, profiles=profiles, with_ledger=False)
    lines = tuple(replace(line, phase="prefill", size=64) for line in timelines(60, context_tokens=0))
    return replace(made, cell={**made.cell, "phase": "prefill"}, timelines=lines)


def joint_cell(*phases: Phase) -> CellResult:
    """A decode and a prefill list in one pool: the second one finds most of what it needs there."""
    lists = {
        "decode": CaptureList("sglang", "decode", "full", SGLANG_LIST),
        "prefill": CaptureList("sglang", "prefill", "breakable", PREFILL_LIST),
    }
    first = {"decode": 90 * MIB, "prefill": 800 * MIB}
    captured = [
        captured_list(lists[phase], first_bytes=first[phase] if index == 0 else 20 * MIB, position=index + 1)
        for index, phase in enumerate(phases)
    ]
    return cell_result(captured, [], purpose="joint", with_ledger=False)


def both_phases_sweep(path: Path = Path("reports/synthetic-8b-nvidia-h200")) -> Sweep:
    """The rich decode sweep, prefill measured by two processes, and both phases in one pool in either order."""
    of = h200_sweep(path)
    joint = (joint_cell("decode", "prefill"), joint_cell("prefill", "decode"))
    return replace(of, cells=(*of.cells, prefill_cell(1), prefill_cell(2, 1.006), *joint))


def both_phases_traffic() -> Workload:
    """Steps of decode and, fewer, of prefill, some above what pays."""
    decode = tuple(DecodeShare(requests, 1.0 / requests) for requests in range(1, 129))
    prefill = tuple(PrefillShare(tokens, 4096.0 / (64 + tokens)) for tokens in range(16, 2049, 16))
    return Workload(decode, prefill, 128, 2048, "made up", "per_step")


def cpu_sweep(path: Path = Path("reports/synthetic-tiny-cpu")) -> Sweep:
    """A sweep of the machinery on a CPU: no ledger readings of a device, no launches."""
    sizes = (1, 2, 4, 8)
    of = CaptureList("tiny", "decode", "full", sizes)
    points = [point(s, 64, "graph", 900.0 + 40 * s) for s in sizes] + [
        point(s, 64, "eager", 880.0 + 40 * s) for s in sizes
    ]
    cells = [
        cell_result([captured_list(of, first_bytes=MIB, each_bytes=1024)], points, device="cpu", process=n)
        for n in (1, 2)
    ]
    return sweep(cells, path=path, device="cpu", model_name="synthetic-tiny")


def write_sweep(of: Sweep, path: Path) -> Path:
    """Store a sweep as `graphtune sweep` does; returns its folder."""
    head = {name: getattr(of, name) for name in Run.__dataclass_fields__}
    writer = SweepWriter(path, Run(**head))
    for cell in of.cells:
        writer.append(cell)
    return path
