"""Canonical JSON and content ids: equal records have the same text and the same sha256.

Two records are the same exactly when their canonical texts are the same bytes. Keys are sorted,
there is no white space, floats are written in Python's shortest round-trip form, and `1` and `1.0`
are different values. Ids of all recorded runs depend on this form, so it must never change.

The module also reads JSON strictly, builds records from it (`decode`), writes files that survive a
power cut, and hashes forerun's own sources.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import types
import typing
from pathlib import Path

from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import add_article, format_counted
from forerun._proxies.core.plain_files import open_plain, open_to_append

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

ID_LENGTH = 64  # hex digits of a sha256
SHARED = {"shared": True}
"""Metadata of a field whose value is the same in many records. Equal values are decoded to one
object, which saves memory and time."""
UNLESS_DEFAULT = {"unless_default": True}
"""Metadata of a field that is written only if it differs from its default. Records that were
written before the field existed keep their ids."""
MAX_SHARED = 1000
"""Maximum number of shared objects that are kept; when it is reached, all are dropped."""


class CanonError(InputError):
    """A value that has no canonical form, or a text that is not canonical."""


# ---- Writing ----


def to_canonical_json(value: object) -> str:
    """Return the canonical JSON text of a record, or of plain JSON data.

    Raises:
        CanonError: The value contains NaN, an infinity, a key that is not a string, a text that
            UTF-8 cannot encode, or a type that JSON does not have (the message names its path), or
            is nested some hundred levels deep.
    """
    try:
        return json.dumps(
            to_json(value),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        )
    except RecursionError:
        raise CanonError("it is nested too deeply for a record") from None


def compute_content_id(value: object) -> str:
    """Return the sha256, in hex, of the canonical text of a value."""
    return hashlib.sha256(to_canonical_json(value).encode()).hexdigest()


def to_pretty_json(value: object) -> bytes:
    """Return a value as strict JSON for people: sorted keys, indented, with a final newline."""
    text = json.dumps(to_json(value), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def to_json(value: object, path: str = "$") -> Json:
    """Convert a value to plain JSON data: records become objects, tuples become lists.

    Raises:
        CanonError: The value has no canonical form (`to_canonical_json`).
    """
    if value is None or type(value) is bool:
        return typing.cast(Json, value)
    if isinstance(value, str):
        return _check_text(value, path)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CanonError(f"{path} is {value}: records hold finite numbers only")
        return value
    if isinstance(value, int):
        return int(value)  # a subclass, such as an IntEnum, does not survive a round trip
    if isinstance(value, (list, tuple)):
        # Curves are long lists of plain numbers, which need no conversion
        kinds = set(map(type, value))
        if kinds == {int} or (kinds == {float} and all(map(math.isfinite, value))):
            return list(value)
        return [to_json(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise CanonError(f"{path} has the key {key!r}: keys are strings")
        return {
            _check_text(key, path): to_json(item, f"{path}.{key}") for key, item in value.items()
        }
    if dataclasses.is_dataclass(type(value)):
        return {
            field.name: to_json(getattr(value, field.name), f"{path}.{field.name}")
            for field in list_written_fields(value)
        }
    raise CanonError(f"{path} is {add_article(type(value).__name__)}: not a JSON value")


def list_written_fields(record: object) -> list[dataclasses.Field[typing.Any]]:
    """Return the fields of a record that are written to its JSON."""
    kind: type = type(record)
    return [
        field
        for field in _get_fields(kind).values()
        if "unless_default" not in field.metadata or getattr(record, field.name) != field.default
    ]


def _check_text(text: str, path: str) -> str:
    """Return a text as a plain `str`, if UTF-8 can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CanonError(
            f"{path} holds half a surrogate pair, which UTF-8 cannot encode: {error.reason}"
        ) from None
    return str.__str__(text)  # `str` would return the name of a string enumeration's member


# ---- Reading ----


def parse(text: str | bytes) -> Json:
    """Read JSON strictly: without NaN, infinities, numbers that overflow, and repeated keys.

    Raises:
        CanonError: The text is not JSON, or not strict.
    """
    try:
        parsed: Json = json.loads(
            text,
            object_pairs_hook=_refuse_repeated_keys,
            parse_constant=_refuse_number,
            parse_float=_parse_finite_float,
        )
    except CanonError:
        raise
    # Python raises ValueError also for bytes that are not UTF-8 and for thousands of digits
    except (ValueError, RecursionError) as error:
        raise CanonError(f"not JSON: {error}") from error
    return parsed


def _refuse_repeated_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise CanonError(f"the key {repeated!r} appears twice")
    return values


def _refuse_number(token: str) -> typing.NoReturn:
    raise CanonError(f"{token} is not allowed: a record's numbers must be finite")


def _parse_finite_float(token: str) -> float:
    value = float(token)
    return value if math.isfinite(value) else _refuse_number(token)


_Record = typing.TypeVar("_Record")


def decode(kind: type[_Record], value: object, path: str = "$") -> _Record:
    """Build a record from JSON data, strictly: every field is there, none unknown, all typed.

    An int in place of a float is converted. The record then validates itself.

    Args:
        kind: Class of the record.
        value: JSON data.
        path: Path of the value, for messages.

    Raises:
        CanonError: A value is missing, unknown, or of the wrong type.
    """
    try:
        return typing.cast(_Record, _decode(kind, value, path))
    except RecursionError:  # raised by `_decode`, or by a message that shows the value
        raise CanonError(f"{path} is nested too deeply for a record") from None


