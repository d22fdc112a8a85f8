"""Which side streams are open when a segment ends, and that nothing of the tracking stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphtune.worker.graphs.forks import Forks, noted


class Stream:
    """Stands for a stream: it remembers whom it waited for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[Any] = []

    def wait_stream(self, stream: Any) -> None:
        self.waited.append(stream)


@pytest.fixture
def streams() -> tuple[Any, Any, Any]:
    return Stream("recording"), Stream("side"), Stream("other")


def test_an_open_fork_is_joined_once(streams: tuple[Any, Any, Any]) -> None:
    recording, side, _ = streams
    forks = Forks(recording)
    forks.note(side, recording)
    forks.join()
    forks.join()
    assert recording.waited == [side]


def test_what_the_forward_joined_itself_is_left_alone(streams: tuple[Any, Any, Any]) -> None:
    recording, side, other = streams
    forks = Forks(recording)
    forks.note(side, recording)
    forks.note(other, side)
    forks.note(recording, side)
    forks.join()
    assert recording.waited == [other]


def test_streams_that_have_nothing_of_the_recording_are_not_waited_for(streams: tuple[Any, Any, Any]) -> None:
    recording, side, other = streams
    forks = Forks(recording)
    forks.note(side, other)
    forks.join()
    assert recording.waited == []


def test_waiting_is_noted_within_the_block_alone(
    monkeypatch: pytest.MonkeyPatch, streams: tuple[Any, Any, Any]
) -> None:
    recording, side, _ = streams
    plain: list[tuple[Any, Any]] = []
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, stream: plain.append((self, stream)))
    before = torch.cuda.Stream.wait_stream
    forks = Forks(recording)
    with noted(forks):
        torch.cuda.Stream.wait_stream(side, recording)
    assert torch.cuda.Stream.wait_stream is before
    torch.cuda.Stream.wait_stream(streams[2], recording)
    forks.join()
    assert plain == [(side, recording), (streams[2], recording)] and recording.waited == [side]
