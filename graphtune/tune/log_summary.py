"""Server logs and server accounts, read to one summary per file. See ``log_records`` for what is in it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import IO

from graphtune.engines import events as ev
from graphtune.engines.log_lines import open_log
from graphtune.engines.log_reader import REASONS, LogReader
from graphtune.engines.sglang import server_info
from graphtune.errors import InputError
from graphtune.tune.log_assembly import BootAssembly
from graphtune.tune.log_records import BootSummary, LogSummary
from graphtune.units import format_bytes

LONGEST_INFO_BYTES = 64 << 20
# Both accounts round to hundredths of a GiB.
GRAPH_TOLERANCE_BYTES = 20 << 20


def summarise(stream: IO[bytes], source: str, engine: str | None = None) -> LogSummary:
    """Read a log to its end. Memory does not grow with it."""
    reader = LogReader(engine)
    boots: list[BootSummary] = []
    current = BootAssembly()
    for event in reader.events(stream):
        if type(event) is ev.Boot and event.restart:
            boots.append(current.finish(reader.engine))
            current = BootAssembly()
        current.add(event)
    boots.append(current.finish(reader.engine))
    return LogSummary(source, reader.engine, reader.lines, reader.read, dict(reader.skipped), tuple(boots))


def summarise_file(name: str, engine: str | None = None) -> LogSummary:
    """Read one file: a log, plain or gzip, ``-`` for standard input, or the JSON of SGLang's ``/server_info``.

    Raises InputError when it cannot be opened or holds nothing that is known.
    """
    with open_log(name) as stream:
        head = stream.peek(1 << 16) if isinstance(stream, io.BufferedReader) else b""
        info = _server_info(stream, name) if server_info.looks_like(head) else None
        summary = info or summarise(stream, name, engine)
    if summary.read == 0:
        skipped = ", ".join(f"{count} {REASONS[reason]}" for reason, count in sorted(summary.skipped.items()))
        raise InputError(
            f"none of its {summary.lines} lines says anything of graphs, memory or batches"
            + (f" ({skipped})" if skipped else ""),
            where=name,
            action="Server logs of SGLang, vLLM and TensorRT-LLM and SGLang's /server_info are read.",
        )
    return summary


def _server_info(stream: IO[bytes], name: str) -> LogSummary | None:
    text = stream.read(LONGEST_INFO_BYTES)
    try:
        found = server_info.events(json.loads(text))
    except (ValueError, RecursionError):
        return summarise(io.BytesIO(text), name)
    assembly = BootAssembly()
    for event in found:
        assembly.add(event)
    return LogSummary(name, "sglang", 1, 1, {}, (assembly.finish("sglang"),), kind="server_info")


def contradictions(summaries: Iterable[LogSummary]) -> tuple[str, ...]:
    """Where a server's own account differs from the log of its last start."""
    logs = [s.boots[-1] for s in summaries if s.kind == "log" and s.engine == "sglang"]
    infos = [s.boots[-1] for s in summaries if s.kind == "server_info"]
    found: list[str] = []
    for log in logs:
        for info in infos:
            found += _contradictions(log, info)
    return tuple(dict.fromkeys(found))


def _contradictions(log: BootSummary, info: BootSummary) -> list[str]:
    found = []
    if log.kv_tokens is not None and info.kv_tokens is not None and log.kv_tokens != info.kv_tokens:
        found.append(f"KV tokens: the log says {log.kv_tokens:,}, /server_info {info.kv_tokens:,}")
    if log.graph_bytes is not None and info.graph_bytes is not None:
        apart = abs(log.graph_bytes - info.graph_bytes)
        if apart > GRAPH_TOLERANCE_BYTES:
            phases = ", ".join(sorted({f"{c.role} {c.phase}" for c in log.captures if c.phase}))
            found.append(
                f"graph memory: the log's captures ({phases}) sum to {format_bytes(log.graph_bytes)}, "
                f"/server_info says {format_bytes(info.graph_bytes)}: some versions report one phase only"
            )
    for key in sorted(log.settings.keys() & info.settings.keys()):
        if log.settings[key] != info.settings[key]:
            found.append(f"{key}: the log says {log.settings[key]}, /server_info {info.settings[key]}")
    return found
