"""The keys of a recipe, read strictly: types and bounds by pydantic, here at the edge, into frozen dataclasses."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from graphtune.errors import InputError
from graphtune.results import Order, Phase, Sharing
from graphtune.yaml_source import KeyPath, Source

START = "`graphtune recipe CONFIG_OR_MODEL_DIR` writes one to start from."

ListName = Literal["sglang", "vllm", "tensorrt_llm", "powers_of_two"]

LARGEST_SIZE = 65_536
LARGEST_CONTEXT = 16_777_216
LARGEST_POOL = 2**40

Size = Annotated[int, Strict(), Field(ge=1, le=LARGEST_SIZE)]
Seconds = Annotated[float, Strict(), Field(gt=0, le=86_400, allow_inf_nan=False)]

_STRICT_KEYS = ConfigDict(extra="forbid")


def _named(value: Any) -> Any:
    """``sglang`` is short for ``{engine: sglang}``."""
    return {"engine": value} if isinstance(value, str) else value


def _at_all_sizes(value: Any) -> Any:
    """``1024`` is short for ``{tokens: 1024}``."""
    return {"tokens": value} if isinstance(value, int) and not isinstance(value, bool) else value


def _none_for(word: str) -> BeforeValidator:
    def replace(value: Any) -> Any:
        if value is None:
            raise ValueError(f"must not be empty; write {word} or leave the key out")
        return None if value == word else value

    return BeforeValidator(replace)


def _model(value: Any) -> Any:
    if isinstance(value, dict) or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("must be a path to a config.json or a model folder, or the content of a config.json")


@dataclass(frozen=True)
class ListChoice:
    """An engine's default list, whose largest size ``max`` sets, or a ``name`` with ``sizes``."""

    __pydantic_config__ = _STRICT_KEYS

    engine: ListName | None = None
    max: Size | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")] | None = None
    sizes: Annotated[tuple[Size, ...], Field(min_length=1, max_length=4096)] | None = None


@dataclass(frozen=True)
class ContextChoice:
    """A context length in tokens and the batch sizes to time there; null means every size of every list."""

    __pydantic_config__ = _STRICT_KEYS

    tokens: Annotated[int, Strict(), Field(ge=1, le=LARGEST_CONTEXT)]
    sizes: Annotated[
        Annotated[tuple[Size, ...], Field(min_length=1, max_length=4096)] | None,
        _none_for("all"),
        WithJsonSchema(
            {"anyOf": [{"const": "all"}, {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1}}]}
        ),
    ] = None


@dataclass(frozen=True)
class DecodeAxes:
    """What is captured and timed for decode. Sizes are requests, contexts are KV tokens per request."""

    __pydantic_config__ = _STRICT_KEYS

    lists: Annotated[
        tuple[Annotated[ListChoice, BeforeValidator(_named, json_schema_input_type=ListName | ListChoice)], ...],
        Field(min_length=1, max_length=64),
    ] = (ListChoice(engine="sglang"),)
    backends: Annotated[tuple[Literal["eager", "full", "breakable"], ...], Field(min_length=1)] = ("eager", "full")
    order: Annotated[tuple[Order, ...], Field(min_length=1)] = ("descending",)
    output: Annotated[tuple[Sharing, ...], Field(min_length=1)] = ("shared",)
    workspace: Annotated[tuple[Sharing, ...], Field(min_length=1)] = ("shared",)
    sharing: Literal["together", "product"] = "together"
    contexts: Annotated[
        tuple[
            Annotated[ContextChoice, BeforeValidator(_at_all_sizes, json_schema_input_type=int | ContextChoice)], ...
        ],
        Field(max_length=64),
    ] = (ContextChoice(tokens=1024),)
    profile_sizes: tuple[Size, ...] = ()


@dataclass(frozen=True)
class PrefillBatch:
    """Batches of ``requests`` requests, each behind ``prefix`` cached tokens, timed at ``sizes`` new tokens in all."""

    __pydantic_config__ = _STRICT_KEYS

    sizes: Annotated[tuple[Size, ...], Field(min_length=1, max_length=4096)]
    requests: Annotated[int, Strict(), Field(ge=1, le=4096)] = 1
    prefix: Annotated[int, Strict(), Field(ge=0, le=LARGEST_CONTEXT)] = 0


@dataclass(frozen=True)
class PrefillAxes:
    """What is captured and timed for prefill. Sizes are new tokens of a batch. ``waste_cap``: padded tokens per real
    one above which a prefill runs eager; null for no cap. ``full_up_to``: the largest size recorded in full too;
    null for all."""

    __pydantic_config__ = _STRICT_KEYS

    lists: Annotated[
        tuple[Annotated[ListChoice, BeforeValidator(_named, json_schema_input_type=ListName | ListChoice)], ...],
        Field(min_length=1, max_length=64),
    ] = (ListChoice(engine="sglang"),)
    backends: Annotated[tuple[Literal["eager", "breakable", "full"], ...], Field(min_length=1)] = (
        "eager",
        "breakable",
    )
    order: Annotated[tuple[Order, ...], Field(min_length=1)] = ("descending",)
    waste_cap: Annotated[
        Annotated[float, Field(ge=1, le=LARGEST_SIZE, allow_inf_nan=False)] | None,
        _none_for("none"),
        WithJsonSchema({"anyOf": [{"const": "none"}, {"type": "number", "minimum": 1}]}),
    ] = 2.0
    full_up_to: Size | None = None
    batches: Annotated[tuple[PrefillBatch, ...], Field(max_length=64)] = ()
    profile_sizes: tuple[Size, ...] = ()


