"""The lists of an answer as figures name them: recommended ones first, lists that serve alike once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from graphtune.engines import ENGINES
from graphtune.engines.base import Padding
from graphtune.results import CellResult
from graphtune.tune.candidates import bucket_for
from graphtune.tune.recommendation import Recommendation
from graphtune.tune.recommendation_text import NAMES, size_range


@dataclass(frozen=True)
class ShownList:
    """A capture list, how its engine pads to it, and for whom it is recommended or the default."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    padding: Padding
    recommended: bool
    cap_factor: float | None = None
    backend: str = ""

    @property
    def label(self) -> str:
        words = [size_range(self.sizes), *([self.backend] if self.backend else [])]
        return f"{', '.join(self.names)} ({', '.join(words)})"

    def bucket(self, raw: int) -> int | None:
        """The size that serves ``raw`` rows, None where the step runs eager."""
        return bucket_for(raw, self.sizes, self.padding, self.cap_factor)


def decode_lists(answer: Recommendation) -> tuple[ShownList, ...]:
    """Every recommended list and every engine's default."""
    found: list[ShownList] = []
    for one in answer.engines:
        if one.decode is not None:
            found.append(ShownList((NAMES[one.engine],), one.decode.capture_sizes, one.dispatch.decode, True))
    for one in answer.engines:
        if one.default is not None:
            dispatch = one.dispatch
            name = f"{NAMES[one.engine]}'s default"
            padding = dispatch.decode_by_default or dispatch.decode
            found.append(ShownList((name,), one.default.capture_sizes, padding, False))
    return joined(found)


def prefill_lists(answer: Recommendation) -> tuple[ShownList, ...]:
    """Every recommended prefill list and every engine's own; empty where the answer has none."""
    found: list[ShownList] = []
    for recommended in (True, False):
        for one in answer.engines:
            of = one.prefill if recommended else one.prefill_default
            if of is not None:
                dispatch = ENGINES[one.engine].dispatch
                name = NAMES[one.engine] if recommended else f"{NAMES[one.engine]}'s default"
                cap = dispatch.prefill_cap_factor
                found.append(ShownList((name,), of.capture_sizes, dispatch.prefill, recommended, cap, of.backend))
    return joined(found)


def captured_prefill_lists(cells: Iterable[CellResult]) -> tuple[ShownList, ...]:
    """The prefill lists of a sweep, padded to under its waste cap, whatever their order."""
    captured = dict.fromkeys(of.list for cell in cells for of in cell.captured_lists if of.list.phase == "prefill")
    return joined(
        ShownList(
            (f"list “{of.name}”",), of.sizes, "capped" if of.waste_cap else "always", False, of.waste_cap, of.backend
        )
        for of in captured
    )


def joined(lists: Iterable[ShownList]) -> tuple[ShownList, ...]:
    """Lists with the same sizes and padding once, under all their names; empty ones left out."""
    found: dict[tuple[tuple[int, ...], Padding, float | None, str], ShownList] = {}
    for of in lists:
        if of.sizes:
            key = (of.sizes, of.padding, of.cap_factor, of.backend)
            before = found.get(key)
            names = tuple(dict.fromkeys((*before.names, *of.names))) if before else of.names
            recommended = of.recommended or (before is not None and before.recommended)
            found[key] = replace(of, names=names, recommended=recommended)
    return tuple(found.values())
