"""Fields of a log message, found by their key and not by their place."""

from __future__ import annotations

import re

from graphtune.engines.base import GIB

_LIST = re.compile(r"\[\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)\s*\]")


def number(text: str, key: str) -> float | None:
    """The number after ``key``, whatever of ``=``, ``:`` and blanks stands between; None when it is not there."""
    found = re.search(re.escape(key) + r"\s*[=:]?\s*(-?\d[\d,]{0,17}(?:\.\d{1,9})?)", text)
    return float(found[1].replace(",", "")) if found else None


def whole(text: str, key: str) -> int | None:
    """The whole number after ``key``; thousands commas are read."""
    value = number(text, key)
    return None if value is None else int(value)


def gib(text: str, key: str) -> int | None:
    """Bytes of an amount after ``key`` in GiB, which SGLang spells GB. The unit must be there: a cut line has none."""
    found = re.search(re.escape(key) + r"\s*[=:]?\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*(GiB|GB|MiB|MB)", text)
    if found is None:
        return None
    return round(float(found[1]) * (GIB if found[2].startswith("G") else GIB // 1024))


def sizes(text: str, key: str) -> tuple[int, ...] | None:
    """The list of whole numbers after ``key``; None when it is not there or does not close."""
    at = text.find(key)
    if at < 0:
        return None
    found = _LIST.match(text[at + len(key) :].lstrip("=: '\""))
    return tuple(int(part) for part in found[1].split(",")) if found else None


def amount_bytes(value: str, unit: str) -> int:
    """Bytes of ``448.00`` ``MiB``."""
    return round(float(value) * {"B": 1, "K": 1024, "M": 1024**2, "G": GIB, "T": 1024 * GIB}[unit[0].upper()])
