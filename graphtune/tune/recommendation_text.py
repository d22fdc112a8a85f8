"""A recommendation as text of at most 80 columns, readable without colour."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterable

from graphtune.engines.base import Flags
from graphtune.tune.bucket_worth import BucketWorth
from graphtune.tune.current_launch import SETTINGS_FILE
from graphtune.tune.kv_budget import KvBudget
from graphtune.tune.recommendation import Caution, CurrentAnswer, EngineAnswer, ListAnswer, Recommendation, Simulated
from graphtune.units import format_bytes, format_duration_s, format_us

WIDTH = 80
CPU_NOTE = (
    "A check of the machinery on a CPU, not advice: eager and graphs are not distinguished here, and no time is saved."
)
TOLERANCE = (
    "A list is faster when its expected step is shorter in every process by more than 1 % and by more than the "
    "processes disagree about that ratio."
)
EAGER = "graphtune's own eager path, a lower bound of a server's eager step"
# A share of steps that is shown as 0.0 % otherwise.
WORTH_A_WORD = 0.0005
LEAST_LEFT_OUT = 0.005  # of the steps; less would round to all of them
# How bytes and seconds that were not measured of the very list are marked.
MARKS = {"bound": "<= ", "predicted": "~"}
NAMES = {"sglang": "SGLang", "vllm": "vLLM", "tensorrt_llm": "TensorRT-LLM"}


def as_text(of: Recommendation) -> str:
    """The answer. The first line names model, GPU, date and path of the sweep."""
    facts = of.sweep
    date = (facts.finished_at or "not finished")[:10]
    lines = [f"{facts.model} on {facts.latency_device}, {date}, {facts.path}"]
    if facts.environment is not None and facts.environment.device == "cpu":
        lines += wrapped(CPU_NOTE)
    lines += wrapped(f"Card: {of.gpu.rule}." if of.gpu else "Card: not known, so there is no KV budget.")
    lines += wrapped(f"Traffic: {traffic(of)}.{how_to_ask(of)}")
    if of.eager_overhead_us:
        lines += wrapped(f"Eager steps: {format_us(of.eager_overhead_us)} added to each.")
    lines += wrapped(
        f"Step times: {facts.statistic}, {facts.attention} attention; {of.noise.words}; {of.interpolation.words}."
    )
    lines += wrapped(TOLERANCE)
    if of.calibration is not None:
        name = NAMES.get(of.calibration.engine, of.calibration.engine)
        lines += wrapped(f"Calibrated: figures of {name} by {of.calibration.source}: {of.calibration.sentence}.")
    for answer in of.engines:
        lines += ["", *_engine(answer)]
    lines += [
        "",
        *wrapped(
            "~ interpolated between measured points, or predicted from sizes captured alone; <= at most: the bytes and "
            "seconds of a longer list"
        ),
        *wrapped(f"no graphs: {EAGER}{with_overhead(of)}"),
    ]
    return "\n".join(lines) + "\n"


def warnings_text(warnings: Iterable[Caution]) -> str:
    """Warnings for stderr, each with its action."""
    return "".join("\n".join(wrapped(f"warning: {one.message} {one.action}", hang="  ")) + "\n" for one in warnings)


def traffic(of: Recommendation) -> str:
    """The traffic in words."""
    workload, context = of.workload, of.limits.context_tokens
    if not workload.decode:
        return workload.source
    asked = sum(share.weight for share in workload.decode)
    means = sorted({share.mean_kv_tokens or context for share in workload.decode})
    tokens = f"{means[0]:,.0f}" if len(means) == 1 else f"{means[0]:,.0f} to {means[-1]:,.0f}"
    mean = sum(share.weight * share.requests for share in workload.decode) / asked if asked else 0.0
    most = f"up to {workload.max_running_requests} requests"
    if len(workload.decode) == 1:
        most = f"always {workload.decode[0].requests} running"
    elif workload.source == "uniform":
        most += f", every number equally often (mean {mean:,.1f})"
    else:
        most += f" (mean {mean:,.1f})"
    words = f"{workload.source}, {most}, {tokens} KV tokens each"
    return words + (f", {workload.lines_skipped} lines skipped" if workload.lines_skipped else "")


def how_to_ask(of: Recommendation) -> str:
    """Which part of the traffic was assumed, and how to give one's own; nothing when all of it was given."""
    if not of.assumed:
        return ""
    largest = ", the largest measured size" if "--max-running" in of.assumed else ""
    options = {
        "--workload": "--workload FILE or 'steady N'",
        "--max-running": "--max-running N",
        "--context-len": "--context-len N",
    }
    return f" That is assumed{largest}: give your own with {', '.join(options[name] for name in of.assumed)}."


