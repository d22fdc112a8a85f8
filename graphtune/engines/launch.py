"""A launch as it was written: program, environment and options in order, from a command line or a YAML file.

Nothing here knows an engine; what options mean is said by each engine's option table.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from graphtune.engines.base import Flags
from graphtune.errors import InputError
from graphtune.yaml_source import KeyPath, Source, key_text

_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_SHELL_ENDS = frozenset({"&&", "||", ";", "|", "&", "|&"})

# Tokens that say which engine a command starts; what follows belongs to it.
ENGINE_MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("sglang", re.compile(r"sglang\.launch_server|sglang\.bench_one_batch|(.*/)?sglang|lmsysorg/sglang(:.*)?")),
    ("vllm", re.compile(r"vllm\.entrypoints\.\S+|(.*/)?vllm|(.*/)?vllm-openai(:.*)?")),
    ("tensorrt_llm", re.compile(r"(.*/)?trtllm-(serve|bench|llmapi-launch)|tensorrt_llm\.commands\.\S+")),
)


@dataclass(frozen=True)
class Option:
    """One option as written. ``raw`` is the value of a YAML key with its type; ``where`` names flag, or file and
    line."""

    name: str
    values: tuple[str, ...]
    where: str
    raw: Any = None
    joined: bool = False

    def tokens(self) -> tuple[str, ...]:
        if self.joined and len(self.values) == 1:
            return (f"{self.name}={self.values[0]}",)
        return (self.name, *self.values)


@dataclass(frozen=True)
class Launch:
    """``settings`` is the content of a YAML file of an engine that nests its settings there."""

    program: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    settings: Any = None
    source: Source | None = None

    def with_option(self, name: str, *values: str, instead_of: Iterable[str] = ()) -> Launch:
        """The same with one option set in the place of its last spelling, or added at the end."""
        names = {name, *instead_of}
        places = [index for index, option in enumerate(self.options) if option.name in names]
        new = Option(name, values, name)
        kept = [option for index, option in enumerate(self.options) if index not in places[:-1]]
        if not places:
            return replace(self, options=(*kept, new))
        last = self.options[places[-1]]
        return replace(self, options=tuple(new if option is last else option for option in kept))

    def without(self, *names: str) -> Launch:
        return replace(self, options=tuple(option for option in self.options if option.name not in names))

    def with_setting(self, path: tuple[str, ...], value: Any) -> Launch:
        """The same with one nested setting changed; None in the middle of the path becomes a mapping."""
        return replace(self, settings=_set(self.settings, path, value))

    def setting(self, path: tuple[str, ...]) -> Any:
        """A nested setting; None where the path does not lead."""
        value = self.settings
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def where(self, path: KeyPath) -> str:
        """File, line and key of a nested setting."""
        return self.source.where(path) if self.source is not None else key_text(path)

    def flags(self) -> Flags:
        """The launch as it would be written down: arguments, and a YAML text when it has nested settings."""
        args = (
            *(f"{name}={value}" for name, value in self.environment.items()),
            *self.program,
            *(token for option in self.options for token in option.tokens()),
        )
        return Flags(args=args, yaml=None if self.settings is None else dump_yaml(self.settings))


def _set(settings: Any, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = dict(settings) if isinstance(settings, Mapping) else {}
    if len(path) == 1:
        changed[path[0]] = value
    else:
        changed[path[0]] = _set(changed.get(path[0]), path[1:], value)
    return changed


def dump_yaml(settings: Any) -> str:
    """YAML with mappings in blocks and lists on one line, as people write them. Plain values only."""
    import yaml

    def lines(mapping: Mapping[str, Any], indent: str) -> list[str]:
        text = []
        for key, value in mapping.items():
            if isinstance(value, Mapping) and value:
                text += [f"{indent}{key}:", *lines(value, indent + "  ")]
                continue
            plain = list(value) if isinstance(value, tuple) else value
            shown = yaml.safe_dump(plain, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()
            text.append(f"{indent}{key}: {shown}")
        return text

    return "".join(f"{line}\n" for line in lines(settings, ""))


def split_options(tokens: Iterable[str]) -> tuple[tuple[str, ...], tuple[Option, ...]]:
    """Leading positional tokens, then options with the tokens up to the next one. ``--name=value`` is split."""
    leading: list[str] = []
    options: list[Option] = []
    for token in tokens:
        if token.startswith("-") and len(token) > 1 and not _NUMBER.fullmatch(token):
            name, joined, value = token.partition("=")
            options.append(Option(name, (value,) if joined else (), name, joined=bool(joined)))
        elif options and not options[-1].joined:
            options[-1] = replace(options[-1], values=(*options[-1].values, token))
        elif options:
            options[-1] = replace(options[-1], values=(*options[-1].values, token), joined=False)
        else:
            leading.append(token)
    return tuple(leading), tuple(options)


def parse_command(text: str) -> tuple[str | None, Launch]:
    """The engine a shell command starts (None when no part of it names one) and the launch.

    Variables set before the program or with ``docker run -e`` are read; what a shell does after ``|``, ``&&`` or
    ``>`` is not. Raises InputError when quotes do not close.
    """
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text))
    except ValueError as error:
        raise InputError(f"the command cannot be read: {error}", where="launch command") from None
    words = _until_shell_operator(words)
    environment: dict[str, str] = {}
    while words and _ENVIRONMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    engine, cut = None, 0
    for index, word in enumerate(words):
        if word.startswith("-") and engine is not None and index > cut + 1:
            break
        found = next((name for name, mark in ENGINE_MARKS if mark.fullmatch(word)), None)
        if found is not None and (engine is None or found == engine):
            engine, cut = found, index + 1
    before, after = words[:cut], words[cut:]
    for first, second in pairwise(before):
        if first in ("-e", "--env") and _ENVIRONMENT.match(second):
            name, _, value = second.partition("=")
            environment[name] = value
    if engine is None and not (words and words[0].startswith("-")):
        first_option = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
        before, after = words[:first_option], words[first_option:]
    leading, options = split_options(after)
    return engine, Launch((*before, *leading), environment, options)


def _until_shell_operator(words: list[str]) -> list[str]:
    for index, word in enumerate(words):
        if word in _SHELL_ENDS or re.match(r"(\d|&)?>", word):
            return words[:index]
    return words


def options_from_mapping(values: Any, source: Source) -> tuple[Option, ...]:
    """Options of a YAML file whose keys are long flags without dashes, in the order of the file.

    Raises InputError when the file is not a mapping.
    """
    if not isinstance(values, Mapping):
        raise InputError("the file is not a mapping of flags to values", where=source.name)
    options = []
    for key, value in values.items():
        name = "--" + key.lstrip("-").replace("_", "-")
        if value is False or value is None:
            continue
        if value is True:
            written: tuple[str, ...] = ()
        elif isinstance(value, Mapping):
            written = (json.dumps(value, separators=(",", ":")),)
        elif isinstance(value, tuple):
            written = tuple(str(item) for item in value)
        else:
            written = (str(value),)
        options.append(Option(name, written, source.where((key,)), raw=value))
    return tuple(options)
