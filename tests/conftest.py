"""Which tests run here, and the folder with field data."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

FIELD_DATA = "GRAPHTUNE_FIELD_DATA"


def has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def deselection_reasons(asked_for: str) -> dict[str, str]:
    """Marker to reason, for every marker whose tests cannot run here. ``asked_for`` is the -m expression."""
    reasons = {}
    folder = os.environ.get(FIELD_DATA)
    if not folder:
        reasons["field_data"] = f"{FIELD_DATA} is not set"
    elif not Path(folder).is_dir():
        reasons["field_data"] = f"{FIELD_DATA}={folder} is not a folder"
    if not re.search(r"(?<!not )\bbrowser\b", asked_for):
        reasons["browser"] = "run them with -m browser"
    return reasons


@pytest.hookimpl(tryfirst=True)  # before -m is applied, which names nothing
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = deselection_reasons(config.getoption("-m") or "")
    if any(item.get_closest_marker("gpu") for item in items) and not has_cuda():
        reasons["gpu"] = "no CUDA device"
    kept, left_out = [], []
    named: dict[str, None] = {}  # one line for all parameters of a test
    for item in items:
        marker = next((name for name in reasons if item.get_closest_marker(name)), None)
        if marker is None:
            kept.append(item)
        else:
            left_out.append(item)
            named.setdefault(f"{item.nodeid.partition('[')[0]} ({marker}: {reasons[marker]})", None)
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("first") is None)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    config.stash[_LEFT_OUT] = list(named)


_LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tests that could not run are named, so that a green run never hides them."""
    for line in config.stash.get(_LEFT_OUT, []):
        terminalreporter.write_line(f"not run here: {line}")


@pytest.fixture(scope="session")
def field_data() -> Path:
    """The folder in GRAPHTUNE_FIELD_DATA; only tests marked ``field_data`` may ask for it."""
    return Path(os.environ[FIELD_DATA]).resolve()
