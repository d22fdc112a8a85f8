"""Thresholds of a comparison, from a small YAML file kept in the repository whose speed is watched."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from graphtune.compare.model import Kind
from graphtune.errors import InputError
from graphtune.units import MIB, parse_bytes
from graphtune.yaml_source import KeyPath, Source, parse_yaml

TOLERANCE = 0.01


@dataclass(frozen=True)
class Rule:
    """For rows whose name matches the shell pattern ``match``: another tolerance, or no comparison."""

    match: str
    tolerance: float | None = None
    ignore: bool = False


@dataclass(frozen=True)
class Thresholds:
    """Relative tolerances by kind of row: a ratio within them is the same.

    ``memory_floor_bytes`` is what two processes on a GPU may differ by in any memory row: drivers and allocators hand
    out pieces of 2 MiB, and the same list measured first and third in a process differed by one. The first rule whose
    pattern matches a row's name counts.
    """

    tolerance: dict[Kind, float] = field(
        default_factory=lambda: {"time": TOLERANCE, "capture": TOLERANCE, "memory": TOLERANCE}
    )
    memory_floor_bytes: int = 4 * MIB
    confidence: float = 0.95
    rules: tuple[Rule, ...] = ()

    def rule_for(self, name: str) -> Rule | None:
        return next((rule for rule in self.rules if fnmatchcase(name, rule.match)), None)

    def tolerance_of(self, kind: Kind, name: str) -> float:
        rule = self.rule_for(name)
        return rule.tolerance if rule is not None and rule.tolerance is not None else self.tolerance[kind]


def load_thresholds(path: Path) -> Thresholds:
    """Read a thresholds file; InputError names file, line and key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text: {error.reason}", where=str(path)) from error
    return parse_thresholds(text, str(path))


def parse_thresholds(text: str, name: str) -> Thresholds:
    """Thresholds from YAML text. Keys: time, capture, memory, memory_floor, confidence, rows."""
    values, source = parse_yaml(text, name)
    if values is None:
        return Thresholds()
    keys = ("time", "capture", "memory", "memory_floor", "confidence", "rows")
    _check_keys(values, keys, source, ())
    default = Thresholds()
    tolerances: dict[Kind, float] = {
        kind: _share(values[kind], source, (kind,)) if kind in values else of for kind, of in default.tolerance.items()
    }
    confidence = default.confidence
    if "confidence" in values:
        confidence = _share(values["confidence"], source, ("confidence",))
        if not 0.5 <= confidence <= 0.9999:
            raise InputError("must lie between 0.5 and 0.9999", where=source.where(("confidence",)))
    floor = default.memory_floor_bytes
    if "memory_floor" in values:
        floor = parse_bytes(str(values["memory_floor"]), where=source.where(("memory_floor",)))
    rows = values.get("rows", ())
    if not isinstance(rows, tuple):
        raise InputError("must be a list", where=source.where(("rows",)))
    rules = tuple(_rule(row, source, ("rows", index)) for index, row in enumerate(rows))
    return Thresholds(tolerances, floor, confidence, rules)


def _rule(values: Any, source: Source, path: KeyPath) -> Rule:
    _check_keys(values, ("match", "tolerance", "ignore"), source, path)
    match = values.get("match")
    if not isinstance(match, str) or not match:
        action = 'Write for example match: "decode eager *".'
        raise InputError("needs a pattern under match", where=source.where(path), action=action)
    ignore = values.get("ignore", False)
    if not isinstance(ignore, bool):
        raise InputError("must be true or false", where=source.where((*path, "ignore")))
    if ("tolerance" in values) == ignore:
        raise InputError("needs either a tolerance or ignore: true", where=source.where(path))
    tolerance = _share(values["tolerance"], source, (*path, "tolerance")) if "tolerance" in values else None
    return Rule(match, tolerance, ignore)


def _check_keys(values: Any, known: tuple[str, ...], source: Source, path: KeyPath) -> None:
    if not isinstance(values, dict):
        raise InputError(f"must hold keys ({', '.join(known)})", where=source.where(path))
    for key in values:
        if key not in known:
            raise InputError("unknown key", where=source.where((*path, key)), action=f"Keys: {', '.join(known)}.")


def _share(value: Any, source: Source, path: KeyPath) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10:
        raise InputError("must be a relative figure such as 0.01", where=source.where(path))
    return float(value)
