"""Verdicts on what a server's log says happened: modes, gaps, failures, ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphtune.engines.base import Flags
from graphtune.tune.log_records import BatchUse, BootSummary, Failure, LogSummary
from graphtune.tune.verdict import LintReport, PhaseFacts, Verdict, worst_first
from graphtune.units import format_bytes

# A share of steps off graph below this is start-up noise.
WORTH_A_WORD = 0.01
HIGH_UTILIZATION = 0.95
PREFILL_CAP = 2.0
# The estimate of graph memory is worth a word when it is off by this share.
ESTIMATE_OFF = 0.1


def lint_log(summary: LogSummary, contradictions: Iterable[str] = ()) -> LintReport:
    """All verdicts on the last boot in a log; failures of earlier boots are listed too."""
    last = summary.boots[-1]
    verdicts = [verdict for boot in summary.boots for verdict in _failures(boot)]
    verdicts += [
        *_modes(last),
        *_decode(last),
        *_steps(last),
        *_prefill(last),
        *_lists(last),
        *_memory(last),
    ]
    verdicts += [Verdict("risk", text) for text in (*last.disagreements, *contradictions)]
    phases = tuple(
        PhaseFacts(
            f"{capture.role} {capture.phase or 'all'}",
            None,
            capture.unit,
            capture.sizes or (),
            f"{capture.count} graphs" if capture.count is not None else "number of graphs not stated",
            capture.count or 0,
            f"rank {capture.rank}" if capture.rank else "",
        )
        for capture in last.captures
    )
    return LintReport(summary.engine or "unknown", last.version, "log", worst_first(verdicts), phases)


def _failures(boot: BootSummary) -> Iterator[Verdict]:
    for failure in boot.failures:
        yield _capture_error(failure) if failure.kind == "capture" else _out_of_memory(boot, failure)


def _at(failure: Failure) -> str:
    if failure.size is None:
        return ""
    return f" while capturing size {failure.size} ({failure.unit})"


def _capture_error(failure: Failure) -> Verdict:
    text = (
        f"capture failed{_at(failure)} on {failure.operation}: not a memory problem, so that fewer sizes or more free "
        "memory do not help; the operation must leave the captured part"
    )
    sizes = (failure.size,) if failure.size is not None else ()
    return Verdict("error", text, sizes=sizes, unit=failure.unit, where=failure.rank or None)


def _out_of_memory(boot: BootSummary, failure: Failure) -> Verdict:
    text = f"out of memory{_at(failure)}"
    if failure.asked_bytes is not None:
        text += f": {format_bytes(failure.asked_bytes)} asked"
    if failure.free_bytes is not None:
        text += f", {format_bytes(failure.free_bytes)} free"
    if failure.short_bytes is not None:
        text += f", short by {failure.short_bytes / (1 << 20):.2f} MiB"
    edit, mended = _less_memory(boot, failure)
    sizes = (failure.size,) if failure.size is not None else ()
    return Verdict("error", text, sizes=sizes, unit=failure.unit, where=failure.rank or None, edit=edit, mended=mended)


def _less_memory(boot: BootSummary, failure: Failure) -> tuple[tuple[str, ...], Flags | None]:
    """The smallest change that frees what was short: a lower fraction, by the card's size where the log tells it."""
    fraction = boot.settings.get("mem_fraction_static", boot.settings.get("gpu_memory_utilization"))
    option = {"sglang": "--mem-fraction-static", "vllm": "--gpu-memory-utilization"}.get(boot.engine or "")
    if option is None:
        return (), None
    short, total = failure.short_bytes, boot.memory.get("total")
    if not isinstance(fraction, float):
        return ((f"lower {option} (it is not stated in the log), or capture smaller sizes",), None)
    step = 0.01 if short is None or total is None else short * 1.25 / total
    lower = int((fraction - step) * 1000) / 1000
    return ((f"{option} {fraction:g} → {option} {lower:g}",), Flags(args=(option, f"{lower:g}")))


def _modes(boot: BootSummary) -> Iterator[Verdict]:
    for change in boot.modes:
        asked, runs, reason = change["asked"], change["runs"], change["reason"]
        text = f"asked {asked or 'another mode'}, the engine runs {runs}" + (f": {reason}" if reason else "")
        flags = Flags(args=("-cc.cudagraph_mode", str(runs)))
        edit = (f"-cc.cudagraph_mode {runs}, or an attention backend that supports {asked or 'the mode asked for'}",)
        yield Verdict("mode", text, asked=asked, runs=runs, edit=edit, mended=flags)
    if boot.prefill_off is not None:
        text = f"prefill: graphs asked for, the engine runs none: {boot.prefill_off}"
        yield Verdict("mode", text, "prefill", asked="graphs", runs="disabled")


