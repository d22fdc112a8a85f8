"""The demonstrations of docs/failures.md: each goes wrong as it says, and each cure holds."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "failures"
PAGE = (ROOT / "docs" / "failures.md").read_text()
DEMONSTRATIONS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "small_engine")
EXACT = 1e-5


@pytest.fixture
def demonstration(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module(request.param)
    for name in ("small_engine", request.param):
        sys.modules.pop(name, None)


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("demonstration", [name], indirect=True)


@of("rebound_input")
def test_a_rebound_input_is_read_at_its_old_address_until_the_check_names_it(demonstration: ModuleType) -> None:
    assert demonstration.wrong() > 0.1
    said, error = demonstration.cured()
    assert said == "changed since capture: input_ids" and error < EXACT


@of("stale_slot")
def test_a_stale_slot_damages_another_request_until_its_tail_is_zeroed(demonstration: ModuleType) -> None:
    assert [(check.size, check.passed, check.kv_untouched) for check in demonstration.wrong()] == [
        (2, False, False),
        (4, False, False),
    ]
    assert [(check.size, check.passed, check.kv_untouched) for check in demonstration.cured()] == [
        (2, True, True),
        (4, True, True),
    ]


@of("capture_order")
def test_small_to_large_takes_more_and_large_to_small_no_more_than_the_largest(demonstration: ModuleType) -> None:
    assert demonstration.wrong() > 1.2 * demonstration.cured()
    assert demonstration.cured() == demonstration.largest_alone()


@of("lazy_cache")
def test_a_cache_filled_while_recording_is_overwritten_and_named(demonstration: ModuleType) -> None:
    (stray,), intact = demonstration.wrong()
    assert not intact and 'cache["table"] = base + base' in stray and "lazy_cache.py" in stray
    assert demonstration.cured() == ((), True)


@of("late_read")
def test_an_output_read_late_is_that_of_another_step_unless_copied(demonstration: ModuleType) -> None:
    assert demonstration.wrong() > 0.1 and demonstration.cured() < EXACT


@of("frozen_plan")
def test_a_number_is_frozen_a_read_is_refused_and_a_tensor_follows(demonstration: ModuleType) -> None:
    assert demonstration.wrong() == pytest.approx(4)
    assert "Tensor.item" in demonstration.refused() and "frozen_plan.py" in demonstration.refused()
    assert demonstration.cured() < EXACT


def test_every_demonstration_is_on_the_page() -> None:
    assert len(DEMONSTRATIONS) == 6
    assert sorted(re.findall(r"\]\(failures/(\w+)\.py\)", PAGE)) == DEMONSTRATIONS


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_a_demonstration_prints_what_the_page_shows(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    sys.modules.pop("small_engine", None)
    printed = capsys.readouterr().out
    section = PAGE[: PAGE.index(f"failures/{name}.py)")].rpartition("\n## ")[2]
    shown = [line.strip() for line in section.splitlines() if line.startswith("    ")]

    def without_figures(line: str) -> str:
        return re.sub(r"[\d.,]+(e[-+]\d+)?%?", "#", line)

    assert [without_figures(line) for line in printed.splitlines()] == [without_figures(line) for line in shown]


def test_a_demonstration_runs_by_itself_as_the_page_says() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(FOLDER / "late_read.py")], cwd=ROOT, env=environment, check=True)
