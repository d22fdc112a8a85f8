"""Typed access to the keys of a JSON file a person may have edited; every refusal names file, line and key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from graphtune.errors import InputError


def plain_json(file: Path | str) -> Any:
    """The content of a JSON file as it stands; ``read_json`` also refuses what a person may have spoiled in editing.

    Raises InputError naming the file as it was given.
    """
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file)) from error
    except ValueError as error:
        raise InputError(f"is not JSON: {error}", where=str(file)) from error


class Keys:
    """One JSON object. ``text`` is the file it came from, for line numbers; ``prefix`` the path to this object."""

    def __init__(self, mapping: Mapping[str, Any], where: str, text: str | None = None, prefix: str = "") -> None:
        if not isinstance(mapping, Mapping):
            raise InputError(f"is not an object but {type(mapping).__name__}", where=where)
        for key in mapping:
            if not isinstance(key, str):
                raise InputError(f"key {key!r} is not text", where=where)
        self.mapping = mapping
        self.where = where
        self.text = text
        self.prefix = prefix

    def place(self, key: str) -> str:
        """``file:line: key path``, without the line where the key is absent or the file's text is not at hand."""
        path = self.prefix + key
        if self.text is None:
            return f"{self.where}: {path}"
        offset = 0
        for part in path.split("."):
            match = re.compile(rf'"{re.escape(part)}"\s*:').search(self.text, offset)
            if match is None:
                return f"{self.where}: {path}"
            offset = match.start()
        line = self.text.count("\n", 0, offset) + 1
        return f"{self.where}:{line}: {path}"

    def fail(self, key: str, message: str, action: str | None = None) -> NoReturn:
        raise InputError(message, where=self.place(key), action=action)

    def given(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self.mapping.get(key) is not None

    def section(self, key: str) -> Keys:
        """The object under ``key``; absent or null is an empty one."""
        value = self.mapping.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self.fail(key, f"must be an object, not {shown(value)}")
        return Keys(value, self.where, self.text, f"{self.prefix}{key}.")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"must be a whole number, not {shown(value)}")
        if value < 1:
            self.fail(key, f"must be at least 1, not {shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; without a default the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"must be a number, not {shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= 0:
            self.fail(key, f"must be a finite number above 0, not {shown(value)}")
        return number

    def flag(self, key: str) -> bool:
        """true or false; absent or null is false."""
        value = self._value(key, False)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {shown(value)}")
        return value

    def word(self, key: str) -> str | None:
        value = self.mapping.get(key)
        if value is not None and not isinstance(value, str):
            self.fail(key, f"must be text, not {shown(value)}")
        return value

    def words(self, key: str) -> tuple[str, ...] | None:
        value = self.mapping.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            self.fail(key, f"must be a list of names, not {shown(value)}")
        return tuple(value)

    def _value(self, key: str, default: Any) -> Any:
        value = self.mapping.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "is null" if key in self.mapping else "is missing")
        return value


def shown(value: Any) -> str:
    """``value`` as JSON, cut to a readable length."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "…"


def read_json(path: Path, *, missing: str) -> tuple[Any, str]:
    """Content and text of a JSON file. InputError with line and column; ``missing`` is what to do without the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError("no such file", where=str(path), action=missing) from error
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start})", where=str(path)) from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path)) from error
    try:
        return json.loads(text, object_pairs_hook=_unique), text
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise InputError(f"is not JSON: {error.msg}", where=place, action="Mend the file at that place.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not usable JSON: {error}", where=str(path)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are unique: Python would keep the last of two and say nothing."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} is given twice in one object")
        result[key] = value
    return result