@dataclass(frozen=True)
class MeasureChoice:
    """When sampling stops: at relative ``noise`` with ``min_samples``, or after ``max_seconds``."""

    __pydantic_config__ = _STRICT_KEYS

    min_samples: Annotated[int, Strict(), Field(ge=2, le=20)] = 7
    noise: Annotated[float, Strict(), Field(gt=0, le=1, allow_inf_nan=False)] = 0.02
    max_seconds: Seconds = 0.3


@dataclass(frozen=True)
class MemoryChoice:
    """Captures for memory alone: every size by itself, and per sharing setting ``fit`` random lists that predictions
    are checked by and ``held_out`` ones that are kept back."""

    __pydantic_config__ = _STRICT_KEYS

    fit: Annotated[int, Strict(), Field(ge=0, le=64)] = 4
    held_out: Annotated[int, Strict(), Field(ge=0, le=64)] = 8


@dataclass(frozen=True)
class Limits:
    """``cell_timeout_s``: a process that takes longer is stopped and its cell stored as a time-out."""

    __pydantic_config__ = _STRICT_KEYS

    cell_timeout_s: Seconds = 1800.0


@dataclass(frozen=True)
class Recipe:
    """One sweep as asked for. ``kv_tokens`` null is as many as the timed steps need; ``memory`` null is no captures for
    memory alone, so that only the lists that were measured have known bytes."""

    __pydantic_config__ = _STRICT_KEYS

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,79}$")]
    model: Annotated[Any, AfterValidator(_model), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})]
    load: Literal["random", "safetensors"] = "random"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    seed: Annotated[int, Strict(), Field(ge=0, le=2**31 - 1)] = 0
    shard: Annotated[int, Strict(), Field(ge=1, le=1024)] = 1
    phases: Annotated[tuple[Phase, ...], Field(min_length=1, max_length=2)] = ("decode",)
    attention: Literal["auto", "flashinfer", "sdpa"] = "auto"
    page_size: Literal[1, 16, 64] = 16
    kv_tokens: Annotated[
        Annotated[int, Strict(), Field(ge=2, le=LARGEST_POOL)] | None,
        _none_for("auto"),
        WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 2}]}),
    ] = None
    processes: Annotated[int, Strict(), Field(ge=1, le=20)] = 1
    decode: DecodeAxes = field(default_factory=DecodeAxes)
    prefill: PrefillAxes = field(default_factory=PrefillAxes)
    measure: MeasureChoice = field(default_factory=MeasureChoice)
    memory: MemoryChoice | None = None
    limits: Limits = field(default_factory=Limits)

    def lists_of(self, phase: Phase) -> tuple[ListChoice, ...]:
        """The lists that a phase captures."""
        return self.decode.lists if phase == "decode" else self.prefill.lists


@cache
def _adapter() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file."""
    schema = _adapter().json_schema()
    for part, key, word in (("ContextChoice", "sizes", "all"), ("Recipe", "kv_tokens", "auto")):
        properties = schema["properties"] if part == "Recipe" else schema["$defs"][part]["properties"]
        properties[key]["default"] = word
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "graphtune recipe"
    return schema


def validate_recipe(values: dict[str, Any], source: Source) -> Recipe:
    """A Recipe of plain values; InputError names the place of the first fault, unknown keys before others."""
    try:
        return _adapter().validate_python(values)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        faults.sort(key=lambda fault: fault["type"] != "unexpected_keyword_argument")
        fault = faults[0]
        path = tuple(fault["loc"])
        message, action = _message(fault, path)
        raise InputError(message, where=source.where(path), action=action) from error


def _message(fault: Any, path: KeyPath) -> tuple[str, str | None]:
    context = fault.get("ctx", {})
    given = _shown(fault.get("input"))
    match fault["type"]:
        case "unexpected_keyword_argument":
            known = _known_keys(path[:-1])
            near = difflib.get_close_matches(str(path[-1]), known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Keys here: {', '.join(known)}."
            return "unknown key", hint
        case "missing":
            return "this key is missing", START if len(path) == 1 else None
        case "tuple_type":
            return f"must be a list, not {given}", f"Write [{given}]." if not isinstance(fault["input"], dict) else None
        case "dataclass_type":
            return f"must be a mapping of keys, not {given}", f"Keys here: {', '.join(_known_keys(path))}."
        case "literal_error":
            return f"must be {context['expected']}, not {given}", None
        case "int_type" | "float_type" | "float_parsing":
            return f"must be a {'whole ' if fault['type'] == 'int_type' else ''}number, not {given}", None
        case "greater_than_equal":
            return f"must be at least {context['ge']}, not {given}", None
        case "less_than_equal":
            return f"must be at most {context['le']}, not {given}", None
        case "greater_than":
            return f"must be above {context['gt']}, not {given}", None
        case "string_pattern_mismatch":
            return f"must be letters, digits, dots and dashes ({context['pattern']}), not {given}", None
        case "too_short":
            return "must not be empty", None
        case "value_error":
            return str(context["error"]), None
    return f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, not {given}", None


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list"
    text = "empty" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_PARTS: dict[str, type[Any]] = {
    "decode": DecodeAxes,
    "prefill": PrefillAxes,
    "measure": MeasureChoice,
    "memory": MemoryChoice,
    "limits": Limits,
}
_ITEMS: dict[str, type[Any]] = {"lists": ListChoice, "contexts": ContextChoice, "batches": PrefillBatch}


def _known_keys(path: KeyPath) -> list[str]:
    names = [part for part in path if isinstance(part, str)]
    kind: type[Any] = Recipe
    if names:
        kind = _ITEMS.get(names[-1], _PARTS.get(names[0], Recipe))
    return list(kind.__dataclass_fields__)
