"""Ties the worker's life to its parent's: a sweep that is killed must not leave a process holding the GPU."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "GRAPHTUNE_PARENT_PID"


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when its parent ends, and end now if the parent is gone already."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is not None and os.getppid() != int(expected):
        sys.exit("the sweep that started this worker has ended")
