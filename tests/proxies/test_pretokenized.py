import gzip
import json
import os
import pickle
import struct

import numpy as np
import pytest
from corpus_cases import contents, llm_c, nanogpt

from proxies.data import pretokenized
from proxies.data.document_split import READERS
from proxies.data.documents import ReaderOptions, recognise
from proxies.data.pretokenized import read_megatron, vocabulary_of
from proxies.data.tokens import DataError

END = 50256


def refusal(call, *arguments):
    with pytest.raises(DataError) as caught:
        call(*arguments)
    return str(caught.value)


def vocabulary(paths, vocab_size=None, end_id=None):
    return vocabulary_of([recognise(path) for path in paths], vocab_size, end_id)


@pytest.mark.parametrize("write", [nanogpt, llm_c])
def test_documents_end_at_the_end_id(tmp_path, write):
    trailing = write(tmp_path / "trailing.bin", [1, 2, END, 3, END])
    assert contents(trailing) == [[1, 2, END], [3, END], []]
    leading = write(tmp_path / "leading.bin", [END, 1, 2, END, 3])  # as llm.c puts them
    assert contents(leading) == [[END], [1, 2, END], [3]]


def test_documents_do_not_depend_on_how_the_file_is_read(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 100, 5000)
    ids[rng.integers(0, 5000, 60)] = END
    path = nanogpt(tmp_path / "a.bin", ids)
    whole = contents(path)
    for num_tokens in (1, 1000):
        monkeypatch.setattr(pretokenized, "_CHUNK_TOKENS", num_tokens)
        assert contents(path) == whole
    assert np.concatenate(whole).tolist() == ids.tolist()


@pytest.mark.parametrize("cut", [1, 1024])
def test_a_file_cut_by_bytes_is_refused(tmp_path, cut):
    path = llm_c(tmp_path / "a.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-cut])
    assert f"{path} h" in refusal(contents, path) and "truncated" in refusal(contents, path)


@pytest.mark.parametrize("write", [nanogpt, llm_c])
def test_an_id_out_of_range_is_named_with_its_place(tmp_path, monkeypatch, write):
    monkeypatch.setattr(pretokenized, "_CHUNK_TOKENS", 1000)
    ids = np.ones(2500, dtype=np.int64)
    ids[1700] = 50257
    path = write(tmp_path / "a.bin", ids)
    said = f"{path} token 1,700 is the id 50257, outside the vocabulary of 50257"
    assert said in refusal(contents, path)
    ids[1700] = 50256
    write(path, ids)
    contents(path)


def test_the_vocabulary_is_said_or_implied(tmp_path):
    gpt2, llama = llm_c(tmp_path / "g.bin", [1]), llm_c(tmp_path / "l.bin", [1], 20240801, 7)
    raw = nanogpt(tmp_path / "r.bin", [1])
    assert vocabulary([gpt2]) == (50257, 50256)
    assert vocabulary([llama]) == (128_256, 128_000)
    assert vocabulary([raw], 50304) == (50304, 50256)
    assert vocabulary([raw], 151_936 // 4) == (37_984, None), (
        "in another vocabulary 50256 is a word"
    )
    assert vocabulary([raw], 65) == (65, None)
    assert vocabulary([raw], 65, 3) == (65, 3)
    assert vocabulary([gpt2], 50304, 7) == (50304, 7)
    assert "holds ids and does not state its vocabulary: give --vocab-size" in refusal(
        vocabulary, [raw]
    )
    assert "hold ids of both GPT-2 and Llama 3" in refusal(vocabulary, [gpt2, llama])
    assert "--end-id 65 is outside the vocabulary of 65" in refusal(vocabulary, [raw], 65, 65)
    said = refusal(vocabulary, [raw, gpt2], 65537)
    assert (
        f"{raw} holds uint16 ids, 65536 at most: a vocabulary of 65537 does not fit" in said
        and str(gpt2) in said
    )
    assert vocabulary([raw], 65536)[0] == 65536


CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def megatron(path, documents, dtype="uint16", split=1):
    """A `.bin` and its `.idx` as Megatron-LM's IndexedDatasetBuilder writes them; documents of
    `split` sequences.
    """
    sequences = [list(part) for document in documents for part in np.array_split(document, split)]
    sizes = np.array([len(part) for part in sequences], "<i4")
    ids = np.concatenate([np.array(part, dtype) for part in sequences] or [np.empty(0, dtype)])
    path.write_bytes(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    starts = np.arange(0, len(sequences) + 1, split, dtype="<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(starts))
    path.with_suffix(".idx").write_bytes(
        head + sizes.tobytes() + pointers.astype("<i8").tobytes() + starts.tobytes()
    )
    return path


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("split", [1, 2])
def test_megatrons_documents_are_those_of_its_index(tmp_path, dtype, split):
    path = megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5], [6, 7, 8, 9]], dtype, split)
    file = recognise(path)
    assert (file.format, file.ids_dtype) == ("megatron", dtype)
    reading = ReaderOptions(text_key="", vocab_size=100, end_id=None)
    found = [document.tolist() for document in read_megatron(file, reading)]
    assert found == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    ended = ReaderOptions(text_key="", vocab_size=100, end_id=9)
    assert [d.tolist() for d in read_megatron(file, ended)] == [
        [1, 2, 3, 9],
        [4, 5, 9],
        [6, 7, 8, 9],
    ]


