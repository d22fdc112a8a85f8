"""What ``--workload`` names: a preset, a histogram or a request trace; the content of a file says which."""

from __future__ import annotations

import json
from pathlib import Path

from graphtune.errors import InputError
from graphtune.tune.workload import Workload, parse_workload
from graphtune.tune.workloads.csv_table import Table, plain
from graphtune.tune.workloads.histogram_table import read_histograms
from graphtune.tune.workloads.presets import PRESETS, preset
from graphtune.tune.workloads.trace import ARRIVALS, Trace, read_json_trace, read_trace

WHERE = "--workload"


def read_traffic(text: str, default_max_running: int) -> Workload | Trace:
    """A preset by name, with its largest number of requests (``interactive 64``; ``default_max_running`` where none is
    given, except for ``steady``), or the histogram or trace in a file: JSON, or CSV. Raises InputError.
    """
    name, *rest = text.replace(":", " ").split() or [""]
    if name in PRESETS and not Path(text).exists():
        if not rest and name != "steady":
            return preset(name, default_max_running)
        if len(rest) == 1 and rest[0].isascii() and rest[0].isdigit():
            return preset(name, int(rest[0]))
        raise InputError(
            f"{text!r} does not say how many requests", where=WHERE, action=f"Write for example '{name} 32'."
        )
    if not Path(text).is_file():
        known = ", ".join(f"{one} N" for one in PRESETS)
        raise InputError(f"{text!r} is no file and no preset", where=WHERE, action=f"Presets: {known}.")
    content = Path(text).read_bytes()
    if text.endswith(".json") or content.lstrip().startswith(b"{"):
        return read_json_trace(text) if _kind(content) == "trace" else parse_workload(content, text)
    arrives = any(plain(title) in ARRIVALS for title in Table(text).titles)
    return read_trace(text) if arrives else read_histograms([text])


def _kind(content: bytes) -> object:
    """``kind`` of a JSON object; None where there is none, for the reader of histograms to say so."""
    try:
        values = json.loads(content)
    except ValueError:
        return None
    return values.get("kind") if isinstance(values, dict) else None
