"""Tests of the readers of token ids: nanoGPT, llm.c, Megatron-LM, NumPy and raw files."""

import gzip
import json
import os
import pickle
import struct

import numpy as np
import pytest
from corpus_cases import LLAMA_3_MAGIC, read_contents, write_llm_c, write_nanogpt

from forerun._proxies.data import pretokenized
from forerun._proxies.data.document_split import read_documents
from forerun._proxies.data.documents import ReaderOptions, recognize_file
from forerun._proxies.data.pretokenized import find_vocabulary, read_megatron
from forerun._proxies.data.tokens import DataError

END = 50256
"""Id of GPT-2's token for the end of a document."""


def get_refusal(call, *arguments):
    """Return the message of the `DataError` that a call raises."""
    with pytest.raises(DataError) as caught:
        call(*arguments)
    return str(caught.value)


def find_vocabulary_and_end(paths, vocab_size=0, end_id=None):
    """Return the vocabulary size and the end id of files.

    Args:
        vocab_size: The user's value; 0 if the user gives none.
        end_id: The user's value; None if the user gives none.
    """
    options = ReaderOptions(vocab_size=vocab_size, end_id=end_id)
    reading = find_vocabulary([recognize_file(path) for path in paths], options)
    return reading.vocab_size, reading.end_id


@pytest.mark.parametrize("write", [write_nanogpt, write_llm_c])
def test_files_are_split_into_documents_at_the_end_id(tmp_path, write):
    trailing = write(tmp_path / "trailing.bin", [1, 2, END, 3, END])
    assert read_contents(trailing) == [[1, 2, END], [3, END], []]
    # llm.c writes the end id before each document.
    leading = write(tmp_path / "leading.bin", [END, 1, 2, END, 3])
    assert read_contents(leading) == [[END], [1, 2, END], [3]]


def test_documents_do_not_depend_on_the_size_of_chunks(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 100, 5000)
    ids[rng.integers(0, 5000, 60)] = END
    path = write_nanogpt(tmp_path / "a.bin", ids)
    documents = read_contents(path)
    for num_tokens in (1, 1000):
        monkeypatch.setattr(pretokenized, "_CHUNK_TOKENS", num_tokens)
        assert read_contents(path) == documents
    assert np.concatenate(documents).tolist() == ids.tolist()


@pytest.mark.parametrize("cut", [1, 1024])
def test_truncated_file_is_refused(tmp_path, cut):
    path = write_llm_c(tmp_path / "a.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-cut])
    message = get_refusal(read_contents, path)
    assert str(path) in message and "truncated" in message


@pytest.mark.parametrize("write", [write_nanogpt, write_llm_c])
def test_id_out_of_range_is_named_with_its_position(tmp_path, monkeypatch, write):
    monkeypatch.setattr(pretokenized, "_CHUNK_TOKENS", 1000)
    ids = np.ones(2500, dtype=np.int64)
    ids[1700] = 50257
    path = write(tmp_path / "a.bin", ids)
    message = f"{path} token 1,700 is the id 50257, outside the vocabulary of 50257"
    assert message in get_refusal(read_contents, path)
    ids[1700] = 50256
    write(path, ids)
    read_contents(path)


def test_vocabulary_is_given_or_implied_by_the_format(tmp_path):
    gpt2 = write_llm_c(tmp_path / "g.bin", [1])
    llama = write_llm_c(tmp_path / "l.bin", [1], magic=LLAMA_3_MAGIC, version=7)
    raw = write_nanogpt(tmp_path / "r.bin", [1])
    assert find_vocabulary_and_end([gpt2]) == (50257, 50256)
    assert find_vocabulary_and_end([llama]) == (128_256, 128_000)
    # nanoGPT pads GPT-2's vocabulary to 50,304 entries.
    assert find_vocabulary_and_end([raw], 50304) == (50304, 50256)
    assert find_vocabulary_and_end([raw], 60_000) == (60_000, None), (
        "50256 may be a word in another vocabulary"
    )
    assert find_vocabulary_and_end([raw], 65) == (65, None)
    assert find_vocabulary_and_end([raw], 65, end_id=3) == (65, 3)
    assert find_vocabulary_and_end([gpt2], 50304, end_id=7) == (50304, 7)
    assert "holds ids and does not state its vocabulary: give --vocab-size" in get_refusal(
        find_vocabulary_and_end, [raw]
    )
    assert "hold ids of both GPT-2 and Llama 3" in get_refusal(
        find_vocabulary_and_end, [gpt2, llama]
    )
    assert "--end-id 65 is outside the vocabulary of 65" in get_refusal(
        find_vocabulary_and_end, [raw], 65, 65
    )
    message = get_refusal(find_vocabulary_and_end, [raw, gpt2], 65537)
    assert f"{raw} holds uint16 ids, 65536 at most: a vocabulary of 65537 does not fit" in message
    assert str(gpt2) in message
    assert find_vocabulary_and_end([raw], 65536)[0] == 65536


DTYPE_CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}
"""Codes of dtypes in Megatron-LM's index."""


