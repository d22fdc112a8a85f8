"""What every engine's log reader is made of: anchors that find a message, and the reader that turns it into events."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from graphtune.engines import log_fields
from graphtune.engines.events import CaptureError, CodeLine, Event, OutOfMemory
from graphtune.engines.log_lines import rank, stamp

# A message whose kind is known and whose fields are broken off: it is counted, nothing is guessed from it.
CUT = "cut"
Found = Event | list[Event] | tuple[()] | str | None
Handler = Callable[[str, int], Found]


@dataclass(frozen=True)
class Shape:
    """A message is looked at by ``handler`` when it contains ``anchor``. The handler gets the text and the place of
    the anchor; what stands before it is the prefix. It returns events, an empty tuple for a message that is known and
    says nothing, CUT, or None when the message is another one. ``engine`` None: any engine prints it.

    ``quick`` reads the commonest form of the whole line at once, with the same result; None sends it to ``handler``.
    """

    anchor: bytes
    handler: Handler
    engine: str | None = None
    quick: Callable[[bytes], Event | None] | None = None


_MEMORY = re.compile(r"Tried to allocate (\d+(?:\.\d+)?) ([KMGT]?i?B)")
_TOTAL = re.compile(r"total capacity of (\d+(?:\.\d+)?) ([KMGT]?i?B)")
_FREE = re.compile(r"(\d+(?:\.\d+)?) ([KMGT]?i?B) (?:is )?free")
_OPERATION = re.compile(
    r"operation not permitted when stream is capturing"
    r"|cudaErrorStreamCapture\w+"
    r"|CUDA_ERROR_STREAM_CAPTURE_\w+"
    r"|operation failed due to a previous error during capture"
    r"|Cannot copy between CPU and CUDA tensors during CUDA graph capture"
    r"|AssertionError: capture_bs=\[[\d, -]{0,200}\]"
    r"|No valid cudagraph sizes after rounding to multiple of \d+"
    r"|Offset increment outside graph capture"
)
_HOST_READ = re.compile(r"^\s.*?(\.(?:item|tolist|cpu|numpy|nonzero)\(\)|torch\.cuda\.synchronize\(\))")


def prefix(text: str, at: int) -> tuple[str | None, str]:
    """Time and rank in what stands before a message."""
    before = text[:at]
    return stamp(before), rank(before)


def out_of_memory(text: str, at: int) -> Found:
    """A failed allocation. Amounts that are not printed are None."""
    asked = _MEMORY.search(text)
    total, free = _TOTAL.search(text), _FREE.search(text)
    if asked is None and "CUDA out of memory" not in text and "OutOfMemoryError" not in text:
        return None
    when, who = prefix(text, at)
    return OutOfMemory(
        when,
        who,
        log_fields.amount_bytes(asked[1], asked[2]) if asked else None,
        log_fields.amount_bytes(free[1], free[2]) if free else None,
        log_fields.amount_bytes(total[1], total[2]) if total else None,
    )


def capture_error(text: str, at: int) -> Found:
    """An operation that cannot be captured, named as the message names it."""
    found = _OPERATION.search(text)
    if found is None or "out of memory" in text:
        return None
    when, who = prefix(text, min(at, found.start()))
    return CaptureError(when, who, found[0])


def code_line(text: str, at: int) -> Found:
    """A line of code in a traceback, which is indented, that waits for the device."""
    found = _HOST_READ.match(text)
    return CodeLine(rank(text[: min(at, 80)]), found[1]) if found else None


_HOST_READS = (b".item()", b".tolist()", b".cpu()", b".numpy()", b".nonzero()", b"torch.cuda.synchronize()")

COMMON: tuple[Shape, ...] = (
    Shape(b"out of memory", out_of_memory),
    Shape(b"stream is capturing", capture_error),
    Shape(b"StreamCapture", capture_error),
    Shape(b"STREAM_CAPTURE", capture_error),
    Shape(b"during capture", capture_error),
    Shape(b"during CUDA graph capture", capture_error),
    Shape(b"capture_bs=", capture_error),
    Shape(b"No valid cudagraph sizes", capture_error),
    *(Shape(anchor, code_line) for anchor in _HOST_READS),
)
