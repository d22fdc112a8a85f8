"""Which commit of the code under test a sweep measured."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from graphtune.errors import InputError

COMMIT_VARIABLE = "GRAPHTUNE_COMMIT"
"""Names the commit where there is no repository, as in a container; a worker reads it there."""
GIT_TIMEOUT_S = 20.0
CHANGED = "+changes"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")


def commit_here(folder: Path) -> str | None:
    """The commit checked out in the repository that ``folder`` is in, with ``+changes`` where tracked files differ
    from it; None without a repository, a commit or git."""
    head = _git(folder, "rev-parse", "--verify", "HEAD")
    if not head:
        return None
    return head + (CHANGED if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def checked_commit(name: str, where: str) -> str:
    """``name`` as it may be stored: letters, digits and ``._+-``, never a path. Raises InputError."""
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is not the name of a commit",
            where=where,
            action="Write a hash or a tag: letters, digits, dots and dashes, at most 80.",
        )
    return name


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
