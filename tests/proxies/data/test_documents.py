"""Tests of finding a corpus's files: their formats, the files left out, and splits by file name."""

import errno
import os
from pathlib import Path

import pytest
from corpus_cases import LLAMA_3_MAGIC, write_compressed, write_llm_c, write_nanogpt, write_parquet

from forerun._proxies.core import plain_files
from forerun._proxies.data import documents
from forerun._proxies.data.dataset_folder import split_by_name
from forerun._proxies.data.documents import RAW, describe_formats, find_files, recognize_file
from forerun._proxies.data.tokens import DataError


def list_paths(folder, files):
    """Return the paths of files relative to a folder."""
    return [str(file.path.relative_to(folder)) for file in files]


def test_files_are_found_by_suffix_outside_of_excluded_folders(tmp_path):
    for name in (
        "a.txt",
        "b.md",
        "c.bin",
        "d.jsonl.zst.part",
        "sub/d.txt",
        "sub/.venv/e.txt",
        "node_modules/f.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    # Links in a circle must not be followed forever.
    (tmp_path / "sub" / "circle").symlink_to(tmp_path)
    (tmp_path / "itself.txt").symlink_to(tmp_path / "itself.txt")
    files = find_files([tmp_path], (".txt", ".md"), (".venv", "node_modules")).files
    assert list_paths(tmp_path, files) == ["a.txt", "b.md", "sub/d.txt"]
    assert len(find_files([tmp_path], (".txt",)).files) == 4
    files = find_files([tmp_path / "c.bin"], (".txt",)).files
    assert list_paths(tmp_path, files) == ["c.bin"]
    files = find_files([tmp_path], (".txt",), out=tmp_path / "sub").files
    assert list_paths(tmp_path, files) == ["a.txt", "node_modules/f.txt"]


def test_formats_and_compressions_are_recognized(tmp_path):
    content = b'{"text": "a"}\n'
    # Path, format and compression
    cases = [
        (write_compressed(tmp_path / "a.jsonl.zst", content, "zstd"), "jsonl", "zstd"),
        (write_compressed(tmp_path / "a.json.gz", content, "gzip"), "jsonl", "gzip"),
        (write_compressed(tmp_path / "a.txt.zst", content, "zstd"), "text", "zstd"),
        (write_parquet(tmp_path / "a.parquet", ["a"]), "parquet", None),
        (write_parquet(tmp_path / "no_suffix", ["a"]), "parquet", None),
        (write_nanogpt(tmp_path / "train.bin", [1, 2]), "nanogpt", None),
        (write_nanogpt(tmp_path / "odd.bin", [0x8B1F, 2, 3]), "nanogpt", None),
        (write_llm_c(tmp_path / "gpt2.bin", [1]), "llm.c", None),
        (write_llm_c(tmp_path / "llama.bin", [1], magic=LLAMA_3_MAGIC, version=7), "llm.c", None),
    ]
    for name in ("a.txt", "a.jsonl", "README"):
        (tmp_path / name).write_bytes(content)
        cases.append((tmp_path / name, "jsonl" if name == "a.jsonl" else "text", None))
    for path, file_format, compression in cases:
        file = recognize_file(path)
        assert (file.format, file.num_bytes) == (file_format, path.stat().st_size), path
        # The first bytes of odd.bin look like gzip. nanoGPT's files are never decompressed.
        assert file.compression == compression or file_format == "nanogpt", path
    for name, dtype in {"train": RAW, "gpt2": "uint16", "llama": "uint32"}.items():
        assert recognize_file(tmp_path / f"{name}.bin").ids_dtype == dtype
    description = describe_formats([recognize_file(path) for path, *_ in cases[:3]])
    assert description == "1 jsonl (zstd), 1 jsonl (gzip), 1 text (zstd)"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.zst", b"", "is named .zst but does not begin as zstd does"),
        ("a.jsonl.gz", b'{"text": 1}', "is named .gz but does not begin as gzip does"),
        ("a.parquet", b"", "is named .parquet but does not begin as parquet does"),
    ],
)
def test_file_whose_content_does_not_match_its_suffix_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        recognize_file(tmp_path / name)
    assert f"{tmp_path / name} {words}" in str(caught.value)


