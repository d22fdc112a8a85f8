"""Reading options by a table, as an engine's argument parser would: values, refusals, and what was not read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from graphtune.engines.launch import Option

Kind = Literal["int", "float", "ints", "switch", "text", "json", "size"]
Suffixes = Mapping[str, int]

ACCEPTED: dict[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "ints": "whole numbers separated by spaces",
    "text": "a value",
    "json": "a JSON object",
    "size": "a whole number, or one with a unit suffix",
}


@dataclass(frozen=True)
class Spec:
    """How one flag is read. ``alias`` is the name its value is stored under; ``choices`` are the accepted texts."""

    kind: Kind
    alias: str | None = None
    choices: tuple[str, ...] = ()
    optional_value: str | None = None


@dataclass(frozen=True)
class Rejected:
    """A flag that the parser refuses by name, and the flag that now says the same, if one does."""

    reason: str
    instead: str | None = None


@dataclass(frozen=True)
class Given:
    """A value and where it was written."""

    value: Any
    where: str


@dataclass(frozen=True)
class Refusal:
    """Something the engine refuses or crashes on: where, what, and what is accepted instead. ``mend`` is the option
    (name and values) to write instead of ``option``, where that is plain."""

    where: str
    message: str
    accepted: str | None = None
    option: str | None = None
    mend: tuple[str, ...] = ()


@dataclass
class Reading:
    """Values by name; the last one written counts. ``unread`` are flags that are not about graphs."""

    values: dict[str, Given] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        given = self.values.get(name)
        return default if given is None else given.value

    def where(self, name: str) -> str | None:
        given = self.values.get(name)
        return None if given is None else given.where

    def refuse(self, where: str, message: str, accepted: str | None = None) -> None:
        self.refusals.append(Refusal(where, message, accepted))


def read_options(
    options: Iterable[Option],
    table: Mapping[str, Spec],
    rejected: Mapping[str, Rejected],
    suffixes: Mapping[str, float],
    reading: Reading | None = None,
) -> Reading:
    """Read options by ``table``; names in ``rejected`` are refused with the reason given there."""
    reading = reading or Reading()
    for option in options:
        if option.name in rejected:
            reason, instead = rejected[option.name].reason, rejected[option.name].instead
            mend = (instead, *option.values) if instead else ()
            reading.refusals.append(
                Refusal(option.where, f"{option.name} is not accepted: {reason}", None, option.name, mend)
            )
            continue
        spec = table.get(option.name)
        if spec is None:
            reading.unread.append(option.name)
            continue
        _read_one(option, spec, suffixes, reading)
    return reading


def _read_one(option: Option, spec: Spec, suffixes: Mapping[str, float], reading: Reading) -> None:
    shown = " ".join(option.values)
    accepted = f"one of {', '.join(spec.choices)}" if spec.choices else ACCEPTED.get(spec.kind, "no value")
    name = spec.alias or option.name.lstrip("-").replace("-", "_")
    try:
        value = _value(option, spec, suffixes)
    except ValueError as error:
        detail = f" ({error})" if str(error) else ""
        message = f"{option.name} {shown}".rstrip() + f" cannot be read{detail}"
        mend = _numbers_in(option) if spec.kind == "ints" else ()
        reading.refusals.append(Refusal(option.where, message, accepted, option.name, mend))
        return
    reading.values[name] = Given(value, option.where)


def _numbers_in(option: Option) -> tuple[str, ...]:
    """The option with the whole numbers of a list that was written with commas, brackets or quotes."""
    words = re.split(r"[\s,\[\]'\"]+", " ".join(option.values))
    numbers = [word for word in words if word]
    if not all(re.fullmatch(r"\d{1,18}", word, re.ASCII) for word in numbers):
        return ()
    sizes = sorted({int(word) for word in numbers} - {0})
    return (option.name, *(str(size) for size in sizes)) if sizes else ()


def _value(option: Option, spec: Spec, suffixes: Mapping[str, float]) -> Any:
    if spec.kind == "switch":
        return True
    if not option.values:
        if spec.optional_value is not None:
            return spec.optional_value
        raise ValueError("a value is missing")
    first = option.values[0]
    if spec.kind == "ints":
        return _whole_numbers(option)
    if spec.kind == "text":
        if spec.choices and first not in spec.choices:
            raise ValueError
        return first
    if spec.kind == "json":
        return json_object(first)
    if spec.kind == "float":
        return float(first)
    if spec.kind == "size":
        return sized(first, suffixes)
    return whole_number(first)


def _whole_numbers(option: Option) -> tuple[int, ...]:
    """A list of sizes. A YAML list keeps its types: a text among numbers is refused though it looks like one."""
    if isinstance(option.raw, tuple):
        wrong = [repr(item) for item in option.raw if isinstance(item, bool) or not isinstance(item, int)]
        small = [str(item) for item in option.raw if isinstance(item, int) and item < 1]
        if wrong:
            also = f", and {', '.join(small)} is below 1" if small else ""
            raise ValueError(f"{', '.join(wrong)} is not a whole number{also}")
    return tuple(whole_number(text) for text in option.values)


def whole_number(text: str) -> int:
    """A whole number as argparse reads it."""
    if not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text, re.ASCII):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def sized(text: str, suffixes: Mapping[str, float]) -> int:
    """A number with one of ``suffixes`` (case counts); fractions only where the result is whole or the unit decimal."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)([A-Za-z]*)", text, re.ASCII)
    if match is None or (match[2] and match[2] not in suffixes):
        raise ValueError(f"suffixes are {', '.join(suffixes)}")
    if "." in match[1] and (not match[2] or match[2].endswith("i") or suffixes[match[2]] % 1000):
        raise ValueError("a fraction needs a decimal suffix")
    return (
        int(float(match[1]) * suffixes.get(match[2], 1))
        if "." in match[1]
        else int(match[1]) * int(suffixes.get(match[2], 1))
    )


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError with what is wrong."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text} is not an object")
    return value
