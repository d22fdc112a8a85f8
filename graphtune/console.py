"""What a running sweep says on stderr: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from graphtune.terminal import wrapped
from graphtune.units import format_duration_s

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Told by a sweep what goes on. ``total`` may grow while it runs; ``left_s`` is an estimate of the seconds that it
    still takes, the cell that starts included, and None when nothing is left."""

    def cell_started(self, number: int, total: int, what: str, expected_s: float, left_s: float | None) -> None: ...

    def stage(self, name: str, done: int | None, total: int | None) -> None: ...

    def cell_ended(self, status: str, seconds: float, left_s: float | None) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def progress_on(stream: TextIO | None = None) -> Progress:
    """Live progress where ``stream`` (stderr) is a terminal, else plain lines."""
    stream = stream or sys.stderr
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


def _expected(expected_s: float, left_s: float | None) -> str:
    """What a cell takes and what the whole still takes, where that is more."""
    more = left_s is not None and left_s > 1.05 * expected_s
    return f"about {format_duration_s(expected_s)}" + (f" of {format_duration_s(left_s or 0)} left" if more else "")


class PlainProgress:
    """A line when a cell starts, enters a stage, and ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label = ""
        self._stage: str | None = None

    def cell_started(self, number: int, total: int, what: str, expected_s: float, left_s: float | None) -> None:
        self._label, self._stage = f"[{number}/{total}]", None
        self.say(f"{self._label} {what}, {_expected(expected_s, left_s)}")

    def stage(self, name: str, done: int | None, total: int | None) -> None:
        if name != self._stage:
            self._stage = name
            self.say(f"{self._label}   {name.replace('_', ' ')}" + (f" ({total})" if total and total > 1 else ""))

    def cell_ended(self, status: str, seconds: float, left_s: float | None) -> None:
        left = f", about {format_duration_s(left_s)} left" if left_s else ""
        self.say(f"{self._label} {status} after {format_duration_s(seconds)}{left}")

    def say(self, text: str) -> None:
        print("\n".join(wrapped(text, following="    ", break_words=False)), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held open."""


class LiveProgress:
    """A bar for the running cell with its stage; finished cells stay as lines above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        class Left(ProgressColumn):
            """What the whole sweep still takes: the estimate when the cell started, less what has passed since."""

            def render(self, task: Task) -> Text:
                left_s = (task.fields["left_s"] or 0.0) - (task.elapsed or 0.0)
                return Text(f"about {format_duration_s(left_s)} left" if left_s > 0 else "")

        self._bar: RichProgress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=14),
            MofNCompleteColumn(),
            Left(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, left_s=None)
        self._bar.start()
        self._label = ""

    def cell_started(self, number: int, total: int, what: str, expected_s: float, left_s: float | None) -> None:
        self._label = f"[{number}/{total}]"
        self._line(f"{self._label} {what}, {_expected(expected_s, left_s)}")
        self._bar.reset(self._task, description=f"{self._label} starting", total=None, left_s=left_s)

    def stage(self, name: str, done: int | None, total: int | None) -> None:
        self._bar.update(
            self._task, description=f"{self._label} {name.replace('_', ' ')}", completed=done or 0, total=total
        )

    def cell_ended(self, status: str, seconds: float, left_s: float | None) -> None:
        self._line(f"{self._label} {status} after {format_duration_s(seconds)}")

    def say(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        self._bar.stop()

    def _line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)
