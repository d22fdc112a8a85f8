"""What the pages of a sweep and of a comparison share: their templates and what templates may call."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup, escape

from graphtune.figures.csv_data import csv_uri
from graphtune.figures.glossary import explained


def render_page(template: str, values: dict[str, Any]) -> str:
    """The page as text; everything that is not marked as safe is escaped."""
    from jinja2 import Environment as Templates
    from jinja2 import PackageLoader, StrictUndefined

    templates = Templates(
        loader=PackageLoader("graphtune"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    templates.filters |= {"options": options, "explained": explained, "csv_uri": csv_uri, "file_name": file_name}
    return templates.get_template(template).render(**values)


def options(text: str) -> Markup:
    """Text in which a line does not end inside an option's name."""
    return Markup(re.sub(r"--[a-z][a-z-]*", r"<b>\g<0></b>", str(escape(text))))


def file_name(title: str) -> str:
    """A title as the name of a file to save."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".csv"
