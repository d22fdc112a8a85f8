"""A comparison as text for people: a table for terminals, Markdown for a pull request."""

from __future__ import annotations

import re

from graphtune.compare.figures import headline, interval_text, omissions, ratio_text, side_text, title, value_text
from graphtune.compare.model import Comparison, Row
from graphtune.terminal import WIDTH, flat, wrapped

SHOWN = {"undecided": 10, "missing": 10}
"""Rows of a verdict listed on a terminal, others at most MOST; the page and JSON list all."""
MOST = 40


def as_table(comparison: Comparison) -> str:
    """At most 80 columns, readable without colour. Sweeps without any difference give one line, and notes."""
    if comparison.quiet:
        found = f"No difference in {len(comparison.rows)} rows"
        if not comparison.rows:
            found = f"Nothing compared, {omissions(comparison) or 'for want of rows'}"
        lines = wrapped(f"{found}: {comparison.base.path} and {comparison.new.path}")
        lines += [line for note in comparison.notes for line in wrapped(f"note: {note}", following="  ")]
        return "\n".join(lines) + "\n"
    lines = [*wrapped(title(comparison)), *wrapped(side_text(comparison, base=True), "base  ", " " * 6)]
    lines += [*wrapped(side_text(comparison, base=False), "new   ", " " * 6), "", *wrapped(headline(comparison))]
    lines += wrapped(left_out) if (left_out := omissions(comparison)) else []
    worst = comparison.worst()
    if worst:
        lines += ["", "Worst", *_rows(worst, figures=True)]
    # The mean of one row is that row.
    if means := [mean for mean in comparison.means() if mean.rows > 1]:
        lines += ["", "Geometric means (new over base)"]
        lines += [f"  {mean.group:<40.40} {ratio_text(mean.ratio):>7}  over {mean.rows} rows" for mean in means]
    for verdict in comparison.counts:
        rows = tuple(row for row in comparison.rows if row.verdict == verdict and row not in worst)
        if rows and verdict != "same":
            most = SHOWN.get(verdict, MOST)
            lines += ["", verdict.capitalize(), *_rows(rows[:most])]
            lines += [f"  and {len(rows) - most} more {verdict}"] if len(rows) > most else []
    if comparison.growth:
        lines += ["", "Graphs", *(line for text in comparison.growth for line in wrapped(text, "  "))]
    if comparison.changes:
        lines += ["", "Changed"]
        lines += [line for one in comparison.changes for line in wrapped(f"{one.what}: {one.base} → {one.new}", "  ")]
    for note in comparison.notes:
        lines += ["", *wrapped(f"note: {note}")]
    lines += ["", *wrapped(comparison.method)] if comparison.tested else []
    return "\n".join(lines) + "\n"


def _rows(rows: tuple[Row, ...], *, figures: bool = False) -> list[str]:
    """A row's name, ratio and verdict, on two lines where they do not fit one; what it was and is where it got worse or
    ``figures`` asks for it. Equal reasons are said once, after the last."""
    lines: list[str] = []
    for index, row in enumerate(rows):
        told = f"{ratio_text(row.ratio):>6} {interval_text(row):>13}  {row.verdict:<9}"
        name = flat(row.name)
        fits = len(name) <= WIDTH - len(told) - 4
        lines += [] if fits else wrapped(name, "  ")
        lines.append(f"  {name if fits else '':<{WIDTH - len(told) - 4}}  {told}".rstrip())
        if row.base is not None and row.new is not None and (row.worse or figures):
            kind = row.what.kind
            lines.append(f"    {value_text(kind, row.base)} → {value_text(kind, row.new)}")
        following = rows[index + 1].reason if index + 1 < len(rows) else None
        if row.reason and row.reason != following:
            lines += wrapped(row.reason, "    ")
    return lines


def as_markdown(comparison: Comparison) -> str:
    """For a pull request: the answer first, all rows folded away. Text from sweeps is escaped."""
    lines = [f"### graphtune: {escaped(headline(comparison))}", "", f"{escaped(title(comparison))}  "]
    lines += [
        f"base {escaped(side_text(comparison, base=True))}  ",
        f"new {escaped(side_text(comparison, base=False))}",
    ]
    if left_out := omissions(comparison):
        lines += ["", escaped(left_out)]
    if worst := comparison.worst():
        lines += ["", "**Worst**", "", *_markdown_rows(worst)]
    if means := comparison.means():
        lines += ["", "**Geometric means, new over base**", "", "| group | ratio | rows |", "|---|---:|---:|"]
        lines += [f"| {escaped(mean.group)} | {ratio_text(mean.ratio)} | {mean.rows} |" for mean in means]
    if comparison.growth or comparison.changes:
        lines += ["", "**What differs**", ""]
        lines += [f"- {escaped(text)}" for text in comparison.growth]
        lines += [f"- {escaped(f'{one.what}: {one.base} → {one.new}')}" for one in comparison.changes]
    if comparison.notes:
        lines += ["", *(f"> {escaped(note)}  " for note in comparison.notes)]
    if comparison.rows:
        lines += ["", f"<details><summary>All {len(comparison.rows)} rows</summary>", ""]
        lines += [*_markdown_rows(comparison.rows), "", "</details>"]
    lines += ["", escaped(comparison.method)] if comparison.tested else []
    return "\n".join(lines) + "\n"


def _markdown_rows(rows: tuple[Row, ...]) -> list[str]:
    lines = ["| what | base | new | ratio | interval | verdict |", "|---|---:|---:|---:|---:|---|"]
    for row in rows:
        kind = row.what.kind
        figures = [value_text(kind, row.base), value_text(kind, row.new), ratio_text(row.ratio), interval_text(row)]
        verdict = f"**{row.verdict}**" if row.worse or row.lost else row.verdict
        reason = f": {escaped(row.reason)}" if row.reason and row.verdict in ("missing",) else ""
        lines.append(f"| {escaped(row.name)} | {' | '.join(figures)} | {verdict}{reason} |")
    return lines


def escaped(text: str) -> str:
    """Text as itself in Markdown: no markup, no HTML, no mention, one line."""
    flat = " ".join(text.split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", flat)
