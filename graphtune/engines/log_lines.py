"""Lines of a server log whatever carried it there: compressed, coloured, prefixed, glued, cut."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from graphtune.errors import InputError

CHUNK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 20
"""A longer line is cut there, so that a file without line ends does not fill memory. Configuration dumps have 20 kB."""

_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
# A progress bar is left on its line; what is written next starts with a stamp.
_GLUE = re.compile(
    rb"(?<=[^\s\[(])\s*(?=\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)"
    rb"|(?<=\S)(?=\([A-Za-z_0-9]+(?: [a-z]+=\d+)* ?pid=\d+\) )"
    rb"|(?<=it/s\])(?=(?:INFO|WARNING|ERROR) )"
)
_DATED = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
_US_DATED = re.compile(r"\b(\d\d)/(\d\d)/(\d{4})-(\d\d:\d\d:\d\d)")
_YEARLESS = re.compile(r"\b(\d\d-\d\d) (\d\d:\d\d:\d\d)")
_TIME = re.compile(r"\b(\d\d:\d\d:\d\d)\b")
_RANK = re.compile(r"(?<![A-Za-z0-9])(DP|PP|CP|TP|EP|DCP|PCP)_?(\d{1,5})(?![A-Za-z0-9.])")
_RANK_WORD = re.compile(r"\b(?:global_)?(?:rank|RANK)[ =:]+(\d{1,5})\b")
_RANK_ORDER = ("DP", "PP", "CP", "PCP", "DCP", "TP", "EP", "RANK")


def open_log(name: str) -> BinaryIO:
    """A log file as bytes, decompressed when it is gzip; ``-`` is standard input.

    Raises InputError when it cannot be opened.
    """
    if name == "-":
        return _decompressed(cast(BinaryIO, sys.stdin.buffer))
    path = Path(name)
    try:
        if path.is_dir():
            raise InputError("is a folder", where=name, action="Name one or more log files, or - for standard input.")
        return _decompressed(path.open("rb"))
    except FileNotFoundError:
        raise InputError("no such file", where=name, action="Name a log file, or - for standard input.") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=name) from error


def _decompressed(raw: BinaryIO) -> BinaryIO:
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", raw))
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    return stream


def blocks(stream: IO[bytes]) -> Iterator[tuple[bytes, list[bytes]]]:
    """Blocks of a stream with their lines, without line ends, in memory that does not grow with the stream.

    A gzip file that ends early ends here.
    """
    rest, skipping = b"", False
    while True:
        try:
            chunk = stream.read(CHUNK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            chunk = b""
        if not chunk:
            break
        block = rest + chunk
        lines = block.split(b"\n")
        rest = lines.pop()
        if skipping:
            if not lines:
                rest = b""
                continue
            del lines[0]
            skipping = False
        if len(rest) > LONGEST_LINE_BYTES:
            lines.append(rest[:LONGEST_LINE_BYTES])
            rest, skipping = b"", True
        yield block, lines
    if rest:
        yield rest, [rest]


def pieces(line: bytes) -> list[bytes]:
    """The messages on one physical line: colour removed, carriage returns and glued stamps split, JSON unwrapped."""
    if line.startswith(b"{"):
        line = _unwrapped(line)
    if b"\x1b" in line:
        line = _COLOUR.sub(b"", line)
    parts = line.split(b"\r") if b"\r" in line else [line]
    if b"it/s]" in line or b"?it/s" in line or b"s/it]" in line:
        parts = [piece for part in parts for piece in (_GLUE.split(part) if _may_be_glued(part) else (part,))]
    return [part for part in parts if part and not part.isspace()]


def _may_be_glued(part: bytes) -> bool:
    """A cheap look for anything that ``_GLUE`` may split at."""
    return b"[2" in part or b" pid=" in part or b"]INFO" in part or b"]WARNING" in part or b"]ERROR" in part


def _unwrapped(line: bytes) -> bytes:
    """The message of a line that a container runtime wrapped in JSON, or the line itself."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(value, dict):
        return line
    for key in ("log", "message", "msg", "MESSAGE"):
        text = value.get(key)
        if isinstance(text, str):
            stamp = value.get("time") or value.get("timestamp") or ""
            prefix = f"{stamp} " if isinstance(stamp, str) and stamp else ""
            return (prefix + text.rstrip("\n")).encode("utf-8", "replace")
    return line


def stamp(prefix: str) -> str | None:
    """The time in a prefix as ``YYYY-MM-DD HH:MM:SS``, or without what is not written."""
    found = _DATED.search(prefix)
    if found:
        return f"{found[1]} {found[2]}"
    found = _US_DATED.search(prefix)
    if found:
        return f"{found[3]}-{found[1]}-{found[2]} {found[4]}"
    found = _YEARLESS.search(prefix)
    if found:
        return f"{found[1]} {found[2]}"
    found = _TIME.search(prefix)
    return found[1] if found else None


_known_ranks: dict[bytes, str] = {}


def known_rank(prefix: bytes) -> str:
    """``rank`` of a prefix without a time, of which a log has few."""
    found = _known_ranks.get(prefix)
    if found is None:
        found = rank(prefix.decode("utf-8", "replace"))
        if len(_known_ranks) < 4096:
            _known_ranks[prefix] = found
    return found


def rank(prefix: str) -> str:
    """Ranks named in a prefix in any order, as ``DP0 TP1``; empty when there are none."""
    if not prefix:
        return ""
    found = {kind: number for kind, number in _RANK.findall(prefix)}
    if not found:
        word = _RANK_WORD.search(prefix)
        return f"RANK{word[1]}" if word else ""
    return " ".join(f"{kind}{int(found[kind])}" for kind in _RANK_ORDER if kind in found)