_PLAIN_TYPES = (bool, int, float, str)


def _decode(kind: typing.Any, value: typing.Any, path: str) -> object:
    """Decode a value by its type annotation."""
    if (kind in _PLAIN_TYPES and type(value) is kind) or kind is object:
        return value
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise CanonError(f"{path} is an integer too large for a float") from None
    if dataclasses.is_dataclass(kind):
        return _decode_record(typing.cast(type, kind), value, path)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # `X | None`, the only union in records
        (inner,) = (arg for arg in args if arg is not type(None))
        return None if value is None else _decode(inner, value, path)
    if origin is typing.Literal:
        if value not in args or isinstance(value, bool):
            raise CanonError(f"{path} is {value!r}: must be one of {', '.join(map(repr, args))}")
        return args[args.index(value)]  # one string object for all records
    if origin is tuple:
        return _decode_tuple(args, value, path)
    if origin is dict:
        _check_type(value, dict, path, "an object")
        return {key: _decode(args[1], item, f"{path}.{key}") for key, item in value.items()}
    name = getattr(kind, "__name__", str(kind))
    raise CanonError(f"{path} is {value!r} ({type(value).__name__}): must be {name}")


def _decode_tuple(args: tuple[typing.Any, ...], value: typing.Any, path: str) -> tuple[object, ...]:
    """Decode a list of any length (`tuple[X, ...]`), or of fixed items (`tuple[X, Y]`)."""
    _check_type(value, list | tuple, path, "a list")
    if len(args) == 2 and args[1] is Ellipsis:
        if args[0] in _PLAIN_TYPES and set(map(type, value)) == {args[0]}:
            return tuple(value)
        args = args[:1] * len(value)
    elif len(args) != len(value):
        raise CanonError(f"{path} has {format_counted(len(value), 'item')}: must have {len(args)}")
    pairs = zip(args, value, strict=True)
    return tuple(_decode(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(pairs))


def _decode_record(kind: type, value: typing.Any, path: str) -> object:
    _check_type(value, dict, path, f"an object ({kind.__name__})")
    fields = _get_fields(kind)
    problems = []
    if missing := [
        name
        for name, field in fields.items()
        if name not in value and "unless_default" not in field.metadata
    ]:
        problems.append(f"lacks {', '.join(missing)}")
    if unknown := [repr(name) for name in value if name not in fields]:
        problems.append(f"has the unknown {', '.join(unknown)}")
    if problems:
        raise CanonError(f"{path} ({kind.__name__}) {' and '.join(problems)}")
    hints = _resolve_annotations(kind)
    arguments = {}
    for name, item in value.items():
        decode_field = _decode_shared if "shared" in fields[name].metadata else _decode
        arguments[name] = decode_field(hints[name], item, f"{path}.{name}")
    return kind(**arguments)


_shared: dict[tuple[object, str], object] = {}
"""Decoded values of fields with the metadata `SHARED`, by type and text."""


def _decode_shared(kind: typing.Any, value: object, path: str) -> object:
    """Return one object for all equal values of a type."""
    key = (kind, repr(value))  # the text distinguishes 1, 1.0, and True, which are equal
    if key not in _shared:
        if len(_shared) >= MAX_SHARED:
            _shared.clear()
        _shared[key] = _decode(kind, value, path)
    return _shared[key]


def _check_type(value: object, kind: typing.Any, path: str, expected: str) -> None:
    if not isinstance(value, kind):
        raise CanonError(f"{path} is {add_article(type(value).__name__)}: must be {expected}")


@functools.cache
def _get_fields(kind: type) -> dict[str, dataclasses.Field[typing.Any]]:
    """Return the fields of a record by name."""
    return {field.name: field for field in dataclasses.fields(kind)}


@functools.cache
def _resolve_annotations(kind: type) -> dict[str, typing.Any]:
    """Return the types of a record's fields. Uncached, this would be most of the decoding time."""
    return typing.get_type_hints(kind)


# ---- Files ----


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that it has either its old or its new content, also after a power cut.

    A link is followed; a device is written to, never replaced.

    Raises:
        OSError: The file cannot be written, or is a pipe or socket.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open_to_append(path) as device:
            device.write(content)
        return
    # The name has the process id, because two processes may write the same report
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that new and renamed files in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, so that all of them survive a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def hash_file(path: Path) -> str:
    """Return the sha256, in hex, of a file's content."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


# ---- Sources ----

PACKAGE_DIR = Path(__file__).parents[2]
"""Folder of `forerun`, the import package, in which the packages of the top level are linked."""
IMPORT_DIR = PACKAGE_DIR.parent
"""Folder from which `import forerun` finds it, for other processes' PYTHONPATH."""


def hash_sources() -> str:
    """Return the hash of all source files of forerun as they are here, with their paths."""
    packages = sorted(path for path in PACKAGE_DIR.iterdir() if (path / "__init__.py").is_file())
    paths = sorted(path for package in packages for path in package.rglob("*.py"))
    return compute_content_id(
        {path.relative_to(PACKAGE_DIR).as_posix(): hash_file(path) for path in paths}
    )
