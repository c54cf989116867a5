"""Errors of the command line, in the words of Python: arguments for options."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RequestError(ValueError):
    """A call that the command line refuses as wrong usage."""


_COLUMN = re.compile(r"--column ([^\s=]+)=([^\s;,)]+)")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)")
_ARGUMENTS = {"runs": "table", "json": "`problems`", "column": "columns", "beyond": "beyond=True"}
"""Arguments that are not called as their options are."""


def _speak_python(message: str) -> str:
    """Return a message of the command line with arguments for its options; whole commands in backticks stay."""
    parts = message.replace("Missing option", "Missing argument").split("`")
    for place, part in enumerate(parts):
        if place % 2 and part.startswith("forerun "):
            continue
        columns = _COLUMN.sub(r"columns={'\1': '\2'}", part)
        parts[place] = _OPTION.sub(lambda option: _ARGUMENTS.get(option[1], option[1].replace("-", "_")), columns)
    return "`".join(parts)


def as_value_error(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Raise what a command refuses as a `ValueError` that names arguments."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except click.UsageError as error:
            raise RequestError(_speak_python(error.message)) from error
        except ValueError as error:
            if len(error.args) == 1 and isinstance(error.args[0], str):
                error.args = (_speak_python(error.args[0]),)
            if isinstance(problems := getattr(error, "problems", None), list | tuple):
                error.problems = type(problems)(map(_speak_python, map(str, problems)))  # type: ignore[attr-defined]
            raise

    return called
