"""Files as other programs write them, made here byte by byte."""

import json
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from proxies.data.document_split import READERS
from proxies.data.documents import ReaderOptions, recognise
from proxies.data.tokens import read_manifest

READING = ReaderOptions(text_key="text", vocab_size=50257, end_id=50256)


def contents(path, reading=READING):
    """What the reader of a file gives, texts as bytes and ids as lists."""
    file = recognise(path)
    given = READERS[file.format](file, reading)
    return [content if isinstance(content, bytes) else content.tolist() for content in given]


def compressed(path, content, codec):
    with pa.output_stream(path, compression=codec) as stream:
        stream.write(content)
    return path


def jsonl(texts, key="text"):
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


def parquet(path, texts, key="text", kind=None):
    pyarrow.parquet.write_table(
        pa.table({"id": list(range(len(texts))), key: pa.array(texts, type=kind)}), path
    )
    return path


def nanogpt(path, ids):
    path.write_bytes(np.array(ids, dtype="<u2").tobytes())
    return path


def llm_c(path, ids, magic=20240520, version=1, num_tokens=None):
    header = struct.pack(
        "<256i", magic, version, len(ids) if num_tokens is None else num_tokens, *[0] * 253
    )
    path.write_bytes(header + np.array(ids, dtype="<u2" if magic == 20240520 else "<u4").tobytes())
    return path


def word_tokenizer(path, specials=("<|endoftext|>",)):
    """A tokenizer.json that knows a few words."""
    words = ["[UNK]", "one", "two", "three", "red", "blue", "endoftext", "|", "<", ">"]
    added = [
        {
            "id": len(words) + i,
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
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": "[UNK]",
        },
    }
    path.write_text(json.dumps(value))
    return path


def ids_of(folder, split, source=0):
    manifest = read_manifest(folder)
    shards = getattr(manifest.sources[source], split)
    return np.concatenate(
        [np.fromfile(folder / shard.file, dtype=manifest.dtype) for shard in shards]
    )


def documents_of(folder, split, source=0):
    """The documents of a split as tuples of ids, without the end id."""
    end_id, documents = read_manifest(folder).end_id, [[]]
    for token in ids_of(folder, split, source).tolist():
        if token == end_id:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == [], "the last document has no end"
    return [tuple(document) for document in documents]


def texts_of(folder, split, source=0):
    return [bytes(document).decode() for document in documents_of(folder, split, source)]
