"""What the tests of log messages share: reading lines, and amounts."""

from __future__ import annotations

from graphtune.engines import events as ev
from graphtune.engines.base import GIB
from graphtune.engines.log_reader import LogReader

S = "[2026-03-04 05:06:07 DP1 TP2] "
V = "(EngineCore_DP3 pid=441) INFO 11-24 11:44:17 [file.py:34] "


def read(*lines: str, engine: str | None = None) -> list[ev.Event]:
    reader = LogReader(engine)
    return [event for line in lines for event in reader.line(line.encode())]


def only(line: str, engine: str | None = None) -> ev.Event:
    (event,) = read(line, engine=engine)
    return event


def gib(amount: float) -> int:
    return round(amount * GIB)
