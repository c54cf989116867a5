import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from proxy_cases import documents, write_corpus

from proxies import canon, tokens
from proxies.documents import DataError, read_documents
from proxies.tokens import DOCUMENT_END, Manifest, TokenStore, read_manifest, tokenize


@pytest.fixture
def small(tmp_path):
    """A corpus of its own, to be damaged."""
    return write_corpus(tmp_path, num_documents=60, num_words=30, validation_fraction=0.2)


def ids_of(folder, split):
    manifest = read_manifest(folder)
    return np.concatenate([np.fromfile(folder / s.file, dtype="<u2") for s in getattr(manifest, split)])


def texts_of(folder, split):
    return bytes(ids_of(folder, split).astype(np.uint8)).rstrip(b"\0").split(b"\0")


def rewrite(folder, **changes):
    manifest = dataclasses.replace(read_manifest(folder), **changes)
    (folder / "manifest.json").write_bytes(canon.pretty(manifest))


def problem(folder):
    with pytest.raises(DataError) as caught:
        TokenStore(folder)
    return str(caught.value)


def test_the_manifest_comes_back(corpus):
    manifest = read_manifest(corpus)
    assert canon.decode(Manifest, canon.parse(canon.pretty(manifest))) == manifest
    assert manifest == TokenStore(corpus).manifest
    assert manifest.data_id == canon.content_id(manifest)
    assert (manifest.num_documents, manifest.vocab_size, manifest.dtype) == (120, 256, "uint16")
    assert 200_000 < manifest.num_tokens("train") + manifest.num_tokens("validation") < 400_000
    assert str(corpus) not in (corpus / "manifest.json").read_text()


def test_every_text_is_there_once_and_the_splits_share_none(corpus):
    train, validation = texts_of(corpus, "train"), texts_of(corpus, "validation")
    assert len(train) + len(validation) == 120
    assert {text.decode() for text in train + validation} == set(documents())
    assert not set(train) & set(validation)
    assert ids_of(corpus, "train")[-1] == DOCUMENT_END


def test_a_documents_split_does_not_depend_on_its_company(corpus, tmp_path):
    held = set(texts_of(corpus, "validation"))
    fewer = write_corpus(tmp_path, num_documents=60)
    assert set(texts_of(fewer, "validation")) == held & {text.encode() for text in documents(60)}


def test_tokenizing_again_gives_the_same_corpus_and_another_is_refused(small, tmp_path):
    before = read_manifest(small)
    assert tokenize([tmp_path / "texts"], small, validation_fraction=0.2).data_id == before.data_id
    (tmp_path / "texts" / "more.txt").write_text("one more text")
    with pytest.raises(DataError, match="holds another corpus"):
        tokenize([tmp_path / "texts"], small, validation_fraction=0.2)
    assert TokenStore(small).manifest == before


def test_identical_documents_count_once(tmp_path):
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text(f"text {number % 20}")
    (source / "blank.txt").write_text(" \n")
    # NUL marks a document's end: with or without it, this is the same text.
    (source / "nul.txt").write_bytes(b"text\0 3")
    (source / "nuls.txt").write_bytes(b"\0\0")
    manifest = tokenize([source], tmp_path / "out", validation_fraction=0.3)
    assert manifest.num_documents == 20
    found = texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "validation")
    assert sorted(found) == sorted(f"text {number}".encode() for number in range(20))