def test_megatrons_files_need_a_vocabulary_and_ids_inside_it(tmp_path):
    path = megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 77]])
    assert "--vocab-size" in refusal(vocabulary, [path])
    reading = ReaderOptions(text_key="", vocab_size=50, end_id=None)
    assert f"{path} token 4 is the id 77" in refusal(
        lambda: list(read_megatron(recognise(path), reading))
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda bin_, idx: bin_.write_bytes(bin_.read_bytes()[:-2]), "truncated"),
        (lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:-9]), "truncated or damaged"),
        (lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:20]), "truncated"),
        (
            lambda bin_, idx: idx.write_bytes(b"MMIDIDX\x00\x00\x02" + idx.read_bytes()[10:]),
            "version 2",
        ),
        (
            lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:-8] + b"\x07" + b"\x00" * 7),
            "damaged",
        ),
    ],
    ids=["bin cut", "index cut", "header cut", "version", "documents"],
)
def test_a_damaged_index_is_refused(tmp_path, damage, said):
    path = megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5]])
    damage(path, path.with_suffix(".idx"))
    assert said in refusal(recognise, path)


def test_a_bin_beside_another_kind_of_index_is_what_it_was(tmp_path):
    path = nanogpt(tmp_path / "a.bin", [1, 2, 3])
    path.with_suffix(".idx").write_bytes(b"something else")
    assert recognise(path).format == "nanogpt"
    path.with_suffix(".idx").write_bytes(b"TNTIDX\x00\x00")
    assert "index of fairseq" in refusal(recognise, path)
    path.with_suffix(".idx").unlink()
    os.mkfifo(path.with_suffix(".idx"))
    assert "it is a pipe" in refusal(recognise, path)


WIDTHS = ("uint16", "int16", "uint32", "int32", "uint64", "int64")


def raw(path, ids, dtype):
    np.array(ids).astype(dtype).tofile(path)
    return path


def documents_read(path, vocab_size, raw_dtype=None):
    reading = ReaderOptions(text_key="", vocab_size=vocab_size, end_id=None, raw_dtype=raw_dtype)
    file = recognise(path)
    return np.concatenate(
        [np.array(document) for document in READERS[file.format](file, reading)]
    ).tolist()


@pytest.mark.parametrize("vocab_size", [200, 30_000, 50_257, 65_536, 151_936, 262_144])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_raw_ids_of_any_width_are_read_as_what_they_are(tmp_path, dtype, vocab_size):
    """Every second uint16 of uint32 ids below 65,536 is 0: 20,050 ids were read as 40,101
    tokens.
    """
    high = min(vocab_size, np.iinfo(dtype).max + 1)
    for num_ids in (20_050, 400_003):  # the second is looked at in samples
        ids = np.random.default_rng(0).integers(0, high, num_ids)
        path = raw(tmp_path / "a.bin", ids, dtype)
        if high < vocab_size and dtype == "uint16":
            assert "holds uint16 ids" in refusal(vocabulary, [path], vocab_size)
        else:
            assert documents_read(path, vocab_size) == ids.tolist()


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_a_damaged_wide_id_does_not_make_all_ids_narrow(tmp_path, dtype):
    """Any uint16 is inside a vocabulary of 65,536: 20,050 ids were read as 40,100 tokens without an
    error.
    """
    ids = np.random.default_rng(0).integers(0, 65_536, 20_050)
    ids[77] = 70_000
    refused = refusal(documents_read, raw(tmp_path / "a.bin", ids, dtype), 65_536)
    assert "token 77 is the id 70000, outside the vocabulary" in refused


