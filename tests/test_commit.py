"""The commit of the code under test: found, told, refused where it could hold a path, and handed to the worker."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from graphtune.commit import COMMIT_VARIABLE, checked_commit, commit_here
from graphtune.errors import InputError
from graphtune.worker.environment import read_environment


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    return subprocess.run(
        ["git", *who, "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_of_the_folder_one_stands_in_and_whether_it_was_changed(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    assert commit_here(inner) is None
    git(tmp_path, "init", "-q")
    assert commit_here(inner) is None, "no commit yet"
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("results")
    assert commit_here(inner) == head
    (tmp_path / "code.py").write_text("a = 2\n")
    assert commit_here(inner) == f"{head}+changes"
    checked_commit(f"{head}+changes", "--commit")


def test_without_git_no_commit_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_here(Path()) is None


@pytest.mark.parametrize("name", ["", "/home/someone/code", "../x", "a b", "-f", "x" * 81, "a\n"])
def test_what_is_no_name_of_a_commit_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="not the name of a commit"):
        checked_commit(name, "--commit")


@pytest.mark.parametrize(("told", "stored"), [("v1.2.3", "v1.2.3"), ("", None), (None, None)])
def test_the_worker_stores_what_it_was_told(
    monkeypatch: pytest.MonkeyPatch, told: str | None, stored: str | None
) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    if told is not None:
        monkeypatch.setenv(COMMIT_VARIABLE, told)
    assert read_environment(None).commit == stored
