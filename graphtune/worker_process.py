"""One cell in a process of its own: started, waited for, and how it ended. What it measured is read by the caller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

WORKER = (sys.executable, "-m", "graphtune.worker")
"""Started with two more arguments: the cell's JSON file and the file to write the result to."""

GRACE_S = 3.0
LONGEST_REASON = 400

StageHook = Callable[[str, int | None, int | None], None]


@dataclass(frozen=True)
class Ending:
    """How a worker ended: its exit code (negative: minus the signal), or None when it was stopped at its time limit."""

    exit_code: int | None
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None


class WorkerProcess:
    """A worker in a session of its own, so that stopping it ends everything it started.

    One started ``ahead`` imports what takes long and touches no device, then waits for ``wait`` to be called.
    """

    def __init__(
        self,
        command: Sequence[str],
        cell_file: Path,
        result_file: Path,
        *,
        environment: Mapping[str, str],
        ahead: bool = False,
    ) -> None:
        self._process = subprocess.Popen(
            [*command, *(("--ahead",) if ahead else ()), str(cell_file), str(result_file)],
            stdin=subprocess.PIPE if ahead else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one pipe keeps the order of the two streams
            env=_environment(environment),
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End it now; nothing when it has ended."""
        _kill_group(self._process)

    def wait(self, log_file: Path, *, timeout_s: float, on_stage: StageHook) -> Ending:
        """Let it go on where it waits, and wait until it ends; the seconds are those from here.

        Its stdout and stderr go to ``log_file``; lines of JSON with a ``stage`` on stdout go to ``on_stage`` instead.
        An exception while waiting (Ctrl-C) stops the worker and passes on. OSError when the log cannot be opened.
        """
        started = time.monotonic()
        process = self._process
        try:
            with log_file.open("ab", buffering=0) as log:
                assert process.stdout is not None
                reader = threading.Thread(target=_read_stages, args=(process.stdout, log, on_stage), daemon=True)
                reader.start()
                try:
                    exit_code = self._ended(timeout_s)
                finally:
                    # A grandchild may hold the pipe open; its output is not worth waiting for.
                    reader.join(GRACE_S)
        except BaseException:
            _end_group(process)
            raise
        return Ending(exit_code, time.monotonic() - started)

    def _ended(self, timeout_s: float) -> int | None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError), self._process.stdin as line:
                line.write(b"\n")
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            return None


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, with the package importable and the parent named: a worker must not outlive it."""
    package_home = str(Path(__file__).resolve().parent.parent)
    search = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{package_home}{os.pathsep}{search}" if search else package_home,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "GRAPHTUNE_PARENT_PID": str(os.getpid()),
        **extra,
    }


def _read_stages(pipe: BinaryIO, log: BinaryIO, on_stage: StageHook) -> None:
    for line in pipe:
        stage = _stage_of(line)
        if stage:
            on_stage(*stage)
        else:
            with suppress(OSError, ValueError):  # a full disk, or the log closed under a straggler
                log.write(line)


def _stage_of(line: bytes) -> tuple[str, int | None, int | None] | None:
    if not line.startswith(b"{"):
        return None
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("stage"), str):
        return None
    done, total = (value if isinstance(value, int) else None for value in (values.get("done"), values.get("total")))
    return values["stage"], done, total


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _kill_group(process)


def crash_reason(ending: Ending, log_file: Path, timeout_s: float) -> tuple[str, str]:
    """Status and reason of a worker that left no result."""
    if ending.timed_out:
        return "timeout", f"took longer than the limit of {timeout_s:g} s and was stopped"
    last = last_line(log_file)
    said = f": {last}" if last else ""
    code = ending.exit_code or 0
    if code == 0:
        return "failed", f"the worker ended without a result{said}"
    if any(word in last for word in ("OutOfMemoryError", "CUDA out of memory", "MemoryError")):
        return "oom", last
    if code == -signal.SIGKILL:
        return "failed", "killed (SIGKILL), possibly by the host's out-of-memory killer"
    if code < 0:
        with suppress(ValueError):
            return "failed", f"ended by {signal.Signals(-code).name}{said}"
    return "failed", f"exit code {code}{said}"


def last_line(log_file: Path) -> str:
    """The last line of a log, where a traceback has its error; a fatal signal's line stands above a stack."""
    try:
        with log_file.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    fatal = [line for line in said if line.startswith("Fatal Python error")]
    return (fatal or said or [""])[-1][:LONGEST_REASON]
