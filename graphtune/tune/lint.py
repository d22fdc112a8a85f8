"""Verdicts on the capture settings of a launch, with no GPU and no engine.

Everything an engine would do is taken from its module; here the outcome is compared with the batches that can occur.
An edit is offered only when resolving the edited launch shows that it mends the finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts, Edit, Engine
from graphtune.engines.grids import ceil_to
from graphtune.engines.launch import Launch
from graphtune.engines.options import Refusal
from graphtune.engines.resolution import ModeRun, Note, PhaseRun, Resolution
from graphtune.results import Phase
from graphtune.tune.verdict import Code, LintReport, PhaseFacts, Verdict, edit_text, worst_first

DENSE_SHARE = 0.02
"""Two neighbouring sizes are dense when the smaller saves less than this share of the larger one's rows."""


def lint_launch(
    engine: Engine,
    launch: Launch,
    device: DeviceFacts,
    *,
    source: str = "flags",
    dense_share: float | None = None,
) -> LintReport:
    """All verdicts on a launch of ``engine`` on ``device``.

    A launch that the engine's parser stops at gets errors only. Without ``dense_share`` only lists that the user chose
    are looked at for dense neighbours.
    """
    bench = _Bench(engine, launch, device)
    resolution = bench.resolution
    verdicts = [*_errors(bench)]
    for run in resolution.phases if resolution.parsed else ():
        verdicts += [*_gaps(bench, run), *_waste(bench, run), *_changed(bench, run)]
        if run.chosen or dense_share is not None:
            verdicts += _dense(bench, run, DENSE_SHARE if dense_share is None else dense_share)
    if resolution.parsed:
        verdicts += [_mode(bench, mode) for mode in resolution.modes]
        verdicts += [_risk(bench, note) for note in resolution.risks]
    return LintReport(
        engine.name,
        engine.version,
        source,
        worst_first(verdicts),
        tuple(_facts(run) for run in resolution.phases if run.graphs and resolution.parsed),
        (*_version_assumed(engine), *resolution.assumptions),
        resolution.unread,
    )


def _version_assumed(engine: Engine) -> tuple[str, ...]:
    checked = ENGINES[engine.name].version
    if engine.version == checked:
        return ()
    return (
        f"flags are read by the rules of {engine.name} {checked}, as far as {engine.version} is not known to differ",
    )


class _Bench:
    """A launch with its resolution, and the means to try edits on it."""

    def __init__(self, engine: Engine, launch: Launch, device: DeviceFacts) -> None:
        self.engine = engine
        self.launch = launch
        self.device = device
        self.resolution = engine.resolve(launch, device)

    def mend(self, edits: Iterable[Edit], cured: Callable[[Resolution], bool]) -> Launch | None:
        """The launch after the first edit that cures and brings no new refusal."""
        for edit in edits:
            changed = self.engine.edit(self.launch, edit)
            if changed is None:
                continue
            result = self.engine.resolve(changed, self.device)
            known = set(self.resolution.refusals)
            if cured(result) and all(refusal in known for refusal in result.refusals):
                return changed
        return None

    def verdict(self, verdict: Verdict, edits: Iterable[Edit], cured: Callable[[Resolution], bool]) -> Verdict:
        """``verdict`` with the edit that mends it, when one of ``edits`` does."""
        changed = self.mend(edits, cured)
        if changed is None:
            return verdict
        return _with_edit(verdict, self.launch, changed)


def _with_edit(verdict: Verdict, before: Launch, after: Launch) -> Verdict:
    return replace(verdict, edit=edit_text(before, after), mended=after.flags())


def _same(run: PhaseRun, result: Resolution) -> list[PhaseRun]:
    """The same phase after an edit, under the same runner or all of them."""
    return [
        other
        for other in result.phases
        if other.phase == run.phase and (None in (run.runner, other.runner) or other.runner == run.runner)
    ]


# --- error ---


