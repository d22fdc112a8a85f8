"""Reads a server log line by line into events, counting every line once: read, or skipped for a named reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO

from graphtune.engines.events import Boot, CaptureEnd, CaptureError, Event, OutOfMemory, Running
from graphtune.engines.log_lines import blocks, pieces
from graphtune.engines.log_shapes import COMMON, CUT, Shape
from graphtune.engines.sglang import log as sglang_log
from graphtune.engines.tensorrt_llm import log as tensorrt_llm_log
from graphtune.engines.vllm import log as vllm_log

BLANK, HTTP, OTHER = "blank", "http", "other"
REASONS: dict[str, str] = {
    BLANK: "empty",
    HTTP: "a client's request (never stored)",
    CUT: "a known message whose fields are broken off",
    OTHER: "nothing about graphs, memory or batches",
}

# Messages that are printed while serving come first: nearly every line of a long log is one of them.
_HOT = (*sglang_log.HOT, *vllm_log.HOT, *tensorrt_llm_log.HOT)
_START_UP = (*sglang_log.SHAPES, *vllm_log.SHAPES, *tensorrt_llm_log.SHAPES, *COMMON)
_HTTP = (b"HTTP/1.", b"HTTP/2")
# Fields of batch messages; without the message's beginning the line was cut in front.
_TAILS = (b"gen throughput (token/s)", b"#queue-req", b"#running-req")
# Marks of lines that hold more than one message, or one that is wrapped.
_GLUED = (b"\r", b"\x1b", b"it/s", b"s/it]", b"\n{")
_QUOTED = re.compile(r"['\"]|prompt|messages")
_LONGEST_PREFIX = 300


@dataclass
class LogReader:
    """Reads one log. ``engine`` limits the messages looked for; without it the first message that one engine alone
    prints decides. ``lines`` is always ``read`` plus the sum of ``skipped``, which counts by the keys of REASONS."""

    engine: str | None = None
    lines: int = 0
    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    boots: int = 0
    _captured: set[str] = field(default_factory=set)
    _served: set[str] = field(default_factory=set)
    _interval: int = sglang_log.DECODE_LOG_INTERVAL
    _hot: tuple[Shape, ...] = _HOT
    _start: tuple[Shape, ...] = _START_UP
    _glued: bool = True
    _http: bool = True
    _tails: bool = True

    def events(self, stream: IO[bytes]) -> Iterator[Event]:
        """Events of a stream in its order, in memory that does not grow with it."""
        for block, lines in blocks(stream):
            self._prepare(block)
            if not (self._hot or self._start or self._glued or self._http or self._tails):
                self._nothing(lines)
                continue
            usual = () if self._glued else tuple((s.quick, s.engine) for s in self._hot if s.quick is not None)
            for line in lines:
                for quick, engine in usual:
                    event = quick(line)
                    if event is not None:
                        self.lines += 1
                        self.read += 1
                        self.engine = self.engine or engine
                        yield self._placed(event)
                        break
                else:
                    yield from self.line(line)
        self._prepare(None)

    def _prepare(self, block: bytes | None) -> None:
        """Look only for messages whose anchors occur in the block at all: a serving log has few kinds at a time.

        Colour may stand in the middle of an anchor, so that a coloured block is searched for all of them.
        """
        coloured = block is None or b"\x1b" in block or b"u001b" in block

        def wanted(shape: Shape) -> bool:
            ours = self.engine is None or shape.engine in (None, self.engine)
            return ours and (block is None or coloured or shape.anchor in block)

        self._hot = tuple(shape for shape in _HOT if wanted(shape))
        self._start = tuple(shape for shape in _START_UP if wanted(shape))
        self._http = block is None or any(mark in block for mark in _HTTP)
        self._tails = block is None or any(tail in block for tail in _TAILS)
        self._glued = block is None or block[:1] == b"{" or any(mark in block for mark in _GLUED)

    def _nothing(self, lines: list[bytes]) -> None:
        """Count lines of a block that holds no anchor of any message."""
        blank = sum(1 for line in lines if not line or line.isspace())
        self.lines += len(lines)
        self.skipped[OTHER] += len(lines) - blank
        self.skipped[BLANK] += blank
        self.skipped = +self.skipped

    def line(self, line: bytes) -> list[Event]:
        """Events of one physical line, which is counted once."""
        self.lines += 1
        if self._glued and (line[:1] == b"{" or any(mark in line for mark in _GLUED)):
            events, reason = self._pieces(line)
        else:
            events, reason = self._message(line)
        if reason is None:
            self.read += 1
        else:
            self.skipped[reason] += 1
        return events

    def _pieces(self, line: bytes) -> tuple[list[Event], str | None]:
        events: list[Event] = []
        reason: str | None = BLANK
        for piece in pieces(line):
            found, why = self._message(piece)
            events += found
            reason = _stronger(reason, why)
        return events, reason

    def _message(self, line: bytes) -> tuple[list[Event], str | None]:
        """Events of one message and None, or the reason why it was skipped."""
        for shape in self._hot:
            at = line.find(shape.anchor)
            if 0 <= at <= _LONGEST_PREFIX:
                found = self._look(shape, line, at)
                if found is not None:
                    return ([], CUT) if isinstance(found, str) else (found, None)
        if not line or line.isspace():
            return [], BLANK
        if self._http and (_HTTP[0] in line or _HTTP[1] in line):
            return [], HTTP
        return self._start_up(line)

    def _start_up(self, line: bytes) -> tuple[list[Event], str | None]:
        """Messages around start-up; two of them may share a line."""
        events: list[Event] = []
        reason: str | None = CUT if self._tails and _is_tail(line) else OTHER
        for shape in self._start:
            at = line.find(shape.anchor)
            if at < 0:
                continue
            found = self._look(shape, line, at)
            if isinstance(found, str):
                reason = _stronger(reason, CUT)
            elif found is not None:
                events += found
                reason = None
        return events, reason

    def _look(self, shape: Shape, line: bytes, at: int) -> list[Event] | str | None:
        """What a shape makes of a message: events, CUT, or None when the message is another one."""
        if shape.engine is not None and self.engine is not None and shape.engine != self.engine:
            return None
        text = line.decode("utf-8", "replace")
        if len(text) != len(line):
            at = text.find(shape.anchor.decode())
        if at and shape.engine is not None and _QUOTED.search(text, 0, min(at, _LONGEST_PREFIX)):
            return None
        found = shape.handler(text, at)
        if found is None or found is CUT:
            return found
        events: list[Event] = list(found) if type(found) in (list, tuple) else [found]  # type: ignore[arg-type, list-item]
        if events and self.engine is None:
            self.engine = shape.engine
        return [self._placed(event) for event in events]

    def _placed(self, event: Event) -> Event:
        """Tell a restart from the many processes of one boot, and give readings the interval that was set."""
        if type(event) is Running:
            self._served.add(event.rank)
            if self._interval != sglang_log.DECODE_LOG_INTERVAL and event.weight == sglang_log.DECODE_LOG_INTERVAL:
                return event._replace(weight=self._interval)
        elif isinstance(event, OutOfMemory | CaptureError):
            self._served.add(event.rank)
        elif isinstance(event, CaptureEnd):
            self._captured.add(event.rank)
        elif isinstance(event, Boot):
            return self._boot(event)
        return event

    def _boot(self, event: Boot) -> Boot:
        """A worker's start is a restart when that rank had served or failed; a server's start when anything was
        captured before. A draft model's workers start after the target's capture: they are no restart."""
        further = self._served | self._captured if event.restart else self._served
        again = event.rank in further or (event.restart and not event.rank and bool(further))
        if again or self.boots == 0:
            self.boots += 1
            self._served.clear()
            self._captured.clear()
        interval = event.settings.get("decode_log_interval")
        if isinstance(interval, int) and interval > 0:
            self._interval = interval
        return replace(event, restart=again)


def _is_tail(line: bytes) -> bool:
    """A batch message without its beginning; inside quotes it is somebody's text."""
    at = min((line.find(tail) for tail in _TAILS if tail in line), default=-1)
    return at >= 0 and not _QUOTED.search(line[:at].decode("utf-8", "replace"))


_STRENGTH = {BLANK: 0, OTHER: 1, HTTP: 2, CUT: 3}


def _stronger(one: str | None, other: str | None) -> str | None:
    """The reason that says more about a line; None (it was read) says most."""
    if one is None or other is None:
        return None
    return max(one, other, key=_STRENGTH.__getitem__)