def write_megatron(path, documents, dtype="uint16", num_parts=1):
    """Write a `.bin` file and its `.idx` as Megatron-LM's IndexedDatasetBuilder does.

    Args:
        num_parts: Number of sequences per document.
    """
    sequences = []
    for document in documents:
        sequences += [list(part) for part in np.array_split(document, num_parts)]
    sizes = np.array([len(part) for part in sequences], "<i4")
    ids = np.concatenate([np.array(part, dtype) for part in sequences] or [np.empty(0, dtype)])
    path.write_bytes(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    starts = np.arange(0, len(sequences) + 1, num_parts, dtype="<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ", 1, DTYPE_CODES[dtype], len(sequences), len(starts)
    )
    path.with_suffix(".idx").write_bytes(
        header + sizes.tobytes() + pointers.astype("<i8").tobytes() + starts.tobytes()
    )
    return path


@pytest.mark.parametrize("dtype", DTYPE_CODES)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_megatron_documents_are_those_of_the_index(tmp_path, dtype, num_parts):
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5], [6, 7, 8, 9]], dtype, num_parts)
    file = recognize_file(path)
    assert (file.format, file.ids_dtype) == ("megatron", dtype)
    reading = ReaderOptions(text_key="", vocab_size=100, end_id=None)
    documents = [document.tolist() for document in read_megatron(file, reading)]
    assert documents == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    # The end id is added to documents that do not end with it.
    reading = ReaderOptions(text_key="", vocab_size=100, end_id=9)
    documents = [document.tolist() for document in read_megatron(file, reading)]
    assert documents == [[1, 2, 3, 9], [4, 5, 9], [6, 7, 8, 9]]


def test_megatron_file_needs_a_vocabulary_that_contains_its_ids(tmp_path):
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 77]])
    assert "--vocab-size" in get_refusal(find_vocabulary_and_end, [path])
    reading = ReaderOptions(text_key="", vocab_size=50, end_id=None)
    assert f"{path} token 4 is the id 77" in get_refusal(
        lambda: list(read_megatron(recognize_file(path), reading))
    )


@pytest.mark.parametrize(
    ("damage", "words"),
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
def test_damaged_megatron_file_or_index_is_refused(tmp_path, damage, words):
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5]])
    damage(path, path.with_suffix(".idx"))
    assert words in get_refusal(recognize_file, path)


def test_file_next_to_another_kind_of_index_is_not_megatron(tmp_path):
    path = write_nanogpt(tmp_path / "a.bin", [1, 2, 3])
    path.with_suffix(".idx").write_bytes(b"something else")
    assert recognize_file(path).format == "nanogpt"
    path.with_suffix(".idx").unlink()
    os.mkfifo(path.with_suffix(".idx"))
    assert "it is a pipe" in get_refusal(recognize_file, path)


DTYPES = ("uint16", "int16", "uint32", "int32", "uint64", "int64")
"""Dtypes of raw ids that forerun detects."""
WIDE_DTYPES = DTYPES[2:]
"""Dtypes that can hold every uint16."""


def write_raw(path, ids, dtype):
    """Write token ids without a header; return the path."""
    np.array(ids).astype(dtype).tofile(path)
    return path


def read_all_ids(path, vocab_size, raw_dtype=None):
    """Return all ids of a file, given the vocabulary size and the user's dtype."""
    reading = ReaderOptions(text_key="", vocab_size=vocab_size, end_id=None, raw_dtype=raw_dtype)
    documents = list(read_documents(recognize_file(path), reading))
    return np.concatenate([np.array(document) for document in documents]).tolist()


@pytest.mark.parametrize("vocab_size", [200, 30_000, 50_257, 65_536, 151_936, 262_144])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_of_raw_ids_is_detected(tmp_path, dtype, vocab_size):
    """Every second uint16 of uint32 ids below 65,536 is 0.

    A wrong dtype once turned 20,050 such ids into 40,101 tokens.
    """
    # Ids that fit both the vocabulary and the dtype
    high = min(vocab_size, np.iinfo(dtype).max + 1)
    for num_ids in (20_050, 400_003):  # detection only samples the larger file
        ids = np.random.default_rng(0).integers(0, high, num_ids)
        path = write_raw(tmp_path / "a.bin", ids, dtype)
        # No file of uint16 has such a vocabulary; the other dtypes may hold its lower ids only.
        if high < vocab_size and dtype == "uint16":
            assert "holds uint16 ids" in get_refusal(find_vocabulary_and_end, [path], vocab_size)
        else:
            assert read_all_ids(path, vocab_size) == ids.tolist()


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_wide_id_outside_the_vocabulary_does_not_change_the_detected_dtype(tmp_path, dtype):
    """Any uint16 is inside a vocabulary of 65,536.

    A wrong dtype once turned these 20,050 ids into 40,100 tokens without an error.
    """
    ids = np.random.default_rng(0).integers(0, 65_536, 20_050)
    ids[77] = 70_000
    message = get_refusal(read_all_ids, write_raw(tmp_path / "a.bin", ids, dtype), 65_536)
    assert "token 77 is the id 70000, outside the vocabulary" in message