def _errors(bench: _Bench) -> Iterator[Verdict]:
    for refusal in bench.resolution.refusals:
        text = refusal.message + (f"; accepted: {refusal.accepted}" if refusal.accepted else "")
        verdict = Verdict("error", text, where=refusal.where)
        if refusal.mend and refusal.option:
            changed = bench.launch.with_option(refusal.mend[0], *refusal.mend[1:], instead_of=(refusal.option,))
            if refusal not in bench.engine.resolve(changed, bench.device).refusals:
                verdict = _with_edit(verdict, bench.launch, changed)
            yield verdict
            continue
        edits = []
        for run in bench.resolution.phases:
            good = tuple(sorted({size for size in run.asked or () if size >= 1}))
            if good:
                edits.append(Edit("sizes", run.phase, good))
                if run.reach_in_sizes is not None:
                    fit = tuple(size for size in good if size < run.reach_in_sizes)
                    edits.append(Edit("sizes", run.phase, (*fit, run.reach_in_sizes)))
        yield bench.verdict(verdict, edits, _without_refusal(refusal))


def _without_refusal(refusal: Refusal) -> Callable[[Resolution], bool]:
    return lambda result: all(other.message != refusal.message for other in result.refusals)


# --- gap ---


def _gaps(bench: _Bench, run: PhaseRun) -> Iterator[Verdict]:
    if not run.graphs or run.effective.error is not None:
        return
    if run.phase == "decode":
        verdict = _decode_gap(run)
        if verdict is not None:
            edits = _limit_edit(run) if run.reach.most is None else _covering_edits(bench, run)
            yield bench.verdict(
                verdict, edits, lambda result: all(_decode_gap(other) is None for other in _same(run, result))
            )
    elif run.padding == "capped" or not run.shared:
        yield from _prefill_gap(bench, run)


def _decode_gap(run: PhaseRun) -> Verdict | None:
    """Decode batches without a graph. Where the limit is only the engine's default, it is a risk."""
    most, runner = run.reach.most, run.runner
    if most is None:
        text = f"batches above {run.top} requests run without a graph; {run.reach.text}"
        return Verdict("risk", text, "decode", runner, covered=run.top, unit="requests")
    if run.padding == "exact":
        have = sum(1 for size in run.effective.sizes if 0 < size <= most)
        if have >= most:
            return None
        text = f"covers {have} of {most} batch sizes: without padding only exact sizes replay ({run.reach.text})"
        code: Code = "gap" if run.reach.stated or run.chosen else "risk"
        return Verdict(code, text, "decode", runner, unit="requests", covered=have, reachable=most)
    if run.top >= most:
        return None
    missing = f"{run.top + 1} to {most}" if run.top + 1 < most else str(most)
    text = f"covers {run.top} of {most} requests ({run.reach.text}); {missing} without a graph"
    if run.rest_top is not None and run.rest_top > run.top:
        served = (
            f"{run.top + 1} to {run.rest_top} requests" if run.rest_top > run.top + 1 else f"{run.rest_top} requests"
        )
        if run.rest_top >= most:
            text = f"full graphs cover {run.top} of {most} requests; {served} replay {run.rest_mode} graphs"
            return Verdict(
                "mode",
                text,
                "decode",
                runner,
                unit="requests",
                covered=run.top,
                reachable=most,
                asked="FULL",
                runs=run.rest_mode,
            )
        text = (
            f"covers {run.rest_top} of {most} requests ({run.reach.text}), {served} of them with {run.rest_mode} graphs"
        )
        return Verdict(_stated(run), text, "decode", runner, unit="requests", covered=run.rest_top, reachable=most)
    return Verdict(_stated(run), text, "decode", runner, unit="requests", covered=run.top, reachable=most)


def _stated(run: PhaseRun) -> Code:
    return "gap" if run.reach.stated else "risk"