def with_overhead(of: Recommendation) -> str:
    """What was added to eager steps, as the end of a sentence."""
    return f", with {format_us(of.eager_overhead_us)} added" if of.eager_overhead_us else ""


def size_range(sizes: tuple[int, ...]) -> str:
    """``36 sizes, 1 to 256``."""
    if not sizes:
        return "none"
    return f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"1 size, {sizes[0]}"


def _engine(answer: EngineAnswer) -> list[str]:
    lines = wrapped(f"{NAMES.get(answer.engine, answer.engine)} {answer.version}: {answer.message}", hang="  ")
    if answer.decode is None:
        if answer.memory is not None and not answer.memory.fits:
            lines += wrapped(memory_words(answer.memory), indent="  ", hang="  ")
        for words in prefill_words(answer):
            lines += wrapped(words, indent="  ", hang="  ")
        return [*lines, *(flag_lines(answer.flags, WIDTH) if answer.flags is not None else [])]
    if answer.steps_share < 1 - LEAST_LEFT_OUT:
        words = f"all figures are of {answer.steps_share:.0%} of the steps asked for; the others are left out"
        lines += wrapped(words, indent="  ", hang="  ")
    running = ("current", answer.current.list) if answer.current is not None else ("engine default", answer.default)
    columns = [("recommended", answer.decode), running, ("no graphs", answer.eager)]
    shown = [(title, of) for title, of in columns if of is not None]
    lines.append("  " + " " * 16 + "".join(f"{title:>20}" for title, _ in shown))
    for title, cell in decode_rows(answer):
        lines.append(f"  {title:<16}" + "".join(f"{cell(of):>20}" for _, of in shown))
    if answer.memory is not None:
        lines += wrapped(memory_words(answer.memory), indent="  ", hang="  ")
    for words in (alternatives(answer), *bucket_words(answer), *prefill_words(answer)):
        if words:
            lines += wrapped(words, indent="  ", hang="  ")
    if answer.current is not None:
        lines += _current(answer.current)
    decided = answer.current is not None and (answer.current.leave_it or answer.current.command is not None)
    if answer.flags is not None and not decided:
        lines += flag_lines(answer.flags, WIDTH)
    return lines


def _current(of: CurrentAnswer) -> list[str]:
    """The advice, the changed flags, and the whole launch to paste."""
    lines = wrapped(of.message, indent="  ", hang="  ")
    for edit in of.edits:
        lines += wrapped(edit, indent="  - ", hang="    ")
    if of.command is None:
        return lines if of.leave_it else [*lines, *wrapped(of.absent["command"], indent="  ", hang="  ")]
    if of.command.args:
        lines += flag_lines(Flags(args=of.command.args), WIDTH)
    if of.command.yaml is None:
        return lines
    named = [f"{SETTINGS_FILE}:"] if of.command.args else []
    return [*lines, *named, *flag_lines(Flags(yaml=of.command.yaml), WIDTH)]


def alternatives(answer: EngineAnswer) -> str:
    """The runner-up with how it compares, and how many lists tie."""
    words = []
    up = answer.runner_up
    if up is not None and up.expected_step_us is not None:
        what = "no graphs" if up.is_eager else f"{size_range(up.capture_sizes)}, {_bytes(up)}"
        words.append(f"runner-up: {what}, {_step(up)} (recommended is {_compared(up)})")
    if answer.ties:
        words.append(f"{len(answer.ties)} other lists are as fast")
    return "; ".join(words)


def prefill_words(answer: EngineAnswer) -> list[str]:
    """The prefill list beside that of decode, against the engine's own and no graphs; both together."""
    of, own, eager = answer.prefill, answer.prefill_default, answer.prefill_eager
    if of is None or own is None or eager is None:
        return []
    what = "no graphs" if of.is_eager else f"{size_range(of.capture_sizes)} tokens, {of.backend}, {_bytes(of)}"
    others = [f"eager {_step(eager)}"]
    if not own.is_eager:
        others.append(f"the engine's own {size_range(own.capture_sizes)}: {_step(own)}, {_bytes(own)}")
    words = [f"prefill: {what}: {_step(of)} a step, {_share(of.coverage)} on graphs ({'; '.join(others)})"]
    if answer.joint is not None:
        together = f"both phases: {format_bytes(answer.joint.graph_bytes)} of graphs"
        if answer.joint.capture_s is not None:
            together += f", {format_duration_s(answer.joint.capture_s)} to capture"
        if answer.joint.tokens_per_s is not None:
            most = answer.joint.max_running_requests
            limit = f" with at most {most} running" if most is not None else ""
            together += f"; at most {answer.joint.tokens_per_s:,.0f} tokens a second{limit}"
        words.append(together)
    return words