def test_npy_header_is_used_and_not_required(tmp_path):
    ids = np.random.default_rng(0).integers(0, 60_000, 5000)
    # OLMo's files of raw ids have the suffix .npy and no header.
    assert read_all_ids(write_raw(tmp_path / "olmo.npy", ids, "uint32"), 65_000) == ids.tolist()
    for dtype in (*WIDE_DTYPES, "uint16", ">u2", ">i4"):
        np.save(tmp_path / "a.npy", ids.astype(dtype))
        assert read_all_ids(tmp_path / "a.npy", 65_000) == ids.tolist()
    (tmp_path / "a.npy").rename(tmp_path / "a.bin")
    assert read_all_ids(tmp_path / "a.bin", 65_000) == ids.tolist()
    for array in (ids.reshape(2, -1), ids.astype(float), np.array(["a"])):
        np.save(tmp_path / "b.npy", array)
        assert "must be one row of whole numbers" in get_refusal(recognize_file, tmp_path / "b.npy")
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x01\x00")
    assert "damaged NumPy header" in get_refusal(recognize_file, tmp_path / "b.npy")


def test_ambiguous_dtype_must_be_given(tmp_path):
    for ids in ([5, 0], [0] * 5000, [7, 0, 0, 0] * 3):
        path = write_raw(tmp_path / "a.bin", ids, "uint16")
        assert "name one with --dtype" in get_refusal(read_all_ids, path, 50_257)
        assert read_all_ids(path, 50_257, "uint16") == ids
    assert "is empty" in get_refusal(read_all_ids, write_raw(tmp_path / "a.bin", [], "uint16"), 100)
    (tmp_path / "a.bin").write_bytes(b"\x01\x00\x02")
    assert "not a whole number of 2-byte ids" in get_refusal(read_all_ids, tmp_path / "a.bin", 100)
    write_raw(tmp_path / "a.bin", [1, 2, 3], "uint16")
    assert "not a whole number of 4-byte ids" in get_refusal(
        read_all_ids, tmp_path / "a.bin", 100, "uint32"
    )


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_negative_id_is_refused(tmp_path, dtype):
    """Labels to be ignored are -100, which is 4,294,967,196 as uint32."""
    path = write_raw(tmp_path / "a.bin", [5, 9, -100, 7] * 100, dtype)
    assert "token 2 is the id -100" in get_refusal(read_all_ids, path, 300, dtype)
    assert "outside the vocabulary" in get_refusal(read_all_ids, path, 300)


UNKNOWN_LLM_C_MAGIC = 278895051
"""First integer of a file that has llm.c's header but is of no kind that forerun reads."""


def make_foreign_contents(ids):
    """Return the bytes of files of other formats that contain ids, by words of the refusal."""
    content = np.array(ids, "<u2").tobytes()
    header = json.dumps(
        {"ids": {"dtype": "U16", "shape": [len(ids)], "data_offsets": [0, len(content)]}}
    ).encode()
    llm_c_header = np.zeros(256, "<i4")
    llm_c_header[:3] = UNKNOWN_LLM_C_MAGIC, 1, len(ids)
    return {
        "safetensors": struct.pack("<Q", len(header)) + header + content,
        "zip": b"PK\x03\x04" + content,
        "HDF5": b"\x89HDF\r\n\x1a\n" + content,
        "gzip": gzip.compress(content + b"\0"),
        "pickle": pickle.dumps(content),
        "litdata": np.array([1, 12, 12 + len(content)], "<u4").tobytes() + content,
        f"magic number {UNKNOWN_LLM_C_MAGIC}": llm_c_header.tobytes() + content,
        "float32": np.array(ids, "<f4").tobytes(),
        "float64": np.array(ids, "<f8").tobytes(),
        "text": b"Hello, this is a text. " * 40,
    }


@pytest.mark.parametrize("raw_dtype", [None, "uint16"])
@pytest.mark.parametrize("kind", make_foreign_contents([0]))
def test_file_of_another_format_named_bin_is_refused_by_its_format(tmp_path, kind, raw_dtype):
    ids = np.random.default_rng(0).integers(0, 50_257, 4096)
    (tmp_path / "a.bin").write_bytes(make_foreign_contents(ids)[kind])
    assert kind in get_refusal(read_all_ids, tmp_path / "a.bin", 65_536, raw_dtype)
