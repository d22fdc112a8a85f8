"""What an installed graphtune carries, and what its commands cost to start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import graphtune
from graphtune.data import SHIPPED, shipped_sweep
from graphtune.errors import InputError
from graphtune.store import CELLS_FILE, RUN_FILE

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree whose shipped sweep is made up, so that its place in the wheel can be seen."""
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "graphtune", tree / "graphtune", ignore=ignore)
    for name in ("pyproject.toml", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, tree / name)
    sweep = tree / "reports" / SHIPPED
    (sweep / "logs").mkdir(parents=True)
    for name in (RUN_FILE, CELLS_FILE, "report.html", "logs/cell.log"):
        (sweep / name).write_text(f"made-up {name}")
    (tree / "reports" / "other-sweep").mkdir()
    (tree / "reports" / "other-sweep" / RUN_FILE).write_text("{}")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tree / "dist")],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    return next((tree / "dist").glob("*.whl"))


def test_the_wheel_holds_the_package_and_one_copy_of_the_sweep(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("graphtune/")}
    assert {f"graphtune/shipped/{SHIPPED}/{name}" for name in (RUN_FILE, CELLS_FILE)} == {
        name for name in package if "shipped" in name
    }
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "graphtune").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert in_tree <= package
    assert {name.split("/")[0] for name in names} == {"graphtune", f"graphtune-{graphtune.__version__}.dist-info"}


def test_an_installed_package_finds_its_sweep(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    found = subprocess.run(
        [sys.executable, "-m", "graphtune.data"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert found == str(tmp_path / "graphtune" / "shipped" / SHIPPED)
    assert (Path(found) / CELLS_FILE).read_text() == f"made-up {CELLS_FILE}"


def test_a_source_tree_finds_its_sweep_under_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphtune.data.__file__", str(tmp_path / "graphtune" / "data.py"))
    with pytest.raises(InputError, match="is missing from this installation"):
        shipped_sweep()
    place = tmp_path / "reports" / SHIPPED
    place.mkdir(parents=True)
    (place / RUN_FILE).write_text("{}")
    assert shipped_sweep() == place


def test_the_wheel_is_stamped_with_the_constant_version(wheel: Path) -> None:
    assert wheel.name.startswith(f"graphtune-{graphtune.__version__}-py3-none-any")


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    pinned = {
        re.split(r"[=<>]", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    for requirement in [*PROJECT["project"]["dependencies"], *extras["test"], *extras["dev"]]:
        assert re.split(r"[=<>\[ ]", requirement)[0].lower() in pinned
    assert "flashinfer-python>=0.6.13,<0.7" in extras["cuda"]
    assert "@" not in (ROOT / "constraints.txt").read_text()


def imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "pandas", "numpy", "matplotlib", "rich", "pydantic", "yaml", "jinja2", "pynvml"}
    code = "import sys; sys.argv = ['graphtune', '--help']\nfrom graphtune.cli.app import main\nmain()"
    assert imported_by(code) & heavy == set()


def test_only_the_worker_imports_torch() -> None:
    offenders = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "graphtune").rglob("*.py")
        if "worker" not in path.relative_to(ROOT).parts
        and re.search(r"^\s*(import|from) (torch|flashinfer|graphtune\.worker)\b", path.read_text(), re.MULTILINE)
    ]
    probe = ["graphtune/device.py"]  # asks torch about CUDA in a child process; the import is inside that child's code
    assert offenders == probe
