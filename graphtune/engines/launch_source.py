"""A launch as users name it: flags, a whole command in quotes, or a file of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from graphtune.engines import engine_named
from graphtune.engines.launch import Launch, options_from_mapping, parse_command, split_options
from graphtune.errors import InputError
from graphtune.yaml_source import parse_yaml


def launch_of(args: Sequence[str], engine: str | None, config: str | None) -> tuple[str | None, Launch, str]:
    """The launch in the arguments: one quoted command, or flags; over a file's settings."""

    named = engine_named(engine).name if engine is not None else None
    source = "flags"
    if len(args) == 1 and " " in args[0].strip():
        found, launch = parse_command(args[0])
        if named is not None and found is not None and found != named:
            raise InputError(f"the command starts {found}, not {named}", where="launch command")
        named, source = named or found, "command"
        if named is None:
            raise InputError(
                "the command does not say which engine it starts", where="launch command", action="Add --engine."
            )
    else:
        leading, options = split_options(args)
        if leading:
            raise InputError(
                f"{leading[0]!r} is neither a flag nor a launch command",
                where="launch command",
                action='Write flags, or the whole command in quotes: "vllm serve MODEL --max-num-seqs 8".',
            )
        launch = Launch(options=options)
    inner = [option for option in launch.options if option.name in _CONFIG_FLAGS and option.values]
    if inner:
        launch = launch.without(*_CONFIG_FLAGS)
        config = config or inner[-1].values[0]
    if config is None:
        return named, launch, source
    if named is None:
        raise InputError("no engine is named", where=config, action="Add --engine sglang, vllm or tensorrt-llm.")
    return named, replace(_with_file(launch, named, config)), "config" if source == "flags" else source


_CONFIG_FLAGS = ("--config", "--extra_llm_api_options", "--extra-llm-api-options")


def _with_file(launch: Launch, engine: str, config: str) -> Launch:
    """The launch over the settings of a file: nested for TensorRT-LLM, else long flags as keys."""

    try:
        text = Path(config).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(
            "no such file", where=config, action="Name the YAML or JSON that the engine is given."
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start})", where=config) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=config) from None
    values, source = parse_yaml(text, config)
    if engine == "tensorrt_llm":
        if not isinstance(values, dict):
            raise InputError("the file is not a mapping of settings", where=config)
        return replace(launch, settings=values, source=source)
    return replace(launch, options=(*options_from_mapping(values, source), *launch.options))
