"""A comparison for other programs: JSON (docs/comparison.schema.json), JUnit XML, GitHub annotations."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from graphtune.compare.figures import headline, interval_text, ratio_text, title, value_text
from graphtune.compare.model import SCHEMA, UNITS, Comparison, FailOn, Row

MOST_ANNOTATIONS = 10
"""GitHub shows ten annotations of a level per step."""


def as_json(comparison: Comparison, fail_on: FailOn) -> str:
    """One JSON object; figures are in the unit that each row names."""
    return json.dumps(json_object(comparison, fail_on), indent=1, allow_nan=False) + "\n"


def json_object(comparison: Comparison, fail_on: FailOn) -> dict[str, Any]:
    findings = comparison.findings(fail_on)
    return {
        "schema": SCHEMA,
        "status": "findings" if findings else "ok",
        "reason": None,
        "compared": comparison.compared,
        "base": asdict(comparison.base),
        "new": asdict(comparison.new),
        "fail_on": fail_on,
        "confidence": comparison.confidence,
        "correction": "bonferroni",
        "tested": comparison.tested,
        "method": comparison.method,
        "counts": comparison.counts,
        "worst": [row.name for row in comparison.worst()],
        "means": [mean._asdict() for mean in comparison.means()],
        "changes": [change._asdict() for change in comparison.changes],
        "growth": list(comparison.growth),
        "notes": list(comparison.notes),
        "flagged": comparison.flagged,
        "ignored": comparison.ignored,
        "rows": [_json_row(row, row in findings) for row in comparison.rows],
    }


def _json_row(row: Row, finding: bool) -> dict[str, Any]:
    values = asdict(row)
    values["what"] = {key: list(value) if isinstance(value, tuple) else value for key, value in values["what"].items()}
    return {**values, "unit": UNITS[row.what.kind], "finding": finding}


def not_compared_json(reason: str) -> str:
    """The same object where nothing was compared: only status and reason say something."""
    return json.dumps({"schema": SCHEMA, "status": "not_compared", "reason": reason, "rows": []}, indent=1) + "\n"


def as_junit(comparison: Comparison, fail_on: FailOn) -> str:
    """A test case per row: findings fail, undecided and missing rows are skipped with their reason."""
    findings = comparison.findings(fail_on)
    skipped = [row for row in comparison.rows if row not in findings and row.verdict in ("undecided", "missing")]
    suite = ElementTree.Element(
        "testsuite",
        name=_xml("graphtune compare"),
        tests=str(len(comparison.rows)),
        failures=str(len(findings)),
        skipped=str(len(skipped)),
        errors="0",
    )
    for row in comparison.rows:
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(row.what.group), name=_xml(row.name))
        if row in findings:
            ElementTree.SubElement(case, "failure", message=_xml(sentence(row)), type=row.verdict).text = _xml(
                sentence(row)
            )
        elif row in skipped:
            ElementTree.SubElement(case, "skipped", message=_xml(row.reason or row.verdict))
    return _document(suite)


def not_compared_junit(reason: str) -> str:
    """One skipped test case."""
    suite = ElementTree.Element("testsuite", name="graphtune compare", tests="1", failures="0", skipped="1", errors="0")
    case = ElementTree.SubElement(suite, "testcase", classname="graphtune", name="compare")
    ElementTree.SubElement(case, "skipped", message=_xml(reason))
    return _document(suite)


def _document(suite: ElementTree.Element) -> str:
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def as_github(comparison: Comparison, fail_on: FailOn) -> str:
    """Workflow commands: an error per finding (ten at most, the worst first) and a notice with the summary."""
    findings = sorted(comparison.findings(fail_on), key=lambda row: -(row.ratio or 0.0))
    lines = [annotation("error", f"graphtune: {row.verdict}", sentence(row)) for row in findings[:MOST_ANNOTATIONS]]
    more = len(findings) - MOST_ANNOTATIONS
    summary = f"{title(comparison)}: {headline(comparison)}" + (f"; {more} more findings" if more > 0 else "")
    return "\n".join([*lines, annotation("notice", "graphtune compare", summary)]) + "\n"


def annotation(level: str, title_: str, message: str) -> str:
    """``::error title=…::…`` with both texts escaped as GitHub asks."""
    text = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    name = title_.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{text}"


def sentence(row: Row) -> str:
    """A row in one sentence."""
    if row.ratio is None:
        return f"{row.name}: {row.verdict}" + (f" ({row.reason})" if row.reason else "")
    kind = row.what.kind
    change = f"{value_text(kind, row.base)} to {value_text(kind, row.new)}"
    bounds = f", interval {interval_text(row)}" if row.low is not None else ""
    return f"{row.name}: {row.verdict}, {change}, ratio {ratio_text(row.ratio)}{bounds}"
