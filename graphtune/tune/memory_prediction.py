"""Graph memory of any list, played back from what each size asks for, and how far such figures were off.

    torch's bytes   those of the list's first size alone, as measured, plus the growth that playing back the rest shows
    outside torch   bytes per executable, from lists that were the first of their process
    interval        both, wider by what the random lists that were not held back were off, and downwards by what was
                    left of the segment that held the shared output of the first size alone

The growth is scaled by one factor per phase and backend, fitted on those random lists: 1 where play-back is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from graphtune.memory_cells import ALONE, is_held_out
from graphtune.results import AllocationTrace, Capture, CapturedList, CaptureList, CellResult
from graphtune.tune.block_pool import RULES, BlockPool, PoolRules
from graphtune.units import MIB


class Setting(NamedTuple):
    """What decides the requests of a size."""

    phase: str
    backend: str
    output: str
    workspace: str
    request_slots: int | None


def setting_of(of: CaptureList) -> Setting:
    return Setting(of.phase, of.backend, of.output, of.workspace, of.request_slots)


@dataclass(frozen=True)
class Prediction:
    """Device bytes of a list that was not measured. ``interval`` is around ``graph_bytes`` = torch + outside torch;
    ``peak_bytes`` is the most while capturing, warm-ups included."""

    of: CaptureList
    torch_bytes: int
    outside_bytes: int
    interval: tuple[int, int]
    peak_bytes: int

    @property
    def graph_bytes(self) -> int:
        return self.torch_bytes + self.outside_bytes


@dataclass(frozen=True)
class CheckedPrediction:
    """A random list: predicted and measured torch bytes. Bytes outside torch show in a process's first list only, so
    the predicted ones count on both sides."""

    prediction: Prediction
    measured_torch_bytes: int
    two_sample_bytes: int | None

    @property
    def measured_bytes(self) -> int:
        return self.measured_torch_bytes + self.prediction.outside_bytes

    @property
    def error_bytes(self) -> int:
        return self.prediction.torch_bytes - self.measured_torch_bytes

    @property
    def inside(self) -> bool:
        low, high = self.prediction.interval
        return low <= self.measured_bytes <= high


@dataclass(frozen=True)
class Alone:
    """One size captured alone into an empty pool: its requests and the bytes measured.

    ``spare_bytes`` are beside the pool and beyond the shared output: that lay in a segment which a warm-up had left and
    may lie in one of its own next time.
    """

    trace: AllocationTrace
    torch_bytes: int
    executables: int
    spare_bytes: int = 0


@dataclass(frozen=True)
class Played:
    """Torch's bytes after a list, and the device's most while it was captured."""

    torch_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Outside:
    """Bytes outside torch per executable, and the most that a measured list was off from that."""

    per_executable_bytes: float
    off_bytes: int
    lists: int


@dataclass(frozen=True)
class Fit:
    """What the random lists of one phase and backend say: the factor of growth, and errors (measured − predicted)."""

    growth_factor: float = 1.0
    errors_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryPredictor:
    """Predicts lists whose every size was captured alone under their setting. ``drawn`` are the random lists."""

    rules: PoolRules
    alone: Mapping[Setting, Mapping[int, Alone]]
    outside: Mapping[tuple[str, str], Outside]
    fits: Mapping[tuple[str, str], Fit] = field(default_factory=dict)
    drawn: tuple[CapturedList, ...] = ()
    _played: dict[tuple[CaptureList, ...], Played] = field(default_factory=dict, compare=False)

    @cached_property
    def checked(self) -> tuple[CheckedPrediction, ...]:
        """The random lists, predicted."""
        return tuple(_checked(self, of) for of in self.drawn)

    def knows(self, of: CaptureList) -> bool:
        return set(of.sizes) <= set(self.alone.get(setting_of(of), ()))

    def predict(self, of: CaptureList) -> Prediction | None:
        """None when a size of the list was not captured alone under its setting."""
        return self._predict(of) if self.knows(of) else None

    def predict_together(self, lists: Sequence[CaptureList]) -> Prediction | None:
        """Lists captured one after the other into one pool, the first of them first: all their bytes."""
        if not all(self.knows(of) for of in lists):
            return None
        apart = [self._predict(of) for of in lists]
        # What lists after the first find in the pool and need not take.
        saved = sum(self.play([of]).torch_bytes for of in lists) - self.play(lists).torch_bytes
        outside = sum(one.outside_bytes for one in apart)
        torch_bytes = sum(one.torch_bytes for one in apart) - saved
        off = sum(one.interval[1] - one.graph_bytes for one in apart)
        peak = max(self.play(lists).peak_bytes, *(one.peak_bytes for one in apart))
        total = torch_bytes + outside
        return Prediction(lists[0], torch_bytes, outside, (total - off, total + off), peak)

    def _predict(self, of: CaptureList) -> Prediction:
        kind = (of.phase, of.backend)
        fit, outside = self.fits.get(kind, Fit()), self.outside[kind]
        known = self.alone[setting_of(of)]
        played = self.play([of])
        torch_bytes = self.first_bytes(of) + round(self.growth_bytes(of) * fit.growth_factor)
        outside_bytes = round(outside.per_executable_bytes * sum(known[size].executables for size in of.sizes))
        total = torch_bytes + outside_bytes
        # Devices give memory in steps: no figure is known more closely, neither in torch nor outside it.
        known_to = outside.off_bytes + 2 * self.rules.segment_step_bytes
        below, above = known_to - min((0, *fit.errors_bytes)), known_to + max((0, *fit.errors_bytes))
        below += known[captured_order(of)[0]].spare_bytes
        peak = max(total, torch_bytes - played.torch_bytes + played.peak_bytes)
        return Prediction(of, torch_bytes, outside_bytes, (max(0, total - below), total + above), peak)

    def first_bytes(self, of: CaptureList) -> int:
        """Measured torch bytes of the size that is captured first, alone."""
        return self.alone[setting_of(of)][captured_order(of)[0]].torch_bytes

    def growth_bytes(self, of: CaptureList) -> int:
        """Torch bytes that the other sizes add, as played back."""
        first = replace(of, sizes=captured_order(of)[:1])
        return self.play([of]).torch_bytes - self.play([first]).torch_bytes

    def play(self, lists: Sequence[CaptureList]) -> Played:
        """Torch's bytes of ``lists`` captured one after the other into one pool, by their sizes' requests alone."""
        key = tuple(replace(of, name="") for of in lists)
        if key not in self._played:
            self._played[key] = self._play(lists)
        return self._played[key]

    def _play(self, lists: Sequence[CaptureList]) -> Played:
        start = self.alone[setting_of(lists[0])][captured_order(lists[0])[0]].trace
        pool = BlockPool(self.rules)
        beside = BlockPool(self.rules, _blocks(start.holes), _blocks(start.small_holes))
        if start.room_bytes:
            pool.free(pool.allocate(start.room_bytes))
        peak = 0
        outside = 0.0
        for of in lists:
            known = self.alone[setting_of(of)]
            rate = self.outside[of.phase, of.backend].per_executable_bytes
            traces = [known[size].trace for size in captured_order(of)]
            if shared := max(trace.shared_output_bytes for trace in traces):
                beside.allocate(shared)
            for size, trace in zip(captured_order(of), traces, strict=True):
                beside.play(trace.beside)
                pool.play(trace.pool)
                outside += rate * known[size].executables
                peak = max(peak, pool.reserved_bytes + beside.reserved_bytes + round(outside))
                beside.release_free_segments()
        return Played(pool.reserved_bytes + beside.reserved_bytes, peak)


def _blocks(holes: Iterable[tuple[int, int]]) -> list[int]:
    """The size of each of some blocks, from (bytes, how many)."""
    return [size for size, many in holes for _ in range(many)]


def played_predictor(
    rules: PoolRules, of: CaptureList, traces: Mapping[int, AllocationTrace], outside: Outside
) -> MemoryPredictor:
    """A predictor for lists under the setting of ``of`` from requests that nobody recorded, one executable a size: what
    a size takes alone is then played back as well."""
    setting, kind = setting_of(of), (of.phase, of.backend)
    bare = MemoryPredictor(rules, {setting: {size: Alone(one, 0, 1) for size, one in traces.items()}}, {kind: outside})
    alone = {size: Alone(one, bare.play([replace(of, sizes=(size,))]).torch_bytes, 1) for size, one in traces.items()}
    return MemoryPredictor(rules, {setting: alone}, {kind: outside})


def captured_order(of: CaptureList) -> tuple[int, ...]:
    """Sizes in the order in which they are captured."""
    return tuple(sorted(of.sizes, reverse=of.order == "descending"))


def memory_predictor(cells: Iterable[CellResult]) -> MemoryPredictor | None:
    """A predictor from the captures for memory alone of a sweep; None where it has none."""
    cells = tuple(cells)
    environment = next((cell.environment for cell in cells if cell.environment is not None), None)
    if environment is None:
        return None
    rules = RULES[environment.graph_mechanism]
    alone: dict[Setting, dict[int, Alone]] = defaultdict(dict)
    drawn: list[CapturedList] = []
    for of in (of for cell in cells if cell.purpose == "memory" for of in cell.captured_lists if of.status == "ok"):
        capture = of.captures[0]
        if of.torch_bytes is None:
            continue
        if of.list.name.startswith(ALONE) and capture.trace is not None:
            spare = spare_bytes(of, capture.trace, rules)
            known = Alone(capture.trace, of.torch_bytes, executables_of(capture), spare)
            alone[setting_of(of.list)][capture.size] = known
        else:
            drawn.append(of)
    if not alone:
        return None
    kinds = {(setting.phase, setting.backend) for setting in alone}
    bare = MemoryPredictor(rules, alone, {kind: outside_of(cells, kind) for kind in kinds})
    drawn = [of for of in drawn if bare.knows(of.list)]
    return replace(bare, fits={kind: _fit(bare, kind, drawn) for kind in kinds}, drawn=tuple(drawn))


def spare_bytes(of: CapturedList, trace: AllocationTrace, rules: PoolRules) -> int:
    """What a size alone kept beside its pool beyond a segment for the shared output; 0 where nothing is shared."""
    if not trace.shared_output_bytes or of.torch_bytes is None or of.pool_bytes is None:
        return 0
    return max(0, of.torch_bytes - of.pool_bytes - rules.segment_bytes(trace.shared_output_bytes))


def executables_of(capture: Capture) -> int:
    """Graph executables of one captured size: one per segment."""
    return capture.segments or 1


def outside_of(cells: Sequence[CellResult], kind: tuple[str, str]) -> Outside:
    """Bytes outside torch, from the lists of this phase and backend that were the first of their process."""
    first = [
        (sum(map(executables_of, of.captures)), of.outside_torch_bytes)
        for cell in cells
        for of in cell.captured_lists
        if cell.purpose != "memory"
        and (of.list.phase, of.list.backend) == kind
        and of.status == "ok"
        and of.outside_source == "measured"
        and of.outside_torch_bytes is not None
    ]
    if not first:
        return Outside(0.0, 0, 0)
    rate = sum(size for _, size in first) / sum(many for many, _ in first)
    return Outside(rate, max(round(abs(size - rate * many)) for many, size in first), len(first))


def _fit(bare: MemoryPredictor, kind: tuple[str, str], drawn: Iterable[CapturedList]) -> Fit:
    """Least squares of measured growth on played growth, over the random lists that may be fitted on."""
    grown = [
        (bare.growth_bytes(of.list), (of.torch_bytes or 0) - bare.first_bytes(of.list))
        for of in drawn
        if (of.list.phase, of.list.backend) == kind and not is_held_out(of.list)
    ]
    square = sum(played * played for played, _ in grown)
    factor = sum(played * measured for played, measured in grown) / square if square else 1.0
    return Fit(factor, tuple(measured - round(played * factor) for played, measured in grown))


def _checked(fitted: MemoryPredictor, of: CapturedList) -> CheckedPrediction:
    prediction = fitted.predict(of.list)
    assert prediction is not None and of.torch_bytes is not None, "only lists with known sizes are checked"
    return CheckedPrediction(prediction, of.torch_bytes, two_sample_bytes(of.captures))


def two_sample_bytes(captures: Sequence[Capture]) -> int | None:
    """The estimate that some engines make: the first graph's bytes and, for each other one, the second's, at least
    1 MiB. None for lists of one size."""
    grown = [capture.retained_bytes for capture in captures]
    if len(grown) < 2 or grown[0] is None or grown[1] is None:
        return None
    return grown[0] + (len(grown) - 1) * max(grown[1], MIB)