def bucket_words(answer: EngineAnswer) -> list[str]:
    """What the buckets earn, what the steps above the top lose, and which buckets never pay back their capture."""
    assert answer.decode is not None
    words = []
    earning = [bucket for bucket in answer.decode.buckets if bucket.earned_us is not None and bucket.earned_us > 0]
    if earning:
        least, most = (pick(earning, key=lambda bucket: bucket.earned_us or 0.0) for pick in (min, max))
        words.append(f"a step is {_earned(most)} longer without bucket {most.size}")
        if least is not most:
            words[-1] += f", {_earned(least)} without {least.size}"
    kept = [bucket.size for bucket in answer.decode.buckets if bucket.never_pays]
    # Without another size than the top its steps take the next one, unless the engine replays exact sizes only.
    covering = [size for size in kept if size == answer.decode.capture_sizes[-1] or answer.dispatch.decode == "exact"]
    if covering:
        words.append(
            f"kept to cover steps for which graphtune's own eager path is as fast, as a server's is not: "
            f"{_numbers(covering)}"
        )
    if idle := [size for size in kept if size not in covering]:
        words.append(f"buckets of this list that do not pay back their capture in 30 days of serving: {_numbers(idle)}")
    buckets = answer.default.buckets if answer.default is not None else ()
    if never := [bucket.size for bucket in buckets if bucket.never_pays]:
        words.append(
            f"buckets of the engine's default that do not pay back their capture in 30 days of serving: "
            f"{_numbers(never)}"
        )
    for name, of in (("", answer.decode), (" of the engine's default", answer.default)):
        if of is not None and of.capture_sizes and of.cliff is not None and of.cliff.share >= WORTH_A_WORD:
            cost = "" if of.cliff.cost_us is None else f", which costs {format_us(of.cliff.cost_us)} a step"
            words.append(f"above the top{name}: {of.cliff.share:.1%} of steps{cost}")
    return words


def _numbers(sizes: Iterable[int]) -> str:
    return ", ".join(str(size) for size in sizes)


def _earned(of: BucketWorth) -> str:
    earned = format_us(of.earned_us or 0.0)
    rates = [f"{of.us_per_mib:,.1f} µs per MiB"] if of.us_per_mib is not None else []
    if of.pays_back_s is not None:
        rates.append(f"paid back in {format_duration_s(of.pays_back_s)}")
    return earned + (f" ({', '.join(rates)})" if rates else "")


def _compared(of: ListAnswer) -> str:
    """How the recommended step compares with that of this list: what it gains or loses in each process, or in one and
    in the figures shown, which may rest on others too."""
    ratio = of.chosen_over_this
    if ratio is None:
        return "-"
    if not (ratio.faster or ratio.slower):
        return f"same within {ratio.tolerance:.1%}"
    ratios = ratio.by_process if len(ratio.by_process) > 1 else (*ratio.by_process, ratio.combined)
    gains = sorted(abs(1 - one) for one in ratios)
    shown = dict.fromkeys(f"{gain * 100:.1f}" for gain in (gains[0], gains[-1]))
    return f"{'-'.join(shown)}% {'shorter' if ratio.faster else 'longer'}"


def _step(of: ListAnswer) -> str:
    if of.expected_step_us is None:
        return "not measured"
    return ("~" if of.expected_step_from == "interpolated" else "") + format_us(of.expected_step_us)


def _bytes(of: ListAnswer) -> str:
    if of.graph_bytes is None:
        return "not measured"
    return MARKS.get(of.graph_bytes_from or "", "") + format_bytes(of.graph_bytes)


def _seconds(of: ListAnswer) -> str:
    if of.capture_s is None:
        return "not measured"
    return MARKS.get(of.capture_s_from or "", "") + format_duration_s(of.capture_s)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


ROWS: tuple[tuple[str, Callable[[ListAnswer], str]], ...] = (
    ("sizes", lambda of: size_range(of.capture_sizes)),
    ("expected step", _step),
    ("recommended is", _compared),
    ("graph coverage", lambda of: _share(of.coverage)),
    ("padding waste", lambda of: _share(of.padding_waste)),
    ("graph memory", lambda of: "0" if of.is_eager else _bytes(of)),
    ("capture time", lambda of: "0" if of.is_eager else _seconds(of)),
    ("KV tokens", lambda of: "not known" if of.kv_tokens is None else f"{of.kv_tokens:,}"),
)