def test_ids_without_a_header_may_be_named_npy_and_those_with_one_are_read_by_it(tmp_path):
    ids = np.random.default_rng(0).integers(0, 60_000, 5000)
    assert documents_read(raw(tmp_path / "olmo.npy", ids, "uint32"), 65_000) == ids.tolist()
    for dtype in (*WIDTHS[2:], "uint16", ">u2", ">i4"):
        np.save(tmp_path / "a.npy", ids.astype(dtype))
        assert documents_read(tmp_path / "a.npy", 65_000) == ids.tolist()
    (tmp_path / "a.npy").rename(tmp_path / "a.bin")
    assert "begins as NumPy's .npy does" in refusal(recognise, tmp_path / "a.bin")
    for array in (ids.reshape(2, -1), ids.astype(float), np.array(["a"])):
        np.save(tmp_path / "b.npy", array)
        assert "must be one row of whole numbers" in refusal(recognise, tmp_path / "b.npy")
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x01\x00")
    assert "damaged NumPy header" in refusal(recognise, tmp_path / "b.npy")


def test_what_has_more_than_one_reading_is_refused_until_a_person_names_one(tmp_path):
    for ids in ([5, 0], [0] * 5000, [7, 0, 0, 0] * 3):
        path = raw(tmp_path / "a.bin", ids, "uint16")
        assert "name one with --dtype" in refusal(documents_read, path, 50_257)
        assert documents_read(path, 50_257, "uint16") == ids
    assert "is empty" in refusal(documents_read, raw(tmp_path / "a.bin", [], "uint16"), 100)
    (tmp_path / "a.bin").write_bytes(b"\x01\x00\x02")
    assert "not a whole number of 2-byte ids" in refusal(documents_read, tmp_path / "a.bin", 100)
    raw(tmp_path / "a.bin", [1, 2, 3], "uint16")
    assert "not a whole number of 4-byte ids" in refusal(
        documents_read, tmp_path / "a.bin", 100, "uint32"
    )


@pytest.mark.parametrize("dtype", [">u2", ">u4", ">i8"])
def test_big_endian_ids_are_refused_by_name(tmp_path, dtype):
    path = raw(tmp_path / "a.bin", np.random.default_rng(0).integers(0, 50_257, 4096), dtype)
    assert "big-endian" in refusal(documents_read, path, 50_257)


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_a_negative_id_is_no_token(tmp_path, dtype):
    """-100 marks labels that count for nothing; as uint32 it would be 4,294,967,196."""
    path = raw(tmp_path / "a.bin", [5, 9, -100, 7] * 100, dtype)
    assert "token 2 is the id -100" in refusal(documents_read, path, 300, dtype)
    assert "outside the vocabulary" in refusal(documents_read, path, 300)


def _container(kind, ids):
    """Return a file of another format around ids, and a word of its refusal."""
    content = np.array(ids, "<u2").tobytes()
    header = json.dumps(
        {"ids": {"dtype": "U16", "shape": [len(ids)], "data_offsets": [0, len(content)]}}
    ).encode()
    llm_c_header = np.zeros(256, "<i4")
    llm_c_header[:3] = 278895051, 1, len(ids)
    return {
        "safetensors": struct.pack("<Q", len(header)) + header + content,
        "zip": b"PK\x03\x04" + content,
        "HDF5": b"\x89HDF\r\n\x1a\n" + content,
        "gzip": gzip.compress(content + b"\0"),
        "pickle": pickle.dumps(content),
        "litdata": np.array([1, 12, 12 + len(content)], "<u4").tobytes() + content,
        "magic number 278895051": llm_c_header.tobytes() + content,
        "float32": np.array(ids, "<f4").tobytes(),
        "float64": np.array(ids, "<f8").tobytes(),
        "text": b"Hello, this is no row of ids. " * 40,
    }[kind]


@pytest.mark.parametrize("asked", [None, "uint16"])
@pytest.mark.parametrize(
    "kind",
    [
        "safetensors",
        "zip",
        "HDF5",
        "gzip",
        "pickle",
        "litdata",
        "magic number 278895051",
        "float32",
        "float64",
        "text",
    ],
)
def test_a_file_of_another_format_named_bin_is_refused_by_name(tmp_path, kind, asked):
    ids = np.random.default_rng(0).integers(0, 50_257, 4096)
    (tmp_path / "a.bin").write_bytes(_container(kind, ids))
    assert kind in refusal(documents_read, tmp_path / "a.bin", 65_536, asked)
