"""Canonical JSON and content ids: one value has one text and one sha256. Standard library only.

Two records are the same exactly when their canonical texts are the same bytes. Keys are sorted, there is no
white space, floats are written in Python's shortest round-trip form, and `1` and `1.0` are different values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path

from proxies.core.errors import InputError
from proxies.core.notation import counted, with_article
from proxies.core.plain_files import open_plain, open_to_append

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

ID_LENGTH = 64  # hex digits of a sha256
SHARED = {"shared": True}
"""Metadata of a field that is the same in many records: equal values read from JSON are decoded once, as one object."""
UNLESS_DEFAULT = {"unless_default": True}
"""Metadata of a field that is written only where it differs from its default: records without it keep their id."""
_MOST_SHARED = 1000
"""The most such objects kept; beyond it, all are forgotten and decoded anew."""


class CanonError(InputError):
    """A value that has no canonical form, or a text that is not canonical."""


def canonical(value: object) -> str:
    """The canonical JSON text of `value` (a record, or plain JSON data).

    Raises:
        CanonError: NaN, an infinity, a key that is not a string, a text UTF-8 cannot write, or a type JSON does not
            know, with its path in the message; or a value nested some hundred levels deep.
    """
    try:
        plain = to_json(value)
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise CanonError("it is nested too deeply for a record") from None


def content_id(value: object) -> str:
    """Sha256, in hex, of the canonical text of `value`."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def pretty(value: object) -> bytes:
    """`value` as strict JSON for people's eyes: sorted keys, indented, a newline at the end."""
    text = json.dumps(to_json(value), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that it is there wholly or not at all, also after a power cut.

    A link is followed; a device is written to, never replaced.

    Raises:
        OSError: It cannot be written, or is a pipe or socket.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open_to_append(path) as device:
            device.write(content)
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may write the same report
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, with those above it, so that each outlasts a power cut: its entry in the one above is synced."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def file_sha256(path: Path) -> str:
    """Sha256, in hex, of a file's bytes."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it is buffered


def to_json(value: object, path: str = "$") -> Json:
    """Plain JSON data of `value`: records become objects, tuples become lists.

    Raises:
        CanonError: as for `canonical`.
    """
    kind = type(value)
    if value is None or kind is bool:
        return typing.cast(Json, value)
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CanonError(f"{path} is {value}: records hold finite numbers only")
        return value
    if isinstance(value, int):
        return int(value)  # subclasses (an IntEnum, torch's version string) are not what JSON gives back
    if isinstance(value, (list, tuple)):  # a union would be made anew for each value
        kinds = set(map(type, value))  # curves are long, and numbers of one kind
        if kinds == {int} or (kinds == {float} and all(map(math.isfinite, value))):
            return list(value)
        return [to_json(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise CanonError(f"{path} has the key {key!r}: keys are strings")
        return {_text(key, path): to_json(item, f"{path}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return {f.name: to_json(getattr(value, f.name), f"{path}.{f.name}") for f in written_fields(value)}
    raise CanonError(f"{path} is {with_article(kind.__name__)}: not a JSON value")


def written_fields(record: object) -> list[dataclasses.Field[typing.Any]]:
    """The fields of a record that its JSON has."""
    kind: type = type(record)
    return [f for f in _fields(kind) if "unless_default" not in f.metadata or getattr(record, f.name) != f.default]


def _text(value: str, path: str) -> str:
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError as error:
        raise CanonError(f"{path} holds half a surrogate pair, which UTF-8 cannot encode: {error.reason}") from None
    return str.__str__(value)  # not str(): an enumeration prints its name


def parse(text: str | bytes) -> Json:
    """Read JSON strictly: no NaN or infinity (spelled out or by overflow), no key twice.

    Raises:
        CanonError: the text is not JSON, or not strict.
    """
    try:
        loaded: Json = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_refuse, parse_float=_finite)
    except CanonError:
        raise
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and integers of absurd length
        raise CanonError(f"not JSON: {error}") from error
    return loaded


MAX_DEPTH = 64
"""Depth of objects and lists that `parse_deep` keeps where a text has more than Python's parser allows."""
_STRINGS_AND_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def parse_deep(text: str, decode: Callable[[str], object] = json.loads) -> object:
    """Read JSON of any depth.

    Python's parser allows some 1,000 levels. Of a deeper text, objects and lists below `MAX_DEPTH` are read as empty.

    Args:
        text: The JSON.
        decode: Parser to use.

    Raises:
        ValueError: The text is not JSON.
    """
    try:
        return decode(text)
    except RecursionError:
        return decode(_empty_deep_values(text))


def _empty_deep_values(text: str) -> str:
    """Return a JSON text without the content of objects and lists below `MAX_DEPTH`."""
    parts: list[str] = []
    depth = start = 0
    for match in _STRINGS_AND_BRACKETS.finditer(text):
        if match[0] in ("[", "{"):
            depth += 1
            if depth == MAX_DEPTH + 1:
                parts.append(text[start : match.end()])
        elif match[0] in ("]", "}"):
            if depth == MAX_DEPTH + 1:
                start = match.start()
            depth -= 1
    if depth > MAX_DEPTH:
        raise ValueError("a bracket does not close")
    return "".join([*parts, text[start:]])


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        raise CanonError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return seen


def _refuse(token: str) -> typing.NoReturn:
    raise CanonError(f"{token} is not allowed: a record's numbers must be finite")


def _finite(token: str) -> float:
    value = float(token)
    return value if math.isfinite(value) else _refuse(token)


_Record = typing.TypeVar("_Record")


def decode(kind: type[_Record], value: object, path: str = "$") -> _Record:
    """Build the record `kind` from JSON data, strictly: every field there, none unknown, each of its type.

    An int is accepted in place of a float, and becomes one. Records then validate themselves.

    Raises:
        CanonError: what is missing, unknown or of the wrong type, with its path.
    """
    try:
        return typing.cast(_Record, _decode(kind, value, path))
    except RecursionError:  # also while a value is shown in a message
        raise CanonError(f"{path} is nested too deeply for a record") from None


_PLAIN = (bool, int, float, str)


def _decode(kind: typing.Any, value: typing.Any, path: str) -> object:
    if type(value) is kind and kind in _PLAIN:
        return value
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_record(kind, value, path)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (inner,) = (a for a in args if a is not type(None))
        return _decode(inner, value, path)
    if origin is typing.Literal:
        if value not in args or isinstance(value, bool):
            raise CanonError(f"{path} is {value!r}: must be one of {', '.join(map(repr, args))}")
        return args[args.index(value)]  # one text for all records
    if origin is tuple:
        return _decode_tuple(args, value, path)
    if origin is dict:
        if not isinstance(value, dict):
            raise CanonError(f"{path} is {with_article(type(value).__name__)}: must be an object")
        return {key: _decode(args[1], item, f"{path}.{key}") for key, item in value.items()}
    if kind is float and type(value) is int:
        return _float(value, path)
    if kind is object:
        return value
    name = getattr(kind, "__name__", str(kind))
    raise CanonError(f"{path} is {value!r} ({type(value).__name__}): must be {name}")


def _float(value: int, path: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise CanonError(f"{path} is an integer too large for a float") from None


def _decode_tuple(args: tuple[typing.Any, ...], value: object, path: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise CanonError(f"{path} is {with_article(type(value).__name__)}: must be a list")
    if len(args) == 2 and args[1] is Ellipsis:
        if args[0] in _PLAIN and set(map(type, value)) == {args[0]}:
            return tuple(value)
        return tuple(_decode(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(args) != len(value):
        raise CanonError(f"{path} has {counted(len(value), 'item')}: must have {len(args)}")
    pairs = zip(args, value, strict=True)
    return tuple(_decode(a, item, f"{path}[{i}]") for i, (a, item) in enumerate(pairs))


def _decode_record(kind: type, value: object, path: str) -> object:
    if not isinstance(value, dict):
        raise CanonError(f"{path} is {with_article(type(value).__name__)}: must be an object ({kind.__name__})")
    fields = _fields(kind)
    missing = [f.name for f in fields if f.name not in value and "unless_default" not in f.metadata]
    unknown = value.keys() - {f.name for f in fields}
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has the unknown {', '.join(repr(n) for n in value if n in unknown)}"] if unknown else []
        raise CanonError(f"{path} ({kind.__name__}) {' and '.join(parts)}")
    hints = _type_hints(kind)
    return kind(
        **{
            f.name: (_decode_shared if "shared" in f.metadata else _decode)(
                hints[f.name], value[f.name], f"{path}.{f.name}"
            )
            for f in fields
            if f.name in value
        }
    )


_shared: dict[tuple[object, str], object] = {}


def _decode_shared(kind: typing.Any, value: object, path: str) -> object:
    """The one object for all equal values; their text tells 1, 1.0 and true apart, as equality does not."""
    key = (kind, repr(value))
    if key not in _shared:
        made = _decode(kind, value, path)
        if len(_shared) >= _MOST_SHARED:
            _shared.clear()
        _shared[key] = made
    return _shared[key]


@functools.cache
def _fields(kind: type) -> tuple[dataclasses.Field[typing.Any], ...]:
    return dataclasses.fields(kind)


@functools.cache
def _type_hints(kind: type) -> dict[str, typing.Any]:
    """Resolving a record's annotations is most of the work of decoding it."""
    return typing.get_type_hints(kind)
