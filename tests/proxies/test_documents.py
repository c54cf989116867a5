import errno
import gzip
import json
import os
import struct
from pathlib import Path

import pytest
from corpus_cases import compressed, llm_c, nanogpt, parquet

from proxies.core import plain_files
from proxies.data import documents
from proxies.data.dataset_folder import split_by_name
from proxies.data.documents import RAW, find_files, recognise, told
from proxies.data.tokens import DataError


def names(folder, found):
    return [str(file.path.relative_to(folder)) for file in found]


def test_folders_suffixes_and_exclusions(tmp_path):
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
    (tmp_path / "sub" / "round").symlink_to(tmp_path)
    (tmp_path / "itself.txt").symlink_to(tmp_path / "itself.txt")
    found = find_files([tmp_path], (".txt", ".md"), (".venv", "node_modules")).files
    assert names(tmp_path, found) == ["a.txt", "b.md", "sub/d.txt"]
    assert len(find_files([tmp_path], (".txt",)).files) == 4
    assert names(tmp_path, find_files([tmp_path / "c.bin"], (".txt",)).files) == ["c.bin"]
    assert names(tmp_path, find_files([tmp_path], (".txt",), out=tmp_path / "sub").files) == [
        "a.txt",
        "node_modules/f.txt",
    ]


