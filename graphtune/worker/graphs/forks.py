"""Side streams that a recorded forward forks to: every segment must have them back before it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Forks:
    """Streams that wait for the recording one, or for one of these, and that it has not waited for since.

    Known through ``Stream.wait_stream`` alone: a fork by events is the forward's own to join, and a segment that ends
    without that fails by name.
    """

    def __init__(self, recording: torch.cuda.Stream) -> None:
        self._recording = recording
        self._open: list[torch.cuda.Stream] = []

    def note(self, waiting: torch.cuda.Stream, awaited: torch.cuda.Stream) -> None:
        """``waiting`` now runs after ``awaited``."""
        if waiting == self._recording:
            self._open = [stream for stream in self._open if stream != awaited]
        elif awaited == self._recording or awaited in self._open:
            self._open = [*(stream for stream in self._open if stream != waiting), waiting]

    def join(self) -> None:
        """Let the recording stream wait for every open fork."""
        for stream in self._open:
            self._recording.wait_stream(stream)
        self._open = []


@contextlib.contextmanager
def noted(forks: Forks) -> Iterator[None]:
    """Within it, ``forks`` learns of every ``wait_stream``."""
    plain = torch.cuda.Stream.wait_stream

    def wait_stream(self: torch.cuda.Stream, stream: Any) -> None:
        plain(self, stream)
        forks.note(self, stream)

    torch.cuda.Stream.wait_stream = wait_stream  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.cuda.Stream.wait_stream = plain  # type: ignore[method-assign]