def test_all_unusable_files_are_listed(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    (tmp_path / "b.parquet").touch()
    (tmp_path / "locked").mkdir()
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "device").symlink_to("/dev/null")

    def make_denying(function):
        """Wrap a function of a path, without permission for two paths (root may read all)."""

        def call_if_permitted(path):
            if path.name in ("c.txt", "locked"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return function(path)

        return call_if_permitted

    monkeypatch.setattr(documents, "open_plain", make_denying(plain_files.open_plain))
    monkeypatch.setattr(Path, "iterdir", make_denying(Path.iterdir))
    names = ("gone", "device", "locked", "a.parquet", "b.parquet", "c.txt")
    with pytest.raises(DataError) as caught:
        find_files([tmp_path / name for name in names], ())
    problems = caught.value.problems
    assert len(problems) == 6
    assert problems[0].endswith("gone is not a file or folder")
    assert problems[1].endswith("device cannot be read: it is a device: must be a plain file")
    assert problems[2] == f"{tmp_path / 'locked'} cannot be read: Permission denied"
    assert problems[5] == f"{tmp_path / 'c.txt'} cannot be read: Permission denied"


def test_files_of_a_folder_that_are_not_utf8_are_left_out_and_counted(tmp_path):
    """The demo reads Python's standard library, in which some modules are not UTF-8.

    If the user names such a file instead of its folder, the file is found, and its reader refuses
    it.
    """
    (tmp_path / "a.txt").write_text("all is well")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    listing = find_files([tmp_path], (".txt",))
    assert [file.path.name for file in listing.files] == ["a.txt"]
    assert [(kind.suffix, kind.num_files, kind.examples) for kind in listing.not_read] == [
        (".txt not in UTF-8", 1, ("b.txt",))
    ]
    assert len(find_files([tmp_path / "b.txt"], (".txt",)).files) == 1


def test_entries_of_a_folder_that_are_not_read_are_counted_with_examples(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    for number in range(5):
        (tmp_path / f"{number}.log").write_text("x")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    listing = find_files([tmp_path], (".txt",))
    assert [file.path.name for file in listing.files] == ["b.txt"]
    assert {kind.suffix: (kind.num_files, kind.examples) for kind in listing.not_read} == {
        ".log": (5, ("0.log", "1.log", "2.log")),
        "pipe": (1, ("a.txt",)),
        "link to nothing": (1, ("gone.txt",)),
    }


def test_files_of_other_formats_are_refused(tmp_path):
    for name in ("a.mds", "a.arrow", "a.tar"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(DataError, match="which is not read"):
            recognize_file(tmp_path / name)


def infer_splits(tmp_path, names):
    """Write files of these names into a folder; return the split that forerun infers, by name.

    The split is None if the name of a file implies none, and "card" if the file is documentation.
    """
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            write_parquet(path, ["a"])
        else:
            path.write_text("a\n")
    files = find_files([tmp_path], (".parquet", ".txt", ".md", ".py", ".jsonl")).files
    sorted_files = split_by_name(files)
    splits = {file.relative_name: file.split for file in sorted_files.files}
    splits |= {file.relative_name: "test" for file in sorted_files.test}
    splits |= {file.relative_name: "card" for file in sorted_files.cards}
    return splits


def test_splits_of_a_hugging_face_dataset_are_used_and_its_card_left_out(tmp_path):
    expected_splits = {
        "README.md": "card",
        "data/train-00000-of-00002.parquet": "train",
        "data/train-00001-of-00002.parquet": "train",
        "data/validation-00000-of-00001.parquet": "validation",
        "data/test-00000-of-00001.parquet": "test",
    }
    assert infer_splits(tmp_path, expected_splits) == expected_splits


@pytest.mark.parametrize(
    "expected_splits",
    [
        {"en/train/0.jsonl": "train", "en/dev/0.jsonl": "validation"},
        {"TinyStories-train.txt": "train", "TinyStories-valid.txt": "validation"},
        {"train-timetable.txt": None, "test-match.txt": None, "other.txt": None},
        {"train.py": None, "test.py": None, "README.md": None},
        {"a.parquet": None, "b.parquet": None},
        {
            "train.txt": "train",
            "validation.txt": "validation",
            "README.md": "card",
            "LICENSE.txt": "card",
        },
        {
            "train.jsonl": "train",
            "valid.jsonl": "validation",
            "README_de.md": "card",
            "dataset_card.md": "card",
        },
        {"citations.txt": None, "readmeter.txt": None, "a.jsonl": None},
        {"train.parquet": None, "train_2.parquet": None},
        {"dev-docs/0.jsonl": None, "math/0.jsonl": None},
        {"val.jsonl": None, "test.jsonl": None},
        {"a.py": None, "val.txt": None, "test/b.txt": None},
    ],
)
def test_only_names_of_splits_are_taken_for_splits(tmp_path, expected_splits):
    assert infer_splits(tmp_path, expected_splits) == expected_splits


@pytest.mark.parametrize(
    "expected_splits",
    [
        {"data.jsonl": "train", "val.jsonl": "validation"},
        {"data.txt": "train", "val.txt": "validation", "README.md": "card"},
        {"corpus.parquet": "train", "validation-00000-of-00001.parquet": "validation"},
        {"train.parquet": "train", "val.parquet": "validation", "more.parquet": "train"},
        {
            "data.jsonl": "train",
            "dev.parquet": "validation",
            "notes.txt": "train",
            "test.txt": "test",
        },
        {"en/wiki.txt": "train", "en/val.txt": "validation", "en/dev-docs/1.txt": "train"},
        {"books.txt": "train", "val/1.txt": "validation", "val/2.txt": "validation"},
        {"math/0.jsonl": "train", "dev/0.jsonl": "validation"},
        {"a.py": None, "notes.md": None, "x/data.jsonl": "train", "x/val.jsonl": "validation"},
        # Without a file for validation, the other files are not for training alone.
        {"data.jsonl": None, "test.jsonl": "test"},
        {"train.jsonl": None, "test.jsonl": "test"},
    ],
)
def test_files_without_a_split_are_for_training_if_another_is_for_validation(
    tmp_path, expected_splits
):
    assert infer_splits(tmp_path, expected_splits) == expected_splits
