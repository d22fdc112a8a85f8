"""The lists of an answer as figures name them: recommended ones first, lists that serve alike once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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

    @property
    def label(self) -> str:
        return f"{', '.join(self.names)} ({size_range(self.sizes)})"

    def bucket(self, raw: int) -> int | None:
        """The size that serves ``raw`` rows, None where the step runs eager."""
        return bucket_for(raw, self.sizes, self.padding, self.cap_factor)


def decode_lists(answer: Recommendation) -> tuple[ShownList, ...]:
    """Every recommended list and every engine's default."""
    found: list[ShownList] = []
    for one in answer.engines:
        if one.decode is not None:
            padding = ENGINES[one.engine].dispatch.decode
            found.append(ShownList((NAMES[one.engine],), one.decode.capture_sizes, padding, True))
    for one in answer.engines:
        if one.default is not None:
            dispatch = ENGINES[one.engine].dispatch
            name = f"{NAMES[one.engine]}'s default"
            padding = dispatch.decode_by_default or dispatch.decode
            found.append(ShownList((name,), one.default.capture_sizes, padding, False))
    return joined(found)


def prefill_lists(cells: Iterable[CellResult]) -> tuple[ShownList, ...]:
    """The prefill lists of a sweep, those of breakable graphs where there are any.

    Engines' own lists are padded to as those engines do, others under the waste cap of the sweep.
    """
    captured = dict.fromkeys(of.list for cell in cells for of in cell.captured_lists if of.list.phase == "prefill")
    breakable = [of for of in captured if of.backend == "breakable"]
    found: list[ShownList] = []
    for of in breakable or captured:
        for name in of.name.split("+"):
            if name in ENGINES:
                dispatch = ENGINES[name].dispatch
                label, padding, cap = f"{NAMES[name]}'s default", dispatch.prefill, dispatch.prefill_cap_factor
            else:
                label, padding, cap = f"list “{name}”", "capped" if of.waste_cap else "always", of.waste_cap
            found.append(ShownList((label,), of.sizes, padding, False, cap))
    return joined(dict.fromkeys(found))


def joined(lists: Iterable[ShownList]) -> tuple[ShownList, ...]:
    """Lists with the same sizes and padding once, under all their names; empty ones left out."""
    found: dict[tuple[tuple[int, ...], Padding, float | None], ShownList] = {}
    for of in lists:
        if of.sizes:
            key = (of.sizes, of.padding, of.cap_factor)
            before = found.get(key)
            names = (*before.names, *of.names) if before else of.names
            recommended = of.recommended or (before is not None and before.recommended)
            found[key] = ShownList(names, of.sizes, of.padding, recommended, of.cap_factor)
    return tuple(found.values())
