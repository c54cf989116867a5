"""The envelope of a fit on disk: an edit is seen, another version is named, and errors name the
path.
"""

import json
from pathlib import Path

import pytest

from scaling_fits.fit_file import FILE_KIND, FitFileError, FitTamperedError, read, write

FIT = {"kind": "forerun.fit/4", "level": 0.9, "weights": [0.25, 0.75]}


def _written(folder, **changes):
    path = folder / "fit.json"
    write(path, FIT)
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(data, indent=1))
    return path


def test_what_was_written_comes_back_however_it_is_laid_out(tmp_path):
    assert read(_written(tmp_path)) == FIT


@pytest.mark.parametrize(
    "changes",
    [
        {"fit": FIT | {"level": 0.8}},
        {"digest": "0" * 64},
        {"more": 1},
    ],
)
def test_an_edit_is_refused_by_name(tmp_path, changes):
    path = _written(tmp_path, **changes)
    with pytest.raises(
        FitTamperedError, match=r"fit\.json was changed since it was written: .*fit again"
    ):
        read(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"kind": "forerun.fit/4"}, "this is not a fit: `forerun fit RUNS --out"),
        ({"kind": "forerun.fit_file/9"}, f"this one reads {FILE_KIND}"),
    ],
)
def test_other_files_are_told_what_to_do(tmp_path, data, said):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FitFileError, match=said):
        read(path)


def test_errors_name_the_path(tmp_path):
    with pytest.raises(FitFileError, match=r"gone\.json cannot be read: No such file"):
        read(tmp_path / "gone.json")
    (tmp_path / "text.json").write_text("{oops")
    with pytest.raises(FitFileError, match=r"text\.json is not a fit"):
        read(tmp_path / "text.json")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(Path("/dev/full"), FIT)
    assert caught.value.filename == "/dev/full"
