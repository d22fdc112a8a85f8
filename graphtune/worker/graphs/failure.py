"""What failed, and on which line of the model."""

from __future__ import annotations

import traceback
from pathlib import Path

_GRAPHS = Path(__file__).parent.as_posix()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type when it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def is_model_code(file: str) -> bool:
    """False for torch, for the graph backends and for generated code without a file."""
    path = file.replace("\\", "/")
    return not (path.startswith(("<", _GRAPHS)) or "/torch/" in path)


def explain(error: BaseException) -> str:
    """An error's first line with place and text of the innermost line of the model in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if is_model_code(frame.filename)), None)
    if frame is None:
        return first_line(error)
    place = "/".join(Path(frame.filename).parts[-2:])
    return f"{first_line(error)} — at {place}:{frame.lineno}: {frame.line}"
