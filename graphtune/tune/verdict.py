"""What lint says: one verdict per finding, each with the smallest edit that mends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graphtune.engines.base import Flags, Unit
from graphtune.engines.launch import Launch

Code = Literal["error", "gap", "mode", "changed", "waste", "dense", "risk"]

MEANING: dict[Code, str] = {
    "error": "the engine crashes or refuses",
    "gap": "a reachable batch has no graph",
    "mode": "asked for one mode, the engine runs another",
    "changed": "the engine silently alters the list",
    "waste": "in the list, never reached by a batch",
    "dense": "neighbours that save little padding",
    "risk": "may go wrong",
}
FAILING: frozenset[Code] = frozenset({"error", "gap"})


@dataclass(frozen=True)
class Verdict:
    """``covered`` of ``reachable`` requests (or tokens, by ``unit``) have a graph. ``edit`` is the smallest change that
    mends it, in words, and ``mended`` the flags after it; both are empty when no change of flags does."""

    code: Code
    message: str
    phase: str | None = None
    runner: str | None = None
    sizes: tuple[int, ...] = ()
    unit: Unit | None = None
    covered: int | None = None
    reachable: int | None = None
    asked: str | None = None
    runs: str | None = None
    where: str | None = None
    edit: tuple[str, ...] = ()
    mended: Flags | None = None


@dataclass(frozen=True)
class PhaseFacts:
    """What one phase comes to, for the table above the verdicts. ``graphs`` spells out the product of variants."""

    phase: str
    runner: str | None
    unit: Unit
    sizes: tuple[int, ...]
    graphs: str
    graph_count: int
    reach: str


@dataclass(frozen=True)
class LintReport:
    """All verdicts on one launch, file or log, worst first."""

    engine: str
    version: str | None
    source: str
    verdicts: tuple[Verdict, ...]
    phases: tuple[PhaseFacts, ...] = ()
    assumptions: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 when something crashes or a reachable batch has no graph, else 0."""
        return int(any(verdict.code in FAILING for verdict in self.verdicts))


def worst_first(verdicts: list[Verdict]) -> tuple[Verdict, ...]:
    """Verdicts in the order of their codes, each finding once."""
    order = list(MEANING)
    return tuple(sorted(dict.fromkeys(verdicts), key=lambda verdict: order.index(verdict.code)))


def edit_text(before: Launch, after: Launch) -> tuple[str, ...]:
    """What changed between two launches, one line per option or key."""
    old = {option.name: " ".join(option.tokens()) for option in before.options}
    new = {option.name: " ".join(option.tokens()) for option in after.options}
    lines = [f"drop {text}" for name, text in old.items() if name not in new]
    lines += [f"{old[name]} → {text}" for name, text in new.items() if name in old and old[name] != text]
    lines += [f"add {text}" for name, text in new.items() if name not in old]
    was, now = _flat(before.settings), _flat(after.settings)
    lines += [f"drop {key}: {value}" for key, value in was.items() if key not in now]
    lines += [f"{key}: {was[key]} → {value}" for key, value in now.items() if key in was and was[key] != value]
    lines += [f"add {key}: {value}" for key, value in now.items() if key not in was]
    return tuple(lines)


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        return {}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
