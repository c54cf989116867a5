"""Tests of the file of a fit: it keeps every bit, an edit is noticed, another version is named, and
errors name the path.
"""

import copy
import json
from pathlib import Path

import pytest

from forerun._proxies.core import canon
from forerun._scaling_fits.allocation.allocate import allocate
from forerun._scaling_fits.fit_file import (
    FILE_KIND,
    FitFileError,
    FitTamperedError,
    from_json,
    read_fit,
    to_json,
    write_fit,
)
from forerun._scaling_fits.forecast.uncertainty import predict
from forerun._scaling_fits.summary import summarize_fit

FIT = {"kind": "forerun.fit/4", "level": 0.9, "weights": [0.25, 0.75]}


def _write_changed(folder, **changes):
    """Write the fit with other indentation and some keys changed; return its path."""
    path = folder / "fit.json"
    write_fit(path, FIT)
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(data, indent=1))
    return path


def test_reformatted_file_reads_as_the_same_fit(tmp_path):
    assert read_fit(_write_changed(tmp_path)) == FIT


@pytest.mark.parametrize(
    "changes",
    [
        {"fit": FIT | {"level": 0.8}},
        {"digest": "0" * 64},
        {"more": 1},
    ],
)
def test_edited_file_is_refused(tmp_path, changes):
    path = _write_changed(tmp_path, **changes)
    with pytest.raises(
        FitTamperedError, match=r"fit\.json was changed since it was written: .*fit again"
    ):
        read_fit(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "forerun.fit/4"}, "is not a fit: `forerun fit RUNS --out"),
        ({"kind": "forerun.fit_file/9"}, f"this one reads {FILE_KIND}"),
    ],
)
def test_error_about_another_file_says_what_to_do(tmp_path, data, message):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FitFileError, match=message):
        read_fit(path)


def test_errors_name_the_path(tmp_path):
    with pytest.raises(FitFileError, match=r"gone\.json cannot be read: No such file"):
        read_fit(tmp_path / "gone.json")
    (tmp_path / "text.json").write_text("{oops")
    with pytest.raises(FitFileError, match=r"text\.json is not a fit"):
        read_fit(tmp_path / "text.json")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_fit(Path("/dev/full"), FIT)
    assert caught.value.filename == "/dev/full"


def test_fit_restored_from_json_is_bitwise_the_same(law_fit):
    text = canon.to_canonical_json(to_json(law_fit))
    restored = from_json(canon.parse(text))
    assert canon.to_canonical_json(to_json(restored)) == text
    assert predict(restored, 3e6, 3e6) == predict(law_fit, 3e6, 3e6)
    assert allocate(restored, 1e13) == allocate(law_fit, 1e13)
    assert summarize_fit(restored) == summarize_fit(law_fit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("seed"), "seed"),
        (lambda data: data["fit"].update(form="linear"), "linear"),
        (lambda data: data["posterior"]["theta"][0].pop(), "inhomogeneous"),
    ],
)
def test_inconsistent_fit_is_refused(law_fit, change, message):
    data = copy.deepcopy(json.loads(canon.to_canonical_json(to_json(law_fit))))
    change(data)
    with pytest.raises(FitFileError, match=message):
        from_json(data)
