"""The data of a figure or table as CSV, carried in the page itself."""

from __future__ import annotations

import csv
import io
import re
from urllib.parse import quote

from graphtune.figures.base import MISSING, Column, Table

NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")
FORMULA = re.compile(r"[=+\-@\t\r]")
"""First letters that make a spreadsheet take a text for a formula."""


def csv_text(table: Table) -> str:
    """Figures as a program reads them: no thousands separators, percentages as shares, missing ones empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_text(column.title) for column in table.columns])
    for row in table.rows:
        writer.writerow([_cell(column, cell) for column, cell in zip(table.columns, row, strict=True)])
    return out.getvalue()


def csv_uri(table: Table) -> str:
    """The CSV as a ``data:`` address, so that a page offers it without a network."""
    return "data:text/csv;charset=utf-8," + quote(csv_text(table), safe=",;:/()*!~")


def _cell(column: Column, cell: str) -> str:
    if not column.numeric:
        return _text(cell)
    if cell == MISSING:
        return ""
    bare = cell.replace(",", "").replace("\N{MINUS SIGN}", "-")
    if bare.endswith("%") and NUMBER.fullmatch(bare[:-1]):
        return f"{float(bare[:-1]) / 100:.6g}"
    return bare if NUMBER.fullmatch(bare) else _text(cell)


def _text(cell: str) -> str:
    return f"'{cell}" if FORMULA.match(cell) else cell
