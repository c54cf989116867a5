"""Cases for tests of corpora: files as other programs write them, and readers of the result.

`tokenize` reads the files and writes a corpus. The readers return what is in the corpus.
"""

import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.document_split import read_documents
from forerun._proxies.data.documents import ReaderOptions, recognize_file
from forerun._proxies.data.tokens import DataError, read_manifest

GPT2_OPTIONS = ReaderOptions(text_key="text", vocab_size=50257, end_id=50256)
GPT2_MAGIC, LLAMA_3_MAGIC = 20240520, 20240801
"""First integer of llm.c's files of GPT-2's ids (uint16) and of Llama 3's (uint32)."""


TOKENIZER_WORDS = ("[UNK]", "one", "two", "three", "red", "blue", "endoftext", "|", "<", ">")
"""Words of the tokenizer that `write_word_tokenizer` writes; the id of a word is its position."""


def get_tokenize_refusal(*arguments, **options):
    """Return the message with which `tokenize` refuses its arguments."""
    with pytest.raises(DataError) as caught:
        tokenize(*arguments, **options)
    return str(caught.value)


def list_names(folder):
    """Return the sorted names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def write_short_texts(folder):
    """Write sixty short texts into a new folder; return it."""
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"text {number}")
    return folder


def read_contents(path, options=GPT2_OPTIONS):
    """Return the documents that the reader of a file yields: texts as bytes, ids as lists."""
    return [
        content if isinstance(content, bytes) else content.tolist()
        for content in read_documents(recognize_file(path), options)
    ]


def write_compressed(path, content, codec):
    """Write a compressed file and return its path."""
    with pa.output_stream(path, compression=codec) as stream:
        stream.write(content)
    return path


def to_jsonl(texts, key="text"):
    """Return JSON lines with one text each, as bytes."""
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


def write_parquet(path, texts, key="text", kind=None):
    """Write a Parquet file with a column of ids and a column of texts; return its path.

    Args:
        key: Name of the column of texts.
        kind: Arrow type of this column; Arrow chooses it if None.
    """
    pyarrow.parquet.write_table(
        pa.table({"id": list(range(len(texts))), key: pa.array(texts, type=kind)}), path
    )
    return path


def write_nanogpt(path, ids):
    """Write token ids as nanoGPT does, without a header; return the path."""
    path.write_bytes(np.array(ids, dtype="<u2").tobytes())
    return path


def write_llm_c(path, ids, magic=GPT2_MAGIC, version=1):
    """Write token ids as llm.c does, after its header of 256 integers; return the path."""
    header = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    dtype = "<u2" if magic == GPT2_MAGIC else "<u4"
    path.write_bytes(header + np.array(ids, dtype=dtype).tobytes())
    return path


def write_word_tokenizer(path, specials=("<|endoftext|>",)):
    """Write a tokenizer.json that knows `TOKENIZER_WORDS`; return its path.

    Args:
        specials: Special tokens; their ids follow those of the words.
    """
    added = [
        {
            "id": len(TOKENIZER_WORDS) + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(specials)
    ]
    value = {
        "version": "1.0",
        # Tests check that forerun does not truncate.
        "truncation": {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(TOKENIZER_WORDS)},
            "unk_token": "[UNK]",
        },
    }
    path.write_text(json.dumps(value))
    return path


def read_split_ids(folder, split, source=0):
    """Return all token ids of a split, from its shards in order."""
    manifest = read_manifest(folder)
    shards = getattr(manifest.sources[source], split)
    return np.concatenate(
        [np.fromfile(folder / shard.file, dtype=manifest.dtype) for shard in shards]
    )


def read_split_documents(folder, split, source=0):
    """Return the documents of a split as tuples of ids, without the end id."""
    end_id, documents = read_manifest(folder).end_id, [[]]
    for token in read_split_ids(folder, split, source).tolist():
        if token == end_id:
            documents.append([])
        else:
            documents[-1].append(token)
    # An end id begins a new document, so an empty document follows the last end id.
    assert documents.pop() == [], "the last document has no end"
    return [tuple(document) for document in documents]


def read_split_texts(folder, split, source=0):
    """Return the documents of a split that was tokenized to bytes, as texts."""
    return [bytes(document).decode() for document in read_split_documents(folder, split, source)]
