"""What a person writes: a YAML file of keys, with its model read. Every error names file, line and key.

``python -m graphtune.recipe`` prints the JSON Schema that editors complete by (kept in docs/recipe.schema.json).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from graphtune.errors import InputError
from graphtune.model_config import ModelConfig
from graphtune.plan import UNION
from graphtune.recipe_keys import START, ListName, Recipe, recipe_schema, validate_recipe
from graphtune.results import Phase
from graphtune.yaml_source import KeyPath, Source, parse_yaml


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with its model read.

    ``model`` has one rank's shapes where the recipe shards it. ``model_mapping`` is the content of config.json.
    ``weights`` is the folder of safetensors, null for random weights.
    """

    recipe: Recipe
    model: ModelConfig
    model_name: str
    model_mapping: dict[str, Any]
    weights: Path | None
    source: Source

    def as_dict(self) -> dict[str, Any]:
        """The recipe with the model's facts in place of its path: what a sweep stores."""
        values = asdict(self.recipe)
        values["model"] = self.model_mapping
        return values

    @property
    def sha(self) -> str:
        """SHA-256 over what decides the cells; limits and the number of processes may change from call to call."""
        values = self.as_dict()
        del values["limits"], values["processes"]
        return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe file, apply ``key=value`` overrides, check it and read its model. Raises InputError."""
    path = Path(path)
    return parse_recipe(_read_text(path), str(path), path.parent, overrides)


def parse_recipe(text: str, name: str, folder: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The same from text; ``name`` stands for the file in errors, a relative model path starts at ``folder``."""
    values, source = parse_yaml(text, name)
    if not isinstance(values, dict):
        raise InputError("a recipe is a list of keys with values", where=source.where(()), action=START)
    for override in overrides:
        _override(values, source, override)
    recipe = validate_recipe(values, source)
    _check_axes(recipe, source)
    return _with_model(recipe, source, folder)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError("is not UTF-8 text", where=f"{path}:{line}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", where=str(path), action=START) from error


def _override(values: dict[str, Any], source: Source, override: str) -> None:
    flag = f"--set {override}"
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise InputError("is not key=value", where=flag, action="Write for example --set measure.max_seconds=0.1.")
    target = values
    for part in keys[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InputError(f"{part} holds no keys; set it as a whole", where=flag)
        target = inner
    target[keys[-1]], _ = parse_yaml(text, flag)
    source.flags[tuple(keys)] = flag


def _check_axes(recipe: Recipe, source: Source) -> None:
    """What concerns several keys at once."""
    axes = recipe.decode
    for phase in recipe.phases:
        _check_lists(recipe, phase, source)
    if "decode" in recipe.phases and set(axes.backends) == {"eager"}:
        raise InputError("a sweep without graphs has nothing to choose", where=source.where(("decode", "backends")))
    if "prefill" in recipe.phases and set(recipe.prefill.backends) == {"eager"}:
        raise InputError("a sweep without graphs has nothing to choose", where=source.where(("prefill", "backends")))
    if axes.sharing == "together" and len(axes.output) != len(axes.workspace):
        raise InputError(
            f"varies together with output, so it needs {len(axes.output)} values, not {len(axes.workspace)}",
            where=source.where(("decode", "workspace")),
            action="Or write sharing: product for all combinations.",
        )


def _check_lists(recipe: Recipe, phase: Phase, source: Source) -> None:
    for index, choice in enumerate(recipe.lists_of(phase)):
        path: KeyPath = (phase, "lists", index)
        if (choice.engine is None) == (choice.name is None):
            known = ", ".join(get_args(ListName))
            action = f"Write one of {known}, or {{name: mine, sizes: [1, 2, 4]}}."
            raise InputError("must be an engine's list, or a name with sizes", where=source.where(path), action=action)
        if choice.name is not None and choice.sizes is None:
            raise InputError("a named list needs its sizes", where=source.where(path))
        if choice.engine is not None and choice.sizes is not None:
            action = "Give a list of your own a name instead of an engine."
            raise InputError("an engine's list has no sizes", where=source.where((*path, "sizes")), action=action)
        if choice.name is not None and choice.max is not None:
            raise InputError("a named list is taken whole", where=source.where((*path, "max")))
        if choice.name == UNION:
            raise InputError(f"the name {UNION!r} is taken", where=source.where((*path, "name")))


def _with_model(recipe: Recipe, source: Source, folder: Path) -> LoadedRecipe:
    where = source.where(("model",))
    weights = None
    if isinstance(recipe.model, dict):
        name, mapping = recipe.name, json.loads(json.dumps(recipe.model))
        model = ModelConfig.from_mapping(mapping, where=where)
        if recipe.load == "safetensors":
            action = "Write load: random, or name the folder that holds the checkpoint as model."
            raise InputError("a model that is written out has no weights", where=source.where(("load",)), action=action)
    else:
        file = config_file(folder / Path(recipe.model).expanduser(), where)
        name, model = model_name_of(file), ModelConfig.from_path(file)
        mapping = json.loads(file.read_text(encoding="utf-8"))
        if recipe.load == "safetensors":
            weights = file.parent.resolve()
            if not any(weights.glob("*.safetensors")):
                action = "Write load: random, or name the folder that holds the checkpoint."
                raise InputError(f"no .safetensors in {weights}", where=source.where(("load",)), action=action)
    try:
        model = model.shard(recipe.shard)
    except InputError as error:
        raise InputError(error.message, where=source.where(("shard",)), action=error.action) from error
    return LoadedRecipe(recipe, model, name, mapping, weights, source)


def config_file(path: Path, where: str | None = None) -> Path:
    """The config.json that ``path``, a file or a model folder, stands for; InputError at ``where`` if there is none."""
    action = "Name a config.json, or a folder that holds one."
    try:
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            return file
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where=where or str(path), action=action) from error
    raise InputError(f"there is no model at {path}", where=where, action=action)


def model_name_of(file: Path) -> str:
    """``llama-3.1-8b`` of ``llama-3.1-8b.json``, of ``llama-3.1-8b/config.json`` and of a Hugging Face cache folder."""
    if file.stem != "config":
        return file.stem
    cached = next((part for part in file.absolute().parts if part.startswith("models--")), None)
    return cached.rsplit("--", 1)[-1] if cached else file.absolute().parent.name


if __name__ == "__main__":
    print(json.dumps(recipe_schema(), indent=2))
