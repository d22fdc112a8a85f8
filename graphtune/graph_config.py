"""Which graph backend and which sizes each phase uses: keys, precedence, locks, automatic downgrade, serialisation.

A setting comes from one of several layers (built-in default, legacy switch, convenience flag, JSON). Whatever any
layer but the default gives is *locked*: automatic downgrades leave it alone, except those rules that override even an
explicit choice. Serialisation writes only what is locked and differs from the default, because reading a setting
back locks it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from graphtune.errors import InputError

PHASES = ("decode", "prefill")
BACKENDS = ("full", "breakable", "disabled")
KEYS: dict[str, tuple[str, ...]] = {
    "decode": ("backend", "max_bs", "bs"),
    "prefill": (
        "backend",
        "max_bs",
        "bs",
        "max_context_size",
        "full_prefill_max_req",
        "full_prefill_prefix_chunk_tokens",
        "max_seq_len",
    ),
}

Key = tuple[str, str]
Facts = TypeVar("Facts")


@dataclass(frozen=True)
class PhaseSettings:
    """Settings of one phase; None means that the engine derives the value. ``bs`` is in requests for decode and in
    tokens for prefill, as are ``max_bs``."""

    backend: str
    max_bs: int | None = None
    bs: tuple[int, ...] | None = None
    max_context_size: int | None = None
    full_prefill_max_req: int | None = None
    full_prefill_prefix_chunk_tokens: int | None = None
    max_seq_len: int | None = None


DEFAULT_DECODE = PhaseSettings("full")
DEFAULT_PREFILL = PhaseSettings("breakable")


@dataclass(frozen=True)
class GraphConfig:
    """Settings of both phases and the (phase, key) pairs that were given explicitly."""

    decode: PhaseSettings = DEFAULT_DECODE
    prefill: PhaseSettings = DEFAULT_PREFILL
    locked: frozenset[Key] = frozenset()

    def phase(self, name: str) -> PhaseSettings:
        return self.decode if name == "decode" else self.prefill

    def with_value(self, key: Key, value: Any) -> GraphConfig:
        """The same with one value changed; locks stay as they are."""
        phase, name = key
        changed = replace(self.phase(phase), **{name: value})
        return replace(self, decode=changed) if phase == "decode" else replace(self, prefill=changed)


@dataclass(frozen=True)
class Layer:
    """Explicit settings from one source, which is named in messages."""

    source: str
    values: Mapping[Key, Any]


def combine(layers: Iterable[Layer], default: GraphConfig | None = None) -> GraphConfig:
    """Settings from layers in rising precedence; every pair that a layer gives is locked."""
    config = default or GraphConfig()
    locked = set(config.locked)
    for layer in layers:
        for key, value in layer.values.items():
            config = config.with_value(key, value)
            locked.add(key)
    return replace(config, locked=frozenset(locked))


def disabled(source: str, *phases: str) -> Layer:
    """A legacy switch that turns phases off."""
    return Layer(source, {(phase, "backend"): "disabled" for phase in phases})


def serialise(config: GraphConfig, default: GraphConfig | None = None) -> dict[str, dict[str, Any]]:
    """What to write so that reading it back gives the same values and locks nothing that was not locked."""
    default = default or GraphConfig()
    written: dict[str, dict[str, Any]] = {}
    for phase in PHASES:
        for name in KEYS[phase]:
            value = getattr(config.phase(phase), name)
            if (phase, name) in config.locked and value != getattr(default.phase(phase), name):
                written.setdefault(phase, {})[name] = list(value) if isinstance(value, tuple) else value
    return written


def parse(given: Any, where: str = "--cuda-graph-config") -> Layer:
    """A layer from the JSON object phase → settings, or its text.

    Stricter than the engine, which does not check the types of values: those fail there later or misbehave.
    Raises InputError naming what was read and what is accepted.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            example = '{"decode":{"bs":[1,2,4]}}'
            raise InputError(f"not JSON: {error}", where=where, action=f"An object such as {example}.") from None
    if not isinstance(given, dict):
        raise InputError(f"{given!r} is not an object", where=where, action="An object of phases is accepted.")
    values: dict[Key, Any] = {}
    for phase, settings in given.items():
        if phase not in PHASES:
            raise InputError(f"unknown phase {phase!r}", where=where, action=f"Phases: {', '.join(PHASES)}.")
        if not isinstance(settings, dict):
            raise InputError(f"{phase} is {settings!r}, not an object", where=where)
        for name, value in settings.items():
            if name not in KEYS[phase]:
                raise InputError(
                    f"unknown key {name!r} under {phase}", where=where, action=f"Keys: {', '.join(KEYS[phase])}."
                )
            values[(phase, name)] = _checked(phase, name, value, where)
    return Layer(where, values)


def _checked(phase: str, name: str, value: Any, where: str) -> Any:
    at = f"{where} {phase}.{name}"
    if name == "backend":
        if value not in BACKENDS:
            raise InputError(f"{value!r} is no backend", where=at, action=f"Backends: {', '.join(BACKENDS)}.")
        return value
    if name == "bs":
        if not isinstance(value, list) or not value or not all(_is_whole(size) for size in value):
            raise InputError(f"{value!r} is no list of sizes", where=at, action="A list of whole numbers is accepted.")
        return tuple(value)
    if value is not None and not _is_whole(value):
        raise InputError(f"{value!r} is no whole number", where=at, action="A whole number is accepted.")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Rule(Generic[Facts]):
    """One automatic change: when ``condition`` holds, ``effect`` values are set.

    ``respects_lock`` rules skip a key that was given explicitly; the others override it. ``unless`` names values that
    the rule leaves alone (a phase that is off stays off). A rule that ``refuses`` changes nothing: the engine stops.
    """

    name: str
    condition: Callable[[Facts, GraphConfig], bool]
    effect: Mapping[Key, Any]
    respects_lock: bool
    reason: str
    unless: frozenset[Any] = frozenset()
    refuses: bool = False


@dataclass(frozen=True)
class Fired:
    """One value that a rule changed."""

    rule: str
    phase: str
    key: str
    before: Any
    after: Any
    overrode_lock: bool
    reason: str


@dataclass(frozen=True)
class Downgraded:
    """What was asked, what runs, every change between, and the engine's refusal if a rule refuses."""

    asked: GraphConfig
    runs: GraphConfig
    fired: tuple[Fired, ...] = ()
    refused: str | None = None


def downgrade(config: GraphConfig, facts: Facts, rules: Iterable[Rule[Facts]]) -> Downgraded:
    """Apply a table of rules in order."""
    runs = config
    fired: list[Fired] = []
    for rule in rules:
        if not rule.condition(facts, runs):
            continue
        if rule.refuses:
            return Downgraded(config, runs, tuple(fired), rule.reason)
        for key, value in rule.effect.items():
            before = getattr(runs.phase(key[0]), key[1])
            locked = key in config.locked
            if before == value or before in rule.unless or (locked and rule.respects_lock):
                continue
            runs = runs.with_value(key, value)
            fired.append(Fired(rule.name, key[0], key[1], before, value, locked, rule.reason))
    return Downgraded(config, runs, tuple(fired))
