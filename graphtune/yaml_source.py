"""YAML as plain values, with the line of every key, so that errors can name file, line and key path."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from graphtune.errors import InputError

KeyPath = tuple[str | int, ...]


def key_text(path: KeyPath) -> str:
    """``decode.lists[0].sizes[2]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@dataclass(frozen=True)
class Source:
    """Where values came from: a file's name, the line of every key path, and paths that a flag has set."""

    name: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    flags: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """``recipe.yaml:12: decode.lists[0]``; the nearest parent's line where the key itself is not written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.flags:
                return f"{self.flags[path[:length]]}: {key_text(path)}"
        line = next(self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines or n == 0)
        return f"{self.name}:{line}" + (f": {key_text(path)}" if path else "")


def parse_yaml(text: str, name: str) -> tuple[Any, Source]:
    """Plain values (dict, tuple, str, int, float, bool, None) of one YAML document and their lines.

    Raises InputError with the line for anything that is not one document of plain YAML: syntax, repeated keys, keys
    that are not text, tags, anchors and aliases.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return None, Source(name, {(): 1})
        reader = _Reader(name)
        return reader.value(node, ()), Source(name, reader.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise InputError(
            f"is not YAML: {error.problem or error}", where=f"{name}:{mark.line + 1 if mark else 1}"
        ) from error
    except yaml.YAMLError as error:
        raise InputError(f"is not YAML: {' '.join(str(error).split())}", where=f"{name}:1") from error
    except RecursionError as error:
        raise InputError("is nested too deeply", where=f"{name}:1") from error


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-05 for text; JSON and people mean a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+\Z", re.ASCII), list("-+0123456789")
)


class _Reader:
    """Turns nodes into values. Aliases are refused, so a short file cannot stand for a huge or endless value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[KeyPath, int] = {(): 1}
        self._seen: set[int] = set()
        self._scalars = _Loader("")

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        if id(node) in self._seen:
            raise InputError("anchors and aliases are not read here; write the value out", where=self._at(line, path))
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.value(child, (*path, index)) for index, child in enumerate(node.value))
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise InputError("a key must be text", where=self._at(line, path))
            if key in values:
                raise InputError("this key is written twice", where=self._at(line, (*path, key)))
            self.lines[(*path, key)] = line
            values[key] = self.value(value_node, (*path, key))
        return values

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        try:
            value = self._scalars.construct_object(node)
        except (ValueError, yaml.YAMLError) as error:
            text = str(node.value)[:40]
            raise InputError(f"{text!r} cannot be read as a value", where=self._at(line, path)) from error
        if isinstance(value, int) and abs(value) >= 2**63:
            raise InputError("the number is too large", where=self._at(line, path))
        if value is not None and not isinstance(value, str | int | float):
            return str(node.value)  # dates and binary blobs: nothing in a recipe is one, so they are text
        return value

    def _at(self, line: int, path: KeyPath) -> str:
        return f"{self.name}:{line}" + (f": {key_text(path)}" if path else "")
