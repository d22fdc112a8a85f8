"""vLLM's flags: what its parser takes, and the settings they come to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from graphtune.engines.base import Serving
from graphtune.engines.launch import Launch, Option
from graphtune.engines.options import Given, Reading, json_object, read_options, sized, whole_number
from graphtune.engines.vllm import modes
from graphtune.engines.vllm.keys import COMPILATION_KEYS, COMPILE_MODES, GONE_KEYS, REJECTED, SUFFIXES, TABLE
from graphtune.engines.vllm.rules import Asked, Runner

RUNNER_OF_ENVIRONMENT: dict[str, Runner] = {"0": "V1", "1": "V2"}


@dataclass(frozen=True)
class Settings:
    """What the flags come to. ``where`` gives the flag or the file's line of a setting for messages."""

    asked: Asked
    mode: modes.Mode
    mode_explicit: bool
    serving: Serving
    where: Mapping[str, str]
    compilation: Mapping[str, Any] = field(default_factory=dict)
    enforce_eager: bool = False
    compile_mode: int = 3
    breakable: bool = False
    lora: bool = False
    runner: Runner | None = None
    attention: str | None = None
    flash_attention: int | None = None
    pooling: bool = False
    dynamic_speculation: bool = False
    draft_model: bool = False
    kv_cache_bytes: int | None = None
    unknown_keys: tuple[str, ...] = ()


def read(launch: Launch) -> tuple[Settings, Reading]:
    """Settings of a launch; refusals are what the engine's parser or its check of the settings would stop at."""
    reading = Reading()
    plain = [_dashed(option) for option in launch.options]
    compilation = _compilation(plain, reading)
    level = _level(plain, reading)
    rest = [
        o
        for o in plain
        if not _is_compilation(o.name) and not (o.name.startswith("-O") and o.name[2:3] in "0123456789")
    ]
    read_options(rest, TABLE, REJECTED, SUFFIXES, reading)
    serving = _serving(reading)
    asked = _asked(reading, compilation)
    mode, explicit = _mode(reading, compilation, reading.get("optimization_level", level))
    attention = reading.get("attention_config") or {}
    environment = launch.environment
    settings = Settings(
        asked,
        mode,
        explicit,
        serving,
        {name: given.where for name, given in reading.values.items()},
        compilation,
        enforce_eager=bool(reading.get("enforce_eager")),
        compile_mode=_compile_mode(reading, compilation, level),
        breakable=environment.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1",
        lora=bool(reading.get("enable_lora")),
        runner=RUNNER_OF_ENVIRONMENT.get(environment.get("VLLM_USE_V2_MODEL_RUNNER", "")),
        attention=reading.get("attention_backend")
        or _text(attention.get("backend"))
        or environment.get("VLLM_ATTENTION_BACKEND"),
        flash_attention=attention.get("flash_attn_version")
        if isinstance(attention.get("flash_attn_version"), int)
        else None,
        pooling=reading.get("runner") == "pooling",
        draft_model=_has_draft_model(reading),
        dynamic_speculation="num_speculative_tokens_per_batch_size" in (reading.get("speculative_config") or {}),
        kv_cache_bytes=reading.get("kv_cache_memory_bytes"),
        unknown_keys=tuple(
            key for key in compilation if key not in COMPILATION_KEYS and not key.startswith("decoder_replay_")
        ),
    )
    return settings, reading


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _dashed(option: Option) -> Option:
    """The engine's parser takes underscores for dashes in long flags."""
    if option.name.startswith("--"):
        head, dot, rest = option.name.partition(".")
        return replace(option, name=head.replace("_", "-") + dot + rest)
    return option


def _is_compilation(name: str) -> bool:
    return name in ("-cc", "--compilation-config") or name.startswith(("-cc.", "--compilation-config."))


def _compilation(options: list[Option], reading: Reading) -> dict[str, Any]:
    """The compilation settings: whole JSON, or dotted keys, later ones over earlier ones."""
    merged: dict[str, Any] = {}
    for option in options:
        if not _is_compilation(option.name):
            continue
        _, _, key = option.name.partition(".")
        shown = " ".join((option.name, *option.values))
        if not option.values:
            reading.refuse(option.where, f"{option.name} has no value", "a JSON object")
            continue
        try:
            given = json_object(option.values[0]) if not key else _dotted(key, option.values, merged)
        except ValueError as error:
            reading.refuse(option.where, f"{shown} cannot be read ({error})", "a JSON object, or -cc.key=value")
            continue
        for name, value in given.items():
            if name in GONE_KEYS:
                reading.refuse(option.where, f"{name} is not a key of the compilation settings", GONE_KEYS[name])
                continue
            merged[name] = value
            reading.values[f"compilation.{name}"] = Given(value, option.where)
    return merged


def _dotted(key: str, values: tuple[str, ...], merged: dict[str, Any]) -> dict[str, Any]:
    """``-cc.key=value``, ``-cc.key value``, ``-cc.key+ a,b`` (appends to a list)."""
    if key.endswith("+"):
        name = key[:-1]
        before = merged.get(name)
        return {name: [*(before if isinstance(before, list) else []), *(_scalar(v) for v in values[0].split(","))]}
    head, _, rest = key.partition(".")
    if rest:
        inner = merged.get(head)
        return {head: {**(inner if isinstance(inner, dict) else {}), rest: _scalar(values[0])}}
    return {key: _scalar(values[0])}


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text