def _decode(boot: BootSummary) -> Iterator[Verdict]:
    use = boot.decode
    if use is None or not use.readings:
        return
    if use.above_top is not None and use.above_top >= WORTH_A_WORD:
        assert use.top is not None
        wanted = use.percentiles.get("p99", use.percentiles["max"])
        text = (
            f"{use.above_top:.0%} of {_weighed(use)} run above the largest size {use.top}; covering p99 takes {wanted} "
            f"requests (median {use.percentiles['p50']}, max {use.percentiles['max']})"
        )
        if boot.engine == "sglang" or use.off_graph:
            text += ". Slow eager steps make batches grow: these sizes are inflated by the gap itself, measure again"
        edit, mended = _larger(boot, wanted)
        yield Verdict(
            "gap",
            text,
            "decode",
            unit="requests",
            covered=use.top,
            reachable=use.percentiles["max"],
            edit=edit,
            mended=mended,
        )
    elif use.off_graph is not None and use.off_graph >= WORTH_A_WORD:
        text = f"{use.off_graph:.0%} of {_weighed(use)} ran without a graph, at {_sizes_text(use)}"
        text += "" if use.top is None else f", though the largest size is {use.top}"
        yield Verdict("gap", text, "decode", unit="requests", covered=use.top, reachable=use.percentiles["max"])


def _larger(boot: BootSummary, requests: int) -> tuple[tuple[str, ...], Flags | None]:
    """The flag that covers a number of requests."""
    if boot.engine == "sglang":
        args: tuple[str, ...] = ("--cuda-graph-max-bs-decode", str(requests))
    elif boot.engine == "vllm":
        tokens = requests * (1 + int(boot.settings.get("spec_tokens", 0)))
        args = ("--max-cudagraph-capture-size", str(-(-tokens // 16) * 16))
    else:
        yaml = f"cuda_graph_config:\n  enable_padding: true\n  max_batch_size: {requests}\n"
        return (f"cuda_graph_config.max_batch_size: {requests}",), Flags(yaml=yaml)
    return (" ".join(args),), Flags(args=args)


def _weighed(use: BatchUse) -> str:
    return f"decode {use.weighting}" if use.weighting == "iterations" else "decode time (readings every 10 s)"


def _sizes_text(use: BatchUse) -> str:
    return f"{use.percentiles['p50']} requests in the median, {use.percentiles['max']} at most"


def _steps(boot: BootSummary) -> Iterator[Verdict]:
    steps = boot.steps
    if steps is not None and steps.eager >= WORTH_A_WORD:
        text = f"{steps.eager:.0%} of {steps.steps} steps ran eagerly (mode NONE)"
        if steps.above_top is not None:
            text += f", {steps.above_top:.0%} above the largest size {steps.top}"
        yield Verdict("gap", text, "all", unit="tokens", covered=steps.top)


def _prefill(boot: BootSummary) -> Iterator[Verdict]:
    """Prefill batches that no captured size serves within the engine's padding limit."""
    use, captures = boot.prefill, boot.captured("prefill")
    sizes = next((capture.sizes for capture in captures if capture.phase == "prefill" and capture.sizes), None)
    if use is None or sizes is None:
        return
    total = sum(weight for _, weight in use.histogram)
    far = [(raw, weight, _bucket(raw, sizes)) for raw, weight in use.histogram]
    bad = [(raw, weight, size) for raw, weight, size in far if size is None or size > PREFILL_CAP * raw]
    lost = sum(weight for _, weight, _ in bad)
    if not total or lost / total < WORTH_A_WORD:
        return
    examples = "; ".join(
        f"{raw} tokens → {size}, {size / raw:.2f} times"
        if size is not None
        else f"{raw} tokens: above the largest size"
        for raw, _, size in sorted(bad, key=lambda item: -item[1])[:4]
    )
    text = f"{lost / total:.0%} of prefill batches have no size within twice their tokens: {examples}"
    add = tuple(sorted({*sizes, *(raw for raw, _, _ in bad[:64])}))
    edit: tuple[str, ...] = ()
    mended: Flags | None = None
    if boot.engine == "sglang" and len(bad) <= 64:
        args = ("--cuda-graph-bs-prefill", *(str(size) for size in add))
        edit, mended = (" ".join(args),), Flags(args=args)
    yield Verdict(
        "gap", text, "prefill", sizes=tuple(raw for raw, _, _ in bad[:64]), unit="tokens", edit=edit, mended=mended
    )


def _bucket(raw: int, sizes: tuple[int, ...]) -> int | None:
    return next((size for size in sizes if size >= raw), None)


def _lists(boot: BootSummary) -> Iterator[Verdict]:
    for text in boot.list_changes:
        yield Verdict("changed", text)


def _memory(boot: BootSummary) -> Iterator[Verdict]:
    suggested = boot.utilization.get("suggested")
    if suggested is not None and suggested > HIGH_UTILIZATION:
        text = f"the engine suggests a utilization of {suggested:g}; above {HIGH_UTILIZATION:g} an allocation may fail"
        flags = Flags(args=("--gpu-memory-utilization", f"{HIGH_UTILIZATION:g}"))
        edit = (f"--gpu-memory-utilization {HIGH_UTILIZATION:g}, or --kv-cache-memory-bytes",)
        yield Verdict("risk", text, edit=edit, mended=flags)
    estimated, actual = boot.estimated_bytes, boot.actual_bytes
    if estimated is not None and actual is not None and actual > estimated * (1 + ESTIMATE_OFF):
        text = f"graphs took {format_bytes(actual)}, the engine estimated {format_bytes(estimated)}"
        yield Verdict("risk", f"{text}: the difference comes out of what utilization leaves free")
