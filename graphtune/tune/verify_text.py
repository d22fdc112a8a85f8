"""A verification as text of at most 100 columns, and as the JSON of ``verify --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from graphtune.terminal import wrapped
from graphtune.tune.recommendation_text import NAMES, size_range
from graphtune.tune.verify import Check, Verification
from graphtune.tune.verify_log import LogVerification
from graphtune.units import format_bytes, format_duration_s, format_us

SCHEMA = 1


def as_text(of: Verification) -> str:
    """A line on what was captured, a row per check, and the verdict."""
    target = of.target
    setting = f"{target.list.order}, output {target.list.output}, workspace {target.list.workspace}"
    kv = f", {target.kv_tokens:,} KV tokens" if target.kv_tokens is not None else ""
    name = NAMES.get(target.engine, target.engine)
    head = f"{name}: {size_range(target.list.sizes)} ({setting}){kv}, on {of.device_name}"
    return "\n".join([head, *_rows(of.checks, "measured")]) + "\n"


def log_text(of: LogVerification) -> str:
    """A row per check of a server's log, and the verdict."""
    return "\n".join([f"{NAMES.get(of.engine, of.engine)}: {of.source}", *_rows(of.checks, "the log says")]) + "\n"


def _rows(checks: Sequence[Check], measured: str) -> list[str]:
    rows = [f"  {'':28}{'predicted':>14}{'allowed':>24}{measured:>14}"]
    for check in checks:
        figures = f"{_figure(check, check.predicted):>14}{_allowed(check):>24}{_figure(check, check.measured):>14}"
        rows.append(f"  {check.name:28}{figures}  {check.verdict}")
        rows += wrapped(check.reason, "      ") if check.reason else []
    outside = [check.name for check in checks if check.verdict == "outside"]
    return [*rows, f"Not as stated: {', '.join(outside)}." if outside else "Everything is as stated."]


def as_json(of: Verification) -> dict[str, Any]:
    """Plain data for ``json.dumps``."""
    target = of.target
    return {
        "schema": SCHEMA,
        "passed": of.passed,
        "engine": target.engine,
        "sweep": target.sweep,
        "device": of.device_name,
        "capture_sizes": list(target.list.sizes),
        "kv_tokens": target.kv_tokens,
        "checks": [asdict(check) for check in of.checks],
    }


def log_json(of: LogVerification) -> dict[str, Any]:
    """Plain data for ``json.dumps``."""
    checks = [asdict(check) for check in of.checks]
    return {"schema": SCHEMA, "passed": of.passed, "engine": of.engine, "log": of.source, "checks": checks}


def _allowed(of: Check) -> str:
    if of.verdict == "not judged" or (of.low is None and of.high is None):
        return "-"
    if of.low == of.high:
        return "all"
    if of.low is None:
        return f"<= {_figure(of, of.high)}"
    if of.high is None:
        return f">= {_figure(of, of.low)}"
    return f"{_figure(of, of.low)} to {_figure(of, of.high)}"


def _figure(of: Check, value: float | None) -> str:
    if value is None:
        return "not known"
    if of.unit == "bytes":
        return format_bytes(round(value))
    if of.unit == "s":
        return format_duration_s(value)
    if of.unit == "us":
        return format_us(value)
    return f"{value:.1%}" if of.unit == "share" else f"{value:,.0f}"