def _level(options: list[Option], reading: Reading) -> int:
    """The optimisation level of ``-O2``, ``-O 2``; the default is 2."""
    level = 2
    for option in options:
        if not option.name.startswith("-O") or option.name.startswith("--"):
            continue
        text = option.name[2:] or (option.values[0] if option.values else "")
        try:
            level = whole_number(text)
        except ValueError:
            reading.refuse(option.where, f"{option.name} {' '.join(option.values)} is no optimisation level", "0 to 3")
    if not 0 <= level <= 3:
        reading.refuse("-O", f"optimisation level {level} fails the check of the settings", "0 to 3")
        return 2
    return level


def _serving(reading: Reading) -> Serving:
    speculative = reading.get("speculative_config") or {}
    tokens = reading.get("spec_tokens")
    inner = speculative.get("num_speculative_tokens")
    if tokens is not None and inner is not None:
        where = reading.where("spec_tokens") or "--spec-tokens"
        reading.refuse(where, "--spec-tokens and num_speculative_tokens of --speculative-config are both given", "one")
    if tokens is None and isinstance(inner, int) and not isinstance(inner, bool):
        tokens = inner
    for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("spec_tokens", 0)):
        value = reading.get(name)
        if value is not None and value < least:
            reading.refuse(reading.where(name) or name, f"{name} is {value}", f"at least {least}")
            reading.values.pop(name)
    return Serving(
        tp=max(reading.get("tp", 1), 1),
        pp=max(reading.get("pp", 1), 1),
        dp=max(reading.get("dp", 1), 1),
        max_running_requests=reading.get("max_num_seqs"),
        max_batched_tokens=reading.get("max_num_batched_tokens"),
        context_len=_context(reading),
        spec_tokens=max(tokens or 0, 0),
        performance_mode=reading.get("performance_mode", "balanced"),
        mem_fraction=_utilization(reading),
    )


def _context(reading: Reading) -> int | None:
    text = reading.get("max_model_len")
    if text is None or text in ("auto", "-1"):
        return None
    try:
        value = sized(text, SUFFIXES)
    except ValueError as error:
        reading.refuse(reading.where("max_model_len") or "", f"--max-model-len {text} cannot be read ({error})")
        return None
    if value < 1:
        reading.refuse(reading.where("max_model_len") or "", f"--max-model-len is {value}", "at least 1, or auto")
        return None
    return value


def _utilization(reading: Reading) -> float | None:
    value = reading.get("gpu_memory_utilization")
    if value is not None and not 0 < value <= 1:
        where = reading.where("gpu_memory_utilization") or ""
        reading.refuse(where, f"--gpu-memory-utilization {value} fails the check of the settings", "above 0, at most 1")
        return None
    return cast("float | None", value)


def _asked(reading: Reading, compilation: Mapping[str, Any]) -> Asked:
    """List and maximum; a flag and its JSON twin exclude each other."""
    found: dict[str, Any] = {}
    for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        flag, inner = reading.get(name), compilation.get(name)
        where = reading.where(name) or reading.where(f"compilation.{name}") or name
        if flag is not None and inner is not None:
            reading.refuse(
                where, f"--{name.replace('_', '-')} and {name} of --compilation-config are both given", "one"
            )
        found[name] = inner if flag is None else flag
    sizes, largest = found["cudagraph_capture_sizes"], found["max_cudagraph_capture_size"]
    where = reading.where("compilation.cudagraph_capture_sizes") or "--cudagraph-capture-sizes"
    if sizes is not None and not (isinstance(sizes, list | tuple) and all(_is_whole(size) for size in sizes)):
        reading.refuse(where, f"cudagraph_capture_sizes {sizes!r} is refused", "a list of whole numbers")
        sizes = None
    if largest is not None and not _is_whole(largest):
        reading.refuse(where, f"max_cudagraph_capture_size {largest!r} is refused", "a whole number")
        largest = None
    return Asked(None if sizes is None else tuple(sizes), largest)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _mode(reading: Reading, compilation: Mapping[str, Any], level: int) -> tuple[modes.Mode, bool]:
    given = compilation.get("cudagraph_mode")
    if given is None:
        return modes.DEFAULT_MODE_OF_LEVEL.get(level, "FULL_AND_PIECEWISE"), False
    simple = {0: "NONE", 1: "PIECEWISE", 2: "FULL"}
    name = simple.get(given, "") if _is_whole(given) else str(given).upper()
    if name not in modes.MODES:
        where = reading.where("compilation.cudagraph_mode") or "--compilation-config"
        reading.refuse(where, f"cudagraph_mode {given!r} stops the engine with a KeyError", ", ".join(modes.MODES))
        return "FULL_AND_PIECEWISE", False
    return name, True


def _compile_mode(reading: Reading, compilation: Mapping[str, Any], level: int) -> int:
    given = compilation.get("mode")
    if given is None:
        return 0 if level == 0 else 3
    if _is_whole(given) and 0 <= given <= 3:
        return int(given)
    if isinstance(given, str) and given.upper() in COMPILE_MODES:
        return COMPILE_MODES[given.upper()]
    where = reading.where("compilation.mode") or "--compilation-config"
    reading.refuse(where, f"compile mode {given!r} is refused", "0 to 3, or " + ", ".join(COMPILE_MODES))
    return 3


def _has_draft_model(reading: Reading) -> bool:
    method = (reading.get("speculative_config") or {}).get("method") or reading.get("spec_method")
    return method is not None and str(method) not in ("ngram", "suffix")
