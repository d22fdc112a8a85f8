"""One Chromium for all tests of this folder, and the pages that they look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from graphtune.compare.page import render as render_comparison
from graphtune.compare.sweeps import compare_sweeps
from graphtune.report import render
from graphtune.tune.recommend import Question
from tests.browser.chromium import Chromium
from tests.synthetic import (
    both_phases_sweep,
    both_phases_traffic,
    cpu_sweep,
    failed_cell,
    h200_sweep,
    small_sweep,
    sweep,
)
from tests.test_compare import changed
from tests.test_compare_outputs import slower

HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\"&"


def _hostile() -> str:
    """Names that are scripts, and a word without a place to break."""
    of = small_sweep((1, 2, 4), processes=2)
    cells = (*(replace(cell, warnings=(HOSTILE, "x" * 400)) for cell in of.cells), failed_cell(HOSTILE))
    return render(replace(of, cells=cells, model_name=HOSTILE, device_name="y" * 120, recipe_name=HOSTILE))


def _comparison() -> str:
    """Some rows slower, and hostile names in everything that may differ."""
    base, new = slower()
    evil = changed(replace(new, path=Path(HOSTILE), device_name=HOSTILE), torch=HOSTILE, device_name=HOSTILE)
    return render_comparison(compare_sweeps(base, evil, allow=["device"]))


BOTH_PHASES = Question(gpu_mem="80", workload=both_phases_traffic())
PAGES: dict[str, Callable[[], str]] = {
    "both phases": lambda: render(both_phases_sweep(), BOTH_PHASES),
    "decode only": lambda: render(h200_sweep(), Question(gpu_mem="16")),
    "cpu": lambda: render(cpu_sweep()),
    "nothing measured": lambda: render(sweep([failed_cell()])),
    "hostile": _hostile,
    "comparison": _comparison,
}


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of page, as files."""
    folder = tmp_path_factory.mktemp("pages")
    files = {}
    for name, text in PAGES.items():
        files[name] = folder / f"{name.replace(' ', '-')}.html"
        files[name].write_text(text(), encoding="utf-8")
    return files