def _covering_edits(bench: _Bench, run: PhaseRun) -> Iterator[Edit]:
    """Edits that may cover every reachable batch, the smallest change first."""
    needed = run.reach_in_sizes
    assert needed is not None
    if run.padding == "exact":
        yield Edit("padding")
    if run.asked is not None:
        yield Edit("sizes", run.phase, tuple(sorted({size for size in run.asked if size >= 1} | {needed})))
    else:
        step = 16 if needed > 256 else 8
        for largest in (needed, ceil_to(needed, step), ceil_to(needed, step) + step):
            yield Edit("largest", run.phase, number=largest)
        yield Edit("sizes", run.phase, tuple(sorted({*run.effective.sizes, needed})))


def _limit_edit(run: PhaseRun) -> Iterator[Edit]:
    if run.top > 0:
        yield Edit("limit", number=run.top)


def uncovered_tokens(run: PhaseRun) -> list[tuple[int, int]]:
    """Ranges of token counts, up to the largest batch, that no graph serves: above the top, or in a hole between two
    sizes so far apart that the engine refuses to pad. The engine's own list is not blamed for its holes."""
    most = run.reach.most
    sizes = [size for size in run.effective.sizes if size > 0]
    if most is None or not sizes:
        return []
    holes = []
    if run.cap_factor is not None and run.asked is not None:
        for below, size in zip([0, *sizes], sizes, strict=False):
            last = (size - 1) // int(run.cap_factor)
            if below + 1 <= min(last, most) and size > int(run.cap_factor):
                holes.append((below + 1, min(last, most)))
    if sizes[-1] < most and run.cap_factor is not None:
        holes.append((sizes[-1] + 1, most))
    return holes


def _prefill_gap(bench: _Bench, run: PhaseRun) -> Iterator[Verdict]:
    holes = uncovered_tokens(run)
    if not holes or run.reach.most is None:
        return
    lost = sum(last - first + 1 for first, last in holes)
    ranges = ", ".join(f"{first}–{last}" for first, last in holes)
    text = f"{ranges} tokens run without a graph ({run.reach.text})"
    inner = [(first, last) for first, last in holes if last < run.effective.sizes[-1]]
    if inner:
        first, _ = inner[-1]
        size = next(size for size in run.effective.sizes if size > first)
        times = f"{size / first:.2f} times, and the engine refuses above {run.cap_factor:g}"
        text += f": {first} tokens would pad to {size}, {times}"
    code: Code = "gap" if run.chosen or run.reach.stated else "risk"
    verdict = Verdict(
        code, text, "prefill", run.runner, unit="tokens", covered=run.reach.most - lost, reachable=run.reach.most
    )
    edits = [Edit("sizes", "prefill", _filled(run, holes))]
    if run.asked is None:
        edits.insert(0, Edit("largest", "prefill", number=ceil_to(run.reach.most, 512)))
    yield bench.verdict(verdict, edits, lambda result: not any(uncovered_tokens(other) for other in _same(run, result)))


def _filled(run: PhaseRun, holes: list[tuple[int, int]]) -> tuple[int, ...]:
    """The list with the end of each hole added, halved until nothing is left uncovered."""
    factor = int(run.cap_factor or 2)
    added = set()
    for first, last in holes:
        size = last
        while size >= first:
            added.add(size)
            size = (size - 1) // factor
    return tuple(sorted({*run.effective.sizes, *added}))


# --- waste, dense, changed ---


