"""Lines for a terminal: at most 80 columns, one line of text a line, readable without colour."""

from __future__ import annotations

import re
import textwrap

WIDTH = 80


def flat(text: str) -> str:
    """One line, without control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text)


def wrapped(text: str, first: str = "", following: str | None = None, *, break_words: bool = True) -> list[str]:
    """``text`` in lines of at most WIDTH columns, the first one after ``first``, the others after ``following``
    (default: the same). A word that is longer than a line is broken unless it is to be copied."""
    following = first if following is None else following
    lines = textwrap.wrap(
        flat(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=following,
        break_on_hyphens=False,
        break_long_words=break_words,
    )
    return lines or [""]
