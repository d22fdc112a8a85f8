"""Errors that a user can act on. Anything else that escapes is a fault of graphtune."""

from __future__ import annotations


class GraphtuneError(Exception):
    """A refusal with a cause and a next action; commands print it as one message and exit with ``exit_code``."""

    exit_code = 2

    def __init__(self, message: str, *, where: str | None = None, action: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.action = action

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  {self.action}" if self.action else text


class InputError(GraphtuneError):
    """Bad input: a recipe, a model config, a flag, a file. ``where`` names file, line and key path."""


class ModelNotSupported(InputError):
    """A model whose computation is not built here; the message names the key or architecture."""


class DeviceError(GraphtuneError):
    """The device that was asked for is not usable; ``action`` says what to do."""


class Finding(GraphtuneError):
    """The input was fine and the answer is bad news (nothing fits, a cell failed)."""

    exit_code = 1