def _waste(bench: _Bench, run: PhaseRun) -> Iterator[Verdict]:
    most = run.reach_in_sizes
    if not run.graphs or run.shared or most is None or run.effective.error is not None:
        return
    useful = [size for size in run.effective.sizes if size <= most]
    first_above = min((size for size in run.effective.sizes if size > most), default=None)
    if run.padding != "exact" and first_above is not None and (not useful or useful[-1] < most):
        useful.append(first_above)
    captured = [size for size in run.effective.sizes if size > most and size not in useful]
    dropped = [size for size in sorted(set(run.asked or ())) if size > most and size not in run.effective.sizes]
    wasted = sorted({*captured, *dropped})
    if not wasted or not (run.chosen or captured):
        return
    what = "captured, never reached" if captured else "in the list, never reached; the engine drops or lowers them"
    text = f"{_shown(wasted)} {run.effective.unit}: {what} ({run.reach.text})"
    verdict = Verdict("waste", text, run.phase, run.runner, tuple(wasted), run.effective.unit)
    edits = [Edit("sizes", run.phase, tuple(useful))] if run.asked else [Edit("largest", run.phase, number=most)]
    yield bench.verdict(verdict, edits, lambda result: not any(any(_waste(bench, o)) for o in _same(run, result)))


def thinned(sizes: tuple[int, ...], share: float) -> tuple[int, ...]:
    """The list without sizes that save less than ``share`` of the rows of the next size kept."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or (kept[-1] - size) / kept[-1] >= share:
            kept.append(size)
    return tuple(reversed(kept))


def _dense(bench: _Bench, run: PhaseRun, share: float) -> Iterator[Verdict]:
    if not run.graphs or run.shared or run.effective.error is not None or run.padding == "exact":
        return
    sizes = tuple(size for size in run.effective.sizes if size > 0)
    kept = thinned(sizes, share)
    if len(kept) == len(sizes):
        return
    out = tuple(size for size in sizes if size not in kept)
    text = f"{len(out)} of {len(sizes)} sizes save less than {share:.1%} of the next size's rows: {_shown(out)}"
    verdict = Verdict("dense", text, run.phase, run.runner, out, run.effective.unit)
    edits = [Edit("sizes", run.phase, kept)]
    yield bench.verdict(
        verdict,
        edits,
        lambda result: all(thinned(o.effective.sizes, share) == o.effective.sizes for o in _same(run, result)),
    )


def _changed(bench: _Bench, run: PhaseRun) -> Iterator[Verdict]:
    if not run.graphs or not run.changes:
        return
    steps = "; ".join(
        f"{change.kind} {_shown(change.sizes)}: {change.reason}" for change in run.changes if change.sizes
    )
    if not steps:
        return
    text = f"{steps}. Captured: {_shown(run.effective.sizes)} {run.effective.unit}"
    verdict = Verdict("changed", text, run.phase, run.runner, run.effective.sizes, run.effective.unit)
    edits = [Edit("sizes", run.phase, run.effective.sizes)] if run.effective.sizes else []
    yield bench.verdict(verdict, edits, lambda result: not any(other.changes for other in _same(run, result)))


# --- mode, risk ---


def _mode(bench: _Bench, mode: ModeRun) -> Verdict:
    whose = "asked" if mode.explicit else "by default"
    text = f"{mode.phase}: {whose} {mode.asked}, the engine runs {mode.runs}: {mode.reason}"
    verdict = Verdict("mode", text, mode.phase, mode.runner, asked=mode.asked, runs=mode.runs)
    phase: Phase = "prefill" if mode.phase == "prefill" else "decode"
    edits = [Edit("mode", phase, text=mode.runs)]
    return bench.verdict(verdict, edits, lambda result: mode not in result.modes)


def _risk(bench: _Bench, note: Note) -> Verdict:
    verdict = Verdict("risk", note.message, where=note.where)
    edits = [note.mend] if note.mend is not None else []
    return bench.verdict(verdict, edits, lambda result: all(risk.message != note.message for risk in result.risks))


def _facts(run: PhaseRun) -> PhaseFacts:
    effective = run.effective
    return PhaseFacts(
        run.phase, run.runner, effective.unit, effective.sizes, str(run.count), run.count.total, run.reach.text
    )


def _shown(sizes: Iterable[int]) -> str:
    sizes = list(sizes)
    shown = ", ".join(str(size) for size in sizes[:8])
    return f"{shown} … {sizes[-1]} ({len(sizes)} sizes)" if len(sizes) > 8 else shown or "nothing"
