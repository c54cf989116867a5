"""Reading of tables and dictionaries that Python serialized, without running anything they name.

Such a file is a program for a stack machine: it can import any function and call it. Some studies
publish their runs only in this form. `read_pickled` runs the stack operations that the standard
library lists, and records each call as a `Call` instead of making it. `read_frame` and `read_array`
then take numbers and texts out of the recorded calls of pandas and numpy.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BYTEARRAY8",
}
"""Operations that push their argument."""
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
"""Operations that push a constant or an empty container."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
"""Operations that make a tuple of the topmost values, by the number of values."""
_IGNORED = {"PROTO", "FRAME", "STOP"}
_MARK = object()
"""Mark on the stack, below the values that a later operation takes."""


@dataclass(slots=True, eq=False)
class Call:
    """A call that a file asks for, recorded and not made."""

    function: str
    arguments: tuple[Any, ...]
    state: Any = None
    """Attributes or items that the file would give to the result."""


def read_pickled(content: bytes) -> Any:
    """Return the object of a file (protocol 4 or 5), with a `Call` in place of every call.

    Raises:
        ValueError: The content is malformed, or uses an operation that plain tables do not need.
    """
    machine = _Machine()
    stack, memo = machine.stack, machine.memo
    try:
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name == "MEMOIZE":
                memo.append(stack[-1])
            elif name in _VALUES:
                stack.append(argument)
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in _TUPLES:
                stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            elif name == "MARK":
                stack.append(_MARK)
            elif name not in _IGNORED:
                machine.combine(name)
        return stack[-1]
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"malformed content: {error!r}") from error


class _Machine:
    """The stack and the memo of a file that is being read."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: list[Any] = []

    def combine(self, name: str) -> None:
        """Combine the topmost values, or those above the last mark."""
        if name == "TUPLE":
            values = tuple(self._pop_to_mark())
            self.stack.append(values)
        elif name == "APPENDS":
            values_to_add = self._pop_to_mark()
            self.stack[-1].extend(values_to_add)
        elif name == "SETITEMS":
            pairs = self._pop_to_mark()
            self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
        elif name == "APPEND":
            value = self.stack.pop()
            self.stack[-1].append(value)
        elif name == "SETITEM":
            value, key = self.stack.pop(), self.stack.pop()
            self.stack[-1][key] = value
        elif name == "STACK_GLOBAL":
            function, module = self.stack.pop(), self.stack.pop()
            self.stack.append(f"{module}.{function}")
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = self.stack.pop(), self.stack.pop()
            self.stack.append(Call(function, arguments))
        elif name == "BUILD":
            state = self.stack.pop()
            self.stack[-1].state = state
        else:
            raise ValueError(f"{name}: plain tables do not need this operation")

    def _pop_to_mark(self) -> list[Any]:
        """Remove the values above the last mark, and the mark, and return the values."""
        position = len(self.stack) - 1
        while self.stack[position] is not _MARK:
            position -= 1
        values = self.stack[position + 1 :]
        del self.stack[position:]
        return values


def read_array(value: Any) -> Array:
    """Return the array of a recorded numpy array, or of a recorded pandas Series."""
    match value:
        case Call(function=function, state=(_, shape, dtype, is_fortran, items)) if (
            "_reconstruct" in function
        ):
            kind = _read_dtype(dtype)
            if isinstance(items, bytes):
                flat = np.frombuffer(items, dtype=kind)
            else:
                flat = np.empty(len(items), dtype=object)
                flat[:] = items
            return flat.reshape(shape, order="F" if is_fortran else "C")
        case Call(function=function, arguments=(items, dtype, shape, order)) if (
            "_frombuffer" in function
        ):
            return np.frombuffer(items, dtype=_read_dtype(dtype)).reshape(shape, order=order)
        case Call(function=function, state={"_mgr": manager}) if function.endswith(".Series"):
            match manager:
                case (
                    Call(state=(_, (items,), *_))
                    | Call(arguments=((Call(arguments=(items, *_)),), _))
                ):
                    return read_array(items)
    raise ValueError(f"not an array: {value!r:.200}")


def read_frame(value: Any) -> Mapping[str, Array]:
    """Return the columns of a recorded pandas DataFrame by name."""
    match value:
        case Call(function=function, state={"_mgr": Call(arguments=(blocks, (names, _)))}) if (
            function.endswith(".DataFrame")
        ):
            # pandas stores the column names as the call of a function with {"data": names}.
            columns = [str(name) for name in read_array(names.arguments[1]["data"])]
            frame: dict[str, Array] = {}
            for block in blocks:
                values, places = read_array(block.arguments[0]), block.arguments[1]
                if isinstance(places, Call) and places.function == "builtins.slice":
                    indices = list(range(len(columns)))[slice(*places.arguments)]
                else:
                    indices = read_array(places).tolist()
                frame |= {columns[index]: row for index, row in zip(indices, values, strict=True)}
            return {name: frame[name] for name in columns}
    raise ValueError(f"not a table: {value!r:.200}")


def _read_dtype(value: Any) -> np.dtype[Any]:
    """Return the dtype of a recorded numpy dtype."""
    match value:
        case Call(function="numpy.dtype", arguments=(code, *_), state=(_, order, *_)):
            return np.dtype(code).newbyteorder(order if order in "<>" else "=")
    raise ValueError(f"not a type of numbers: {value!r:.200}")
