"""The file of a fit of any kind, and the JSON form of the fit in it.

`write_fit` and `read_fit` handle the file:
`{"kind": "forerun.fit_file/1", "digest": ..., "fit": {"kind": ..., ...}}`. The digest is the sha256
of the canonical JSON of `fit`, so white space and the order of keys do not matter. The digest
detects accidents and edits, not forgery.

`to_json` and `from_json` convert a fit to the JSON form under `fit` and back. Floats are written in
full, so reading returns the same bits. The keys are the names of the fields of the fit's classes:
renaming a field breaks the files of users.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import numpy as np

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.plain_files import read_plain
from forerun._scaling_fits.allocation.shapes import Template
from forerun._scaling_fits.forecast.posterior import LawPosterior, MergedRuns
from forerun._scaling_fits.forecast.uncertainty import FittedRuns
from forerun._scaling_fits.laws.law import LawFit
from forerun._scaling_fits.laws.solver import Floats
from forerun._scaling_fits.optima.hyperparameter_laws import HyperparameterFit
from forerun._scaling_fits.optima.optima_fit import ComputeFit

Fit = FittedRuns | ComputeFit | HyperparameterFit

FILE_KIND = "forerun.fit_file/1"
_KINDS: dict[str, type[Fit]] = {
    "forerun.fit/5": FittedRuns,
    "forerun.compute_fit/2": ComputeFit,
    "forerun.hyperparameter_fit/1": HyperparameterFit,
}
_TYPES_WITH_ARRAYS = (FittedRuns, LawFit, LawPosterior, MergedRuns)
MAX_FIT_BYTES = 2**28
"""Maximum size of a fit file in bytes; a fit with 400 refits has 0.2 MB."""
_AGAIN = "fit again, or copy the file again from where it was made"
# Suggest another name: the file in question may be the user's table of runs, which --out must not
# overwrite.
_WRITE_ONE = "`forerun fit RUNS --out fit.json` writes one, from a table of runs or a study folder"


class FitFileError(InputError):
    """The file is not a fit, or is from another version."""


class FitTamperedError(InputError):
    """The content of a fit does not match its digest."""

    exit_code = ExitCode.CORRUPT


def write_fit(path: Path, fit: dict[str, Json]) -> None:
    """Write a fit, as `to_json` returns it, atomically.

    Raises:
        OSError: The path cannot be written; the error names it.
    """
    content = canon.to_canonical_json(
        {"kind": FILE_KIND, "digest": canon.compute_content_id(fit), "fit": fit}
    ).encode()
    try:
        canon.write_atomic(path, content)
    except OSError as error:  # The error of a full device names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_harmless_to_replace(path: Path) -> bool:
    """Return whether `write_fit` would overwrite nothing but an earlier fit or an empty file."""
    if not path.is_file() or path.stat().st_size == 0:
        return True
    num_bytes = path.stat().st_size
    return num_bytes <= MAX_FIT_BYTES and FILE_KIND.partition("/")[0].encode() in read_plain(
        path, MAX_FIT_BYTES
    )


def read_fit(path: Path) -> dict[str, Json]:
    """Read a fit that `write_fit` wrote.

    Raises:
        FitFileError: The file cannot be read, is not a fit, or is from another version.
        FitTamperedError: The file was changed.
    """
    try:
        data = canon.parse(read_plain(path, MAX_FIT_BYTES))
        actual = canon.compute_content_id(data.get("fit")) if isinstance(data, dict) else ""
    except OSError as error:
        raise FitFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except canon.CanonError as error:
        raise FitFileError(f"{path} is not a fit ({error}): {_WRITE_ONE}") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not str(kind).startswith("forerun.fit_file/"):
        raise FitFileError(f"{path} is not a fit: {_WRITE_ONE}")
    if kind != FILE_KIND:
        raise FitFileError(
            f"{path} is from another version ({kind}; this one reads {FILE_KIND}): `forerun fit "
            f"RUNS --out {path}` makes it anew"
        )
    fit, digest = data.get("fit"), data.get("digest")
    if set(data) != {"kind", "digest", "fit"} or not isinstance(fit, dict):
        raise FitTamperedError(
            f"{path} was changed since it was written: it holds {', '.join(sorted(data))}, but a "
            f"fit file holds kind, digest and fit; {_AGAIN}"
        )
    if actual != digest:
        raise FitTamperedError(
            f"{path} was changed since it was written: its content has the digest "
            f"{actual[:16]}..., the file says {str(digest)[:16]}...; {_AGAIN}"
        )
    return fit


def to_json(fit: Fit, template: Template | None = None) -> dict[str, Json]:
    """Convert a fit to plain JSON data. `template` is that of the study whose ladder was fitted."""
    body = _to_plain(fit)
    assert isinstance(body, dict)
    kind = next(kind for kind, fit_type in _KINDS.items() if isinstance(fit, fit_type))
    if isinstance(fit, FittedRuns):
        body["shape_template"] = canon.to_json(template)
    return {"kind": kind, **body}


def _to_plain(value: object) -> Json:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return canon.to_json(value)


def from_json(data: Json) -> Fit:
    """Restore the fit that `to_json` converted. Raises the errors of `from_json_with_template`."""
    return from_json_with_template(data)[0]


def from_json_with_template(data: Json) -> tuple[Fit, Template | None]:
    """Restore the fit that `to_json` converted, and the shape that its study's plan fixes, if it is
    from a study.

    Raises:
        FitFileError: The data are not a fit, or are from another version.
    """
    if not isinstance(data, dict) or str(data.get("kind")) not in _KINDS:
        raise FitFileError(f"this is not a fit of this version: {_WRITE_ONE}")
    body = {name: value for name, value in data.items() if name != "kind"}
    try:
        template = body.pop("shape_template", None)
        return (
            _restore(_KINDS[str(data["kind"])], body),
            None if template is None else canon.decode(Template, template),
        )
    except (canon.CanonError, KeyError, TypeError, ValueError) as error:
        raise FitFileError(f"this fit cannot be read: {error}") from error


def _restore(kind: typing.Any, data: typing.Any) -> typing.Any:
    """Restore a value of a type. `canon.decode` knows no arrays, so arrays and the dataclasses that
    have some are restored here.
    """
    if kind == Floats:
        return np.array(data, dtype=float)
    if kind == LawPosterior | None and data is not None:
        kind = LawPosterior
    if kind not in _TYPES_WITH_ARRAYS:
        return canon.decode(kind, data)
    types = typing.get_type_hints(kind)
    return kind(**{name: _restore(types[name], value) for name, value in dict(data).items()})
