"""Tables in CSV files, with columns found by any of their common names and errors that name the line."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from graphtune.errors import InputError

DELIMITERS = ",;\t"


def plain(name: str) -> str:
    """A column name without case, blanks and punctuation: ``Context Tokens`` and ``context_tokens`` are the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


@dataclass(frozen=True)
class Row:
    """One row: where it stands, and its cells by the plain name of their column."""

    where: str
    cells: Mapping[str, str]

    def whole(self, column: str, what: str, least: int = 1) -> int:
        """A whole number of at least ``least``; ``12.0`` is one. Raises InputError."""
        text = self.cells[column]
        match = re.fullmatch(r"(\d{1,15})(?:\.0+)?", text)
        if match is None or int(match[1]) < least:
            raise InputError(f"{text!r} is no number of {what} of at least {least}", where=self.where)
        return int(match[1])

    def number(self, column: str, what: str) -> float:
        """A finite number of at least 0. Raises InputError."""
        text = self.cells[column]
        if re.fullmatch(r"\+?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", text) is None:
            raise InputError(f"{text!r} is no {what} of at least 0", where=self.where)
        return float(text)


class Table:
    """A CSV file with a header. Iterating gives its rows; ``lines_skipped`` then counts empty and comment lines (#).

    Raises InputError when the file cannot be read, has no header, repeats a column, or a row has another width.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines_skipped = 0
        self._lines = _text(name).splitlines()
        header = next(((at, line) for at, line in enumerate(self._lines) if self._counts(line)), None)
        if header is None:
            raise InputError("is empty", where=name, action="The first line names the columns.")
        self._start, line = header
        self._delimiter = max(DELIMITERS, key=line.count)
        self.titles = tuple(cell.strip() for cell in next(csv.reader([line], delimiter=self._delimiter)))
        self.columns = tuple(plain(title) for title in self.titles)
        repeated = sorted({title for title in self.titles if self.columns.count(plain(title)) > 1})
        if repeated:
            raise InputError(f"column {repeated[0]!r} is there twice", where=f"{name}:{self._start + 1}")

    def column(self, *names: str) -> str | None:
        """The column that has one of these plain names; None when there is none. Raises InputError for several."""
        found = [column for column in self.columns if column in names]
        if len(found) > 1:
            both = " and ".join(repr(self.titles[self.columns.index(column)]) for column in found)
            raise InputError(f"columns {both} say the same", where=self.name, action="Leave one of them out.")
        return found[0] if found else None

    def missing(self, what: str, names: tuple[str, ...]) -> InputError:
        """The error that no column holds ``what``."""
        return InputError(
            f"no column holds {what}; its columns are {', '.join(self.titles)}",
            where=self.name,
            action=f"Known names: {', '.join(names)}.",
        )

    def __iter__(self) -> Iterator[Row]:
        self.lines_skipped = self._start
        for at in range(self._start + 1, len(self._lines)):
            line = self._lines[at]
            if not self._counts(line):
                self.lines_skipped += 1
                continue
            cells = [cell.strip() for cell in next(csv.reader([line], delimiter=self._delimiter))]
            where = f"{self.name}:{at + 1}"
            if len(cells) != len(self.columns):
                raise InputError(f"has {len(cells)} cells, the header {len(self.columns)}", where=where)
            yield Row(where, dict(zip(self.columns, cells, strict=True)))

    @staticmethod
    def _counts(line: str) -> bool:
        return bool(line.strip()) and not line.lstrip().startswith("#")


def _text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError("no such file", where=name) from None
    except IsADirectoryError:
        raise InputError("is a folder", where=name, action="Name a CSV file.") from None
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", where=name) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=name) from error
