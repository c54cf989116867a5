"""The file that carries a fit of any kind: what it holds, under a digest that shows whether it was changed since.

`{"kind": "forerun.fit_file/1", "digest": ..., "fit": {"kind": ..., ...}}`; the digest is the sha256 of the canonical
JSON of `fit`, so white space and the order of keys do not matter. It shows accident and edit, not a forger.
"""

from __future__ import annotations

from pathlib import Path

from proxies.core import canon
from proxies.core.canon import Json

FILE_KIND = "forerun.fit_file/1"
_BARE = ("forerun.fit/", "forerun.compute_fit/", "forerun.hyperparameter_fit/")  # files before there was a digest


class FitFileError(ValueError):
    """A file that is no fit, or one of another version."""


class FitTamperedError(ValueError):
    """A fit whose content is not the one its digest names."""


def write(path: Path, fit: dict[str, Json]) -> None:
    """Write a fit, given as plain JSON data, wholly or not at all.

    Raises:
        OSError: naming the path.
    """
    content = canon.canonical({"kind": FILE_KIND, "digest": canon.content_id(fit), "fit": fit}).encode()
    try:
        canon.write_atomic(path, content)
    except OSError as error:  # a device that takes no more names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def read(path: Path) -> dict[str, Json]:
    """The fit that `write` wrote.

    Raises:
        FitFileError: the file cannot be read, is no fit, or is one of another version.
        FitTamperedError: it was changed.
    """
    try:
        data = canon.parse(path.read_bytes())
        actual = canon.content_id(data.get("fit")) if isinstance(data, dict) else ""
    except OSError as error:
        raise FitFileError(f"{path} cannot be read: {error.strerror}") from error
    except canon.CanonError as error:
        raise FitFileError(f"{path} is no fit ({error}): `forerun fit RUNS --out {path}` writes one") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(kind, str) or not kind.startswith(("forerun.fit_file/", *_BARE)):
        raise FitFileError(f"{path}: this is no fit: `forerun fit RUNS --out {path}` writes one")
    if kind.startswith(_BARE):
        raise FitFileError(
            f"{path} is of an older version, without a digest: `forerun fit RUNS --out {path}` makes it anew"
        )
    if kind != FILE_KIND:
        raise FitFileError(
            f"{path} is of another version ({kind}; this one reads {FILE_KIND}): `forerun fit RUNS --out {path}` "
            "makes it anew"
        )
    fit, digest = data.get("fit"), data.get("digest")
    if set(data) != {"kind", "digest", "fit"} or not isinstance(fit, dict):
        raise FitTamperedError(f"{path} was changed since it was written: it holds {', '.join(sorted(data))}, and a "
                               f"fit file kind, digest and fit; {_AGAIN}")  # fmt: skip
    if actual != digest:
        raise FitTamperedError(f"{path} was changed since it was written: its content has the digest "
                               f"{actual[:16]}..., the file says {str(digest)[:16]}...; {_AGAIN}")  # fmt: skip
    return fit


_AGAIN = "fit again, or take the file from where it was made"
