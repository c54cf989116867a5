"""Errors of the Python functions: messages of the command line that name arguments instead of
options.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

from forerun._proxies.core.errors import InputError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RequestError(InputError):
    """The arguments of a call are invalid, like a usage error of the command line."""


# `--column loss=val_bpb`, which is `columns={'loss': 'val_bpb'}` in Python
_COLUMN = re.compile(r"--column ([^\s=]+)=([^\s;,)]+)")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)")
_ARGUMENTS = {"runs": "table", "json": "`problems`", "column": "columns", "beyond": "beyond=True"}
"""Text in a message for each option of the command line whose argument has another name."""


def _replace_options(message: str) -> str:
    """Replace the options in a message by arguments, except in complete commands between
    backticks.
    """
    parts = message.replace("Missing option", "Missing argument").split("`")
    for place, part in enumerate(parts):
        # Every second part is between backticks
        if place % 2 and part.startswith("forerun "):
            continue
        columns = _COLUMN.sub(r"columns={'\1': '\2'}", part)
        parts[place] = _OPTION.sub(
            lambda option: _ARGUMENTS.get(option[1], option[1].replace("-", "_")), columns
        )
    return "`".join(parts)


def as_value_error(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function of the Python interface, so that it raises ValueErrors that name
    arguments.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except click.UsageError as error:
            raise RequestError(_replace_options(error.message)) from error
        except ValueError as error:
            if len(error.args) == 1 and isinstance(error.args[0], str):
                error.args = (_replace_options(error.args[0]),)
            if isinstance(problems := getattr(error, "problems", None), list | tuple):
                error.problems = type(problems)(map(_replace_options, map(str, problems)))  # type: ignore[attr-defined]
            raise

    return call