def _played(cell: Callable[[Simulated], str]) -> Callable[[ListAnswer], str]:
    return lambda of: "not known" if of.simulated is None else cell(of.simulated)


def _waits(seconds: float | None, without: str) -> str:
    return without if seconds is None else format_duration_s(seconds)


SERVED_ROWS: tuple[tuple[str, Callable[[ListAnswer], str]], ...] = (
    ("tokens a second", lambda of: "not known" if of.tokens_per_s is None else f"{of.tokens_per_s:,.0f}"),
    ("token gap p99", lambda of: "not known" if of.inter_token_p99_us is None else format_us(of.inter_token_p99_us)),
)
TRACE_ROWS: tuple[tuple[str, Callable[[ListAnswer], str]], ...] = (
    ("tokens a second", _played(lambda of: f"{of.tokens_per_s:,.0f}")),
    ("token gap p99", _played(lambda of: _waits(of.inter_token_p99_s, "-"))),
    ("first token p99", _played(lambda of: _waits(of.ttft_p99_s, "overloaded"))),
)


def decode_rows(answer: EngineAnswer) -> tuple[tuple[str, Callable[[ListAnswer], str]], ...]:
    """What is shown of a decode list; a trace also has the wait for a first token."""
    return (*ROWS, *(SERVED_ROWS if answer.load is None else TRACE_ROWS))


def memory_words(of: KvBudget) -> str:
    """The terms of a budget, and how it compares with the engine's own. What does not fit is told by what it needs."""
    terms = {
        "context": of.context_bytes,
        "weights": of.weights_bytes,
        "workspace": of.workspace_bytes,
        "buffers": of.static_buffer_bytes,
        "activations": of.activation_peak_bytes,
        "graphs": of.graph_bytes,
        "engine's reserve": of.reserve_bytes,
    }
    needed = of.cuda_total_bytes + of.short_by_bytes
    kv_bytes = of.kv_bytes if of.fits else needed - sum(size or 0 for size in terms.values())
    sizes = {**terms, "KV": kv_bytes}
    listed = " + ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None)
    if not of.fits:
        tokens = f"{of.needed_kv_tokens:,} tokens"
        return (
            f"{format_bytes(needed)} needed, KV for {tokens} included, of {format_bytes(of.cuda_total_bytes)}: {listed}"
        )
    words = [f"{format_bytes(of.cuda_total_bytes)} = {listed}", f"{of.max_running_requests:,} requests fit"]
    if gained := of.kv_tokens_gained:
        own = f"with its own guess at graphs the engine would have {of.own_kv_tokens:,} KV tokens"
        words.append(f"{own}, {abs(gained):,} {'fewer' if gained > 0 else 'more'}")
    if of.kv_bytes_setting is not None:
        words.append(f"or {of.kv_bytes_setting} {of.kv_bytes}")
    if len(of.rounds) > 1:
        turns = (f"{one.graphs} sizes up to {one.top}, KV for {one.request_pool:,} requests" for one in of.rounds)
        words.append(f"settled in {len(of.rounds)} rounds: {' -> '.join(turns)}")
    return "; ".join(words)


def flag_lines(flags: Flags, width: int | None = None) -> list[str]:
    """Flags to paste: arguments for a shell, or YAML. Lines are broken only where shells and JSON allow it."""
    if flags.yaml is not None:
        lines = flags.yaml.rstrip("\n").splitlines()
        return [piece for line in lines for piece in _break(line, width, "    ")]
    words = [shlex.quote(word) for word in flags.args]
    pairs = []
    while words:
        taken = [words.pop(0)]
        while words and not words[0].startswith("--"):
            taken.append(words.pop(0))
        pairs.append(" ".join(taken))
    joined = [pair + (" \\" if index + 1 < len(pairs) else "") for index, pair in enumerate(pairs)]
    return [piece for line in joined for piece in _break(line, width, "  ")]


def _break(line: str, width: int | None, hang: str) -> list[str]:
    """Break after commas: inside quoted JSON and inside a YAML list a line break is white space."""
    if width is None or len(line) <= width:
        return [line]
    lines, current = [], ""
    for piece in re.findall(r"[^,]*,|[^,]+$", line):
        if current.strip() and len(current) + len(piece.rstrip()) > width:
            lines.append(current.rstrip())
            current = hang + piece.lstrip()
        else:
            current += piece
    return [*lines, current]


def wrapped(text: str, indent: str = "", hang: str = "  ") -> list[str]:
    """Lines of at most 80 columns."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
    )