def test_folders_suffixes_and_exclusions(tmp_path):
    for name in ("a.txt", "b.md", "c.bin", "sub/d.txt", "sub/.venv/e.txt", "node_modules/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "sub" / "round").symlink_to(tmp_path)
    found = read_documents([tmp_path], (".txt", ".md"), (".venv", "node_modules"))
    assert [text.decode() for text in found] == ["a.txt", "b.md", "sub/d.txt"]
    assert len(list(read_documents([tmp_path], (".txt",)))) == 4
    assert list(read_documents([tmp_path / "c.bin"], (".txt",))) == [b"c.bin"]


def test_jsonl_gives_a_document_per_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"id": 5, "text": "zw\\u00f6lf\\n"}\n')
    assert list(read_documents([path], ())) == [b"one", "zwölf\n".encode()]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 3: not JSON"),
        ('{"text": NaN}', "line 3: NaN is not a number"),
        ('{"text": "a", "text": "b"}', "line 3: the key 'text' is there twice"),
        ('{"body": "a"}', "line 3: an object with a string `text`"),
        ('["text"]', "line 3: an object"),
        ('{"text": 5}', "line 3: an object with a string"),
        ('{"text": "\\ud83d"}', "line 3: `text` holds half a surrogate pair"),
        (b'{"text": "\xff"}', "line 3: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(DataError, match=f"a.jsonl {message}"):
        list(read_documents([path], ()))


def test_sources_that_give_nothing_are_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        tokenize([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="0 documents with text found: at least 2"):
        tokenize([tmp_path / "empty"], tmp_path / "out")
    (tmp_path / "empty" / "one.txt").write_text("one text alone")
    with pytest.raises(DataError, match="1 documents with text found: at least 2"):
        tokenize([tmp_path / "empty"], tmp_path / "out")
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(DataError, match="validation_fraction = "):
            tokenize([tmp_path / "empty"], tmp_path / "out", validation_fraction=fraction)
    assert not (tmp_path / "out").exists()


def test_progress_is_told(tmp_path):
    told = []
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(600)))
    manifest = tokenize([source], tmp_path / "out", progress=lambda *numbers: told.append(numbers))
    assert [documents for documents, _ in told] == [256, 512, 600]
    assert told[-1][1] == manifest.num_tokens("train") + manifest.num_tokens("validation")


@pytest.mark.parametrize(
    "content, message",
    [(None, "forerun tokenize"), (b"{", "is not a manifest: not JSON"), (b"{}", "is not a manifest: .* lacks")],
)
def test_a_folder_without_a_manifest_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path)


def test_a_manifest_of_another_schema_is_refused(small):
    rewrite(small, schema_version=2)
    assert "is of schema 2: this forerun reads schema 1" in problem(small)


def test_an_empty_shard_is_refused(small):
    (small / "train-00000.bin").write_bytes(b"")
    (shard,) = read_manifest(small).train
    rewrite(small, train=(dataclasses.replace(shard, num_tokens=0),))
    assert "train-00000.bin has 0 bytes" in problem(small)


def test_a_shard_cut_by_a_byte_or_grown_is_refused(small):
    path = small / "train-00000.bin"
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:-2], whole + b"\0\0", b""):
        path.write_bytes(content)
        wanted = f"train-00000.bin has {len(content)} bytes, the manifest says {len(whole)}"
        assert wanted in problem(small)
    path.write_bytes(whole)
    assert TokenStore(small).num_windows("train", 16) > 0


@pytest.mark.parametrize("place", [0, 0.5, -2])
def test_a_flipped_byte_is_refused(small, place):
    path = small / "validation-00000.bin"
    content = bytearray(path.read_bytes())
    position = int(place * len(content)) & ~1 if place == 0.5 else place
    content[position] ^= 1
    path.write_bytes(bytes(content))
    assert "validation-00000.bin does not have the manifest's hash" in problem(small)


def test_an_id_outside_the_vocabulary_is_refused_though_its_hash_is_right(small):
    path = small / "train-00000.bin"
    ids = np.fromfile(path, dtype="<u2")
    ids[7] = 256
    path.write_bytes(ids.tobytes())
    (shard,) = read_manifest(small).train
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite(small, train=(dataclasses.replace(shard, sha256=sha256, max_id=256),))
    assert "train-00000.bin holds the id 256, outside the vocabulary of 256" in problem(small)


def test_all_problems_are_said_at_once(small, monkeypatch):
    first, second = small / "train-00000.bin", small / "validation-00000.bin"
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    message = problem(small)
    assert "train-00000.bin is missing" in message and "validation-00000.bin has" in message
    assert message.endswith("run `forerun tokenize` again")


