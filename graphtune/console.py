"""What a running sweep says on stderr: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from graphtune.units import format_duration_s

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Told by a sweep what goes on. ``total`` may grow while it runs; seconds left are an estimate, None at first."""

    def cell_started(self, number: int, total: int, what: str, expected_s: float) -> None: ...

    def stage(self, name: str, done: int | None, total: int | None) -> None: ...

    def cell_ended(self, status: str, seconds: float, left_s: float | None) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def progress_on(stream: TextIO | None = None) -> Progress:
    """Live progress where ``stream`` (stderr) is a terminal, else plain lines."""
    stream = stream or sys.stderr
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


class PlainProgress:
    """A line when a cell starts, enters a stage, and ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label = ""
        self._stage: str | None = None

    def cell_started(self, number: int, total: int, what: str, expected_s: float) -> None:
        self._label, self._stage = f"[{number}/{total}]", None
        self.say(f"{self._label} {what}, about {format_duration_s(expected_s)}")

    def stage(self, name: str, done: int | None, total: int | None) -> None:
        if name != self._stage:
            self._stage = name
            self.say(f"{self._label}   {name}" + (f" ({total})" if total and total > 1 else ""))

    def cell_ended(self, status: str, seconds: float, left_s: float | None) -> None:
        left = f", about {format_duration_s(left_s)} left" if left_s else ""
        self.say(f"{self._label} {status} after {format_duration_s(seconds)}{left}")

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held open."""


class LiveProgress:
    """A bar for the running cell with its stage; finished cells stay as lines above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar: RichProgress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, left="")
        self._bar.start()
        self._label = ""
        self._left = ""

    def cell_started(self, number: int, total: int, what: str, expected_s: float) -> None:
        self._label = f"[{number}/{total}]"
        self._line(f"{self._label} {what}, about {format_duration_s(expected_s)}")
        self._bar.reset(self._task, description=f"{self._label} starting", total=None, left=self._left)

    def stage(self, name: str, done: int | None, total: int | None) -> None:
        self._bar.update(self._task, description=f"{self._label} {name}", completed=done or 0, total=total)

    def cell_ended(self, status: str, seconds: float, left_s: float | None) -> None:
        self._left = f"about {format_duration_s(left_s)} left" if left_s else ""
        self._line(f"{self._label} {status} after {format_duration_s(seconds)}")

    def say(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        self._bar.stop()

    def _line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)