def test_kinds_are_told_apart(tmp_path):
    content = b'{"text": "a"}\n'
    made = [
        (compressed(tmp_path / "a.jsonl.zst", content, "zstd"), "jsonl", "zstd"),
        (compressed(tmp_path / "a.json.gz", content, "gzip"), "jsonl", "gzip"),
        (compressed(tmp_path / "a.txt.zst", content, "zstd"), "text", "zstd"),
        (parquet(tmp_path / "a.parquet", ["a"]), "parquet", None),
        (parquet(tmp_path / "no_suffix", ["a"]), "parquet", None),
        (nanogpt(tmp_path / "train.bin", [1, 2]), "nanogpt", None),
        (nanogpt(tmp_path / "odd.bin", [0x8B1F, 2, 3]), "nanogpt", None),
        (llm_c(tmp_path / "gpt2.bin", [1]), "llm.c", None),
        (llm_c(tmp_path / "llama.bin", [1], 20240801, 7), "llm.c", None),
    ]
    for name in ("a.txt", "a.jsonl", "README"):
        (tmp_path / name).write_bytes(content)
        made.append((tmp_path / name, "jsonl" if name == "a.jsonl" else "text", None))
    for path, kind, compression in made:
        file = recognise(path)
        assert (file.format, file.num_bytes) == (kind, path.stat().st_size), path
        assert file.compression == compression or kind == "nanogpt", path
    assert [
        recognise(tmp_path / f"{name}.bin").ids_dtype for name in ("train", "gpt2", "llama")
    ] == [
        RAW,
        "uint16",
        "uint32",
    ]
    assert (
        told([recognise(path) for path, *_ in made[:3]])
        == "1 jsonl (zstd), 1 jsonl (gzip), 1 text (zstd)"
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl.zst", b"", "is named .zst but does not begin as zstd does"),
        ("a.jsonl.gz", b'{"text": 1}', "is named .gz but does not begin as gzip does"),
        ("a.parquet", b"", "is named .parquet but does not begin as parquet does"),
        (
            "a.bin",
            struct.pack("<256i", 20240522, 1, *[0] * 254),
            "is an evaluation file of llm.c (magic 20240522)",
        ),
        (
            "a.bin.gz",
            gzip.compress(b"1234", mtime=0),
            "is a compressed .bin file, which is not read: decompress it",
        ),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        recognise(tmp_path / name)
    assert f"{tmp_path / name} {said}" in str(caught.value)


def test_every_file_that_cannot_be_used_is_said_at_once(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    (tmp_path / "b.parquet").touch()
    (tmp_path / "locked").mkdir()
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "pipe").symlink_to("/dev/null")
    opened, listed = plain_files.open_plain, Path.iterdir

    def deny(call):
        def denying(path):
            if path.name in ("c.txt", "locked"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path)

        return denying

    monkeypatch.setattr(documents, "open_plain", deny(opened))
    monkeypatch.setattr(Path, "iterdir", deny(listed))
    given = [
        tmp_path / name for name in ("gone", "pipe", "locked", "a.parquet", "b.parquet", "c.txt")
    ]
    with pytest.raises(DataError) as caught:
        find_files(given, ())
    problems = caught.value.problems
    assert len(problems) == 6
    assert problems[0].endswith("gone is not a file or folder") and problems[1].endswith(
        "pipe cannot be read: it is a device: must be a plain file"
    )
    assert problems[2] == f"{tmp_path / 'locked'} cannot be read: Permission denied"
    assert problems[5] == f"{tmp_path / 'c.txt'} cannot be read: Permission denied"


def test_a_file_of_a_folder_that_is_no_utf8_is_left_out_and_counted(tmp_path):
    """As some modules of Python are, which the demo reads; one that was named itself its reader
    refuses.
    """
    (tmp_path / "a.txt").write_text("all is well")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    listing = find_files([tmp_path], (".txt",))
    assert [file.path.name for file in listing.files] == ["a.txt"]
    assert [(kind.suffix, kind.num_files, kind.examples) for kind in listing.not_read] == [
        (".txt not in UTF-8", 1, ("b.txt",))
    ]
    assert len(find_files([tmp_path / "b.txt"], (".txt",)).files) == 1


def test_what_is_no_file_in_a_folder_is_counted_and_names_are_shown(tmp_path):
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


def test_chunks_of_other_formats_are_refused_by_name(tmp_path):
    nanogpt(tmp_path / "chunk-0-0.bin", [1, 2])
    for key, name in (("chunks", "litdata"), ("shards", "MosaicML's MDS")):
        (tmp_path / "index.json").write_text(json.dumps({key: [], "config": {}}))
        with pytest.raises(DataError, match=f"is a chunk of {name}"):
            recognise(tmp_path / "chunk-0-0.bin")
    (tmp_path / "index.json").write_text('{"other": 1}')
    assert recognise(tmp_path / "chunk-0-0.bin").format == "nanogpt"
    for name in ("a.mds", "a.arrow", "a.tar"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(DataError, match="which is not read"):
            recognise(tmp_path / name)


def kinds_of(tmp_path, names):
    """Write files of these names below a folder, and sort them by their splits."""
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            parquet(path, ["a"])
        else:
            path.write_text("a\n")
    sorted_files = split_by_name(
        find_files([tmp_path], (".parquet", ".txt", ".md", ".py", ".jsonl")).files
    )
    of = {file.relative_name: file.split for file in sorted_files.files}
    return (
        of
        | {f.relative_name: "test" for f in sorted_files.test}
        | {f.relative_name: "card" for f in sorted_files.cards}
    )


def test_the_splits_of_a_dataset_folder_are_honored_and_its_card_is_none_of_it(tmp_path):
    hub = {
        "README.md": "card",
        "data/train-00000-of-00002.parquet": "train",
        "data/train-00001-of-00002.parquet": "train",
        "data/validation-00000-of-00001.parquet": "validation",
        "data/test-00000-of-00001.parquet": "test",
    }
    assert kinds_of(tmp_path, hub) == hub


@pytest.mark.parametrize(
    "names",
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
def test_names_that_are_no_splits_are_left_alone(tmp_path, names):
    assert kinds_of(tmp_path, names) == names


@pytest.mark.parametrize(
    "names",
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
        {"en/wiki.txt": "train", "en/wiki-val.txt": "validation", "en/other.txt": "train"},
        {"books.txt": "train", "val/1.txt": "validation", "val/2.txt": "validation"},
        {"math/0.jsonl": "train", "dev/0.jsonl": "validation"},
        {"a.py": None, "notes.md": None, "x/data.jsonl": "train", "x/val.jsonl": "validation"},
        {"data.jsonl": None, "test.jsonl": "test"},
        {"train.jsonl": None, "test.jsonl": "test"},
    ],
)
def test_a_file_without_a_splits_name_is_for_training_beside_one_for_validation(tmp_path, names):
    assert kinds_of(tmp_path, names) == names
