"""Request traces: when each request arrived, how long its prompt is and how many tokens it generates.

As JSON: ``{"schema": 1, "kind": "trace", "arrivals_s": [...], "prompt_tokens": [...], "generated_tokens": [...]}`` with
``source`` and ``lines_skipped``. Arrivals count from the first request. How such traffic meets a server depends on the
server, so a trace becomes a histogram only by simulating it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphtune.config_file import plain_json
from graphtune.errors import InputError
from graphtune.tune.workloads.csv_table import Row, Table, plain

SCHEMA = 1
SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
ARRIVAL_NAMES = ("timestamp", "arrival", "arrival_time", "arrived_at", "request_timestamp", "time")
PROMPT_NAMES = (
    "ContextTokens",
    "prompt_tokens",
    "prompt_len",
    "input_tokens",
    "input_length",
    "num_prefill_tokens",
    "Request tokens",
)
GENERATED_NAMES = (
    "GeneratedTokens",
    "completion_tokens",
    "output_tokens",
    "output_length",
    "output_len",
    "num_decode_tokens",
    "Response tokens",
)
ARRIVALS = {plain(name) + unit: factor for name in ARRIVAL_NAMES for unit, factor in SECONDS.items()}
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?) ?([a-z]*)")


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. Arrays are as long as there are requests; the first arrives at 0 s."""

    arrivals_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    generated_tokens: NDArray[np.int64]
    source: str
    lines_skipped: int = 0

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrivals_s[-1])

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "trace",
            "source": self.source,
            "lines_skipped": self.lines_skipped,
            "arrivals_s": [round(second, 9) for second in self.arrivals_s.tolist()],
            "prompt_tokens": self.prompt_tokens.tolist(),
            "generated_tokens": self.generated_tokens.tolist(),
        }


def read_trace(name: str) -> Trace:
    """A trace in CSV, or in graphtune's JSON when the name ends in ``.json``. Raises InputError naming file and line.

    CSV columns are found by their common names. Times are dates, or numbers of seconds unless the column's name or the
    cells say ms, us or ns; all cells of a column must say it alike.
    """
    return read_json_trace(name) if name.endswith(".json") else _read_csv(name)


def _read_csv(name: str) -> Trace:
    table = Table(name)
    arrival = table.column(*ARRIVALS)
    prompt, generated = (table.column(*map(plain, names)) for names in (PROMPT_NAMES, GENERATED_NAMES))
    if arrival is None:
        raise table.missing("the time of arrival", ARRIVAL_NAMES)
    if prompt is None:
        raise table.missing("prompt tokens", PROMPT_NAMES)
    if generated is None:
        raise table.missing("generated tokens", GENERATED_NAMES)
    clock = _Clock(arrival, ARRIVALS[arrival])
    seconds: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    for row in table:
        seconds.append(clock.seconds(row))
        prompts.append(row.whole(prompt, "prompt tokens"))
        outputs.append(row.whole(generated, "generated tokens"))
        if len(seconds) > 1 and seconds[-1] < seconds[-2]:
            raise InputError(
                "arrives before the request above it", where=row.where, action="Sort the trace by time of arrival."
            )
    if not seconds:
        raise InputError("has no requests", where=name)
    return _trace(np.array(seconds), np.array(prompts), np.array(outputs), Path(name).name, table.lines_skipped)


def _trace(
    seconds: NDArray[np.float64], prompts: NDArray[np.int64], outputs: NDArray[np.int64], source: str, skipped: int
) -> Trace:
    return Trace(seconds - seconds[0], prompts, outputs, source, skipped)


class _Clock:
    """Reads one column of times, all in one form: the form of the first cell."""

    def __init__(self, column: str, factor: float) -> None:
        self._column, self._factor = column, factor
        self._form: str | None = None
        self._origin: datetime | None = None

    def seconds(self, row: Row) -> float:
        text = row.cells[self._column]
        if date := _DATE.fullmatch(text):
            self._same_form("dates and times" + (" with a time zone" if date[4] else ""), row)
            return self._since_origin(date, row)
        number = _NUMBER.fullmatch(text)
        if number is None or number[2] not in SECONDS:
            raise InputError(f"{text!r} is no time", where=row.where, action="Dates or numbers of seconds are read.")
        self._same_form(f"numbers in {number[2]}" if number[2] else "plain numbers", row)
        if number[2] and self._factor != 1.0 and SECONDS[number[2]] != self._factor:
            raise InputError(f"{text!r} has another unit than its column's name", where=row.where)
        value = float(number[1])
        if value < 0:
            raise InputError(f"a time of {text} is negative", where=row.where)
        return value * (SECONDS[number[2]] if number[2] else self._factor)

    def _same_form(self, form: str, row: Row) -> None:
        self._form = self._form or form
        if form != self._form:
            raise InputError(
                f"mixed units: {row.cells[self._column]!r} stands among {self._form}",
                where=row.where,
                action="Write all times of a trace alike.",
            )

    def _since_origin(self, date: re.Match[str], row: Row) -> float:
        """Seconds since the first date, with the nanoseconds that Python's datetime has no place for."""
        zone = (date[4] or "").replace("Z", "+00:00")
        try:
            at = datetime.fromisoformat(f"{date[1]}T{date[2]}{zone}")
        except ValueError as error:
            raise InputError(f"{date[0]!r} is no date", where=row.where) from error
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        self._origin = self._origin or at
        return (at - self._origin).total_seconds() + float(f"0.{date[3] or 0}")


def read_json_trace(name: str) -> Trace:
    """A trace in graphtune's own JSON. Raises InputError naming file and key."""
    values = plain_json(name)
    if not isinstance(values, dict) or values.get("kind") != "trace" or values.get("schema") != SCHEMA:
        raise InputError("is no trace", where=name, action="`graphtune workload from-trace` writes one.")
    good: dict[str, Callable[[Any], bool]] = {
        "arrivals_s": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v < float("inf"),
        "prompt_tokens": _is_count,
        "generated_tokens": _is_count,
    }
    for key, accepts in good.items():
        column = values.get(key)
        if not isinstance(column, list):
            raise InputError("must be a list", where=f"{name}: {key}")
        wrong = next((at for at, value in enumerate(column) if not accepts(value)), None)
        if wrong is not None:
            raise InputError(f"{column[wrong]!r} makes no sense", where=f"{name}: {key}[{wrong}]")
    seconds = np.array(values["arrivals_s"], dtype=float)
    prompts, outputs = (np.array(values[key], dtype=np.int64) for key in ("prompt_tokens", "generated_tokens"))
    if not len(seconds):
        raise InputError("has no requests", where=name)
    if len(prompts) != len(seconds) or len(outputs) != len(seconds):
        raise InputError("its lists are not of one length", where=name)
    late = np.flatnonzero(np.diff(seconds) < 0)
    if len(late):
        raise InputError("arrives before the request above it", where=f"{name}: arrivals_s[{late[0] + 1}]")
    skipped = values.get("lines_skipped") or 0
    return _trace(seconds, prompts, outputs, str(values.get("source") or name), int(skipped))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
