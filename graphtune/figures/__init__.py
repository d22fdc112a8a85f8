"""Figures of the report page. Each is computed as plain data first, then drawn; nothing measured means no figure."""

from __future__ import annotations

from graphtune.figures.base import Column, Drawing, Key, Table

__all__ = ["Column", "Drawing", "Key", "Table"]