def test_every_window_comes_once_per_epoch(small):
    store, seq_len = TokenStore(small), 32
    num_windows = store.num_windows("train", seq_len)
    flat = ids_of(small, "train")
    windows = sorted(tuple(flat[i * seq_len : (i + 1) * seq_len + 1]) for i in range(num_windows))
    rows = [
        tuple(row)
        for step in range(num_windows)  # batches of two: one of them may span the epochs
        for row in store.train_batch(seed=3, step=step, num_sequences=2, seq_len=seq_len)
    ]
    first, second = rows[:num_windows], rows[num_windows:]
    assert sorted(first) == sorted(second) == windows
    assert first != second


def test_a_sequence_depends_on_its_place_in_the_run_alone(store):
    whole = store.train_batch(seed=5, step=0, num_sequences=24, seq_len=16)
    for num_sequences in (1, 3, 8):
        steps = [
            store.train_batch(seed=5, step=step, num_sequences=num_sequences, seq_len=16)
            for step in range(24 // num_sequences)
        ]
        assert np.array_equal(np.concatenate(steps), whole)
    assert whole.dtype == np.int64 and whole.shape == (24, 17)
    assert not np.array_equal(whole, store.train_batch(seed=6, step=0, num_sequences=24, seq_len=16))


def test_windows_do_not_cross_shards(tmp_path, monkeypatch):
    whole = write_corpus(tmp_path / "one", num_documents=40, num_words=30, validation_fraction=0.2)
    monkeypatch.setattr(tokens, "SHARD_TOKENS", 304)  # the last token of a shard is a target only
    folder = write_corpus(tmp_path / "many", num_documents=40, num_words=30, validation_fraction=0.2)
    store, seq_len = TokenStore(folder), 16
    shards = [np.fromfile(folder / s.file, dtype="<u2") for s in store.manifest.train]
    assert np.array_equal(np.concatenate(shards), ids_of(whole, "train"))
    assert len(shards) > 5 and all(len(shard) == 304 for shard in shards[:-1])
    inside = {
        tuple(shard[start : start + seq_len + 1])
        for shard in shards
        for start in range(0, (len(shard) - 1) // seq_len * seq_len, seq_len)
    }
    num_windows = store.num_windows("train", seq_len)
    assert num_windows == sum((len(shard) - 1) // seq_len for shard in shards)
    batch = store.train_batch(seed=0, step=0, num_sequences=num_windows, seq_len=seq_len)
    assert {tuple(row) for row in batch} == inside


def test_validation_windows_are_the_same_spread_for_everybody(store):
    batch = store.validation_batch(num_sequences=10, seq_len=16)
    assert np.array_equal(batch, store.validation_batch(num_sequences=10, seq_len=16))
    num_windows = store.num_windows("validation", 16)
    every = store.validation_batch(num_sequences=num_windows, seq_len=16)
    assert np.array_equal(batch, every[[i * num_windows // 10 for i in range(10)]])
    with pytest.raises(DataError, match=f"holds {num_windows} windows of 16 tokens, {num_windows + 1} are wanted"):
        store.validation_batch(num_sequences=num_windows + 1, seq_len=16)


def test_a_split_shorter_than_a_window_is_refused(small):
    with pytest.raises(DataError, match="shorter than one window of 1000001 tokens"):
        TokenStore(small).train_batch(seed=0, step=0, num_sequences=1, seq_len=10**6)


def test_wide_ids_are_read(small):
    for shard in (manifest := read_manifest(small)).train + manifest.validation:
        path = small / shard.file
        path.write_bytes((np.fromfile(path, dtype="<u2").astype("<u4") + 70_000).tobytes())
    widened = {
        split: tuple(
            dataclasses.replace(s, sha256=canon.file_sha256(small / s.file), max_id=s.max_id + 70_000)
            for s in getattr(manifest, split)
        )
        for split in ("train", "validation")
    }
    rewrite(small, dtype="uint32", vocab_size=70_256, **widened)
    batch = TokenStore(small).train_batch(seed=0, step=0, num_sequences=4, seq_len=8)
    assert batch.min() >= 70_000 and batch.max() < 70_256


def test_paths_are_no_part_of_the_identity(tmp_path):
    folders = [write_corpus(tmp_path / name, num_documents=20, validation_fraction=0.3) for name in ("x", "y")]
    assert len({read_manifest(folder).data_id for folder in folders}) == 1
    assert isinstance(folders[0], Path)
