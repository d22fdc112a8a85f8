"""Which stored sweep answers: the one named, else the newest CUDA sweep under ./reports, else the shipped one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from graphtune.config_file import plain_json
from graphtune.errors import InputError
from graphtune.store import Run, Sweep, find_sweeps, read_run, read_sweep

REPORTS = Path("reports")


class NotSwept(InputError):
    """No sweep answers for the model that was asked."""


def choose_sweep(folder: Path | None = None, model: str | None = None, reports: Path = REPORTS) -> Sweep:
    """Read the sweep that answers for ``model`` (a name, a config.json or its folder; None takes any).

    Without ``folder`` only finished CUDA sweeps count. Raises InputError naming the models that were swept when the
    asked one was not.
    """
    if folder is not None:
        sweep = read_sweep(folder)
        if model is not None and not is_of_model(sweep, model):
            raise _not_swept(model, [(sweep, folder)])
        return sweep
    found = [(read_run(path), path) for path in find_sweeps(reports)]
    finished = [(run, path) for run, path in found if run.device == "cuda" and run.finished_at is not None]
    fitting = [(run, path) for run, path in finished if model is None or is_of_model(run, model)]
    if fitting:
        return read_sweep(max(fitting, key=lambda pair: (pair[0].finished_at or "", str(pair[1])))[1])
    shipped = _shipped()
    if model is None or is_of_model(shipped, model):
        return shipped
    raise _not_swept(model, [*finished, (shipped, shipped.path)])


def _shipped() -> Sweep:
    from graphtune.data import shipped_sweep

    return read_sweep(shipped_sweep())


def config_of(model: str) -> Path | None:
    """The config.json that ``model`` is the path of, or of the folder that holds it; None for a name."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    return file if file.is_file() else None


def is_of_model(run: Run, model: str) -> bool:
    """True when ``model`` names the model or recipe of a sweep, or is a config.json with the same content."""
    if (path := config_of(model)) is not None:
        return plain_json(path) == run.recipe.get("model")
    wanted = model.casefold()
    return wanted in {run.model_name.casefold(), run.recipe_name.casefold(), run.model_name.split("/")[-1].casefold()}


def _not_swept(model: str, swept: Iterable[tuple[Run, Path]]) -> NotSwept:
    places = {path.resolve(): f"{run.model_name} ({path})" for run, path in reversed(list(swept))}
    known = ", ".join(sorted(places.values()))
    return NotSwept(
        f"{model!r} was not swept, and another model's figures do not answer for it",
        where="--model",
        action=f"Swept: {known}. `graphtune recipe` and `graphtune sweep` measure another model.",
    )
