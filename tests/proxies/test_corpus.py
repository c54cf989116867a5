import errno
import hashlib
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpus_cases import (
    documents_of,
    ids_of,
    jsonl,
    llm_c,
    nanogpt,
    texts_of,
    word_tokenizer,
)
from proxy_cases import documents, write_corpus

from proxies.core import canon
from proxies.data import corpus as corpus_module
from proxies.data import document_split, tokenizer_sample
from proxies.data.corpus import tokenize
from proxies.data.tokens import DataError, TokenStore, read_manifest

END = 50256


def refusal(*arguments, **options):
    with pytest.raises(DataError) as caught:
        tokenize(*arguments, **options)
    return str(caught.value)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def held(folder):
    return set(texts_of(folder, "validation"))


@pytest.fixture
def texts(tmp_path):
    """Sixty short texts in a folder."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"text {number}")
    return folder


def test_every_text_is_there_once_and_the_splits_share_none(corpus):
    train, validation = texts_of(corpus, "train"), texts_of(corpus, "validation")
    assert len(train) + len(validation) == 120
    assert set(train + validation) == set(documents())
    assert not set(train) & set(validation)
    assert ids_of(corpus, "train")[-1] == read_manifest(corpus).end_id == 0


def test_tokenizing_again_gives_the_same_corpus_and_another_is_refused(texts, tmp_path):
    out = tmp_path / "out"
    before = tokenize([texts], out, validation_fraction=0.2)
    (out / "train-00000.bin").write_bytes(b"damaged")
    assert tokenize([texts], out, validation_fraction=0.2) == before
    (texts / "more.txt").write_text("one more text")
    assert "holds another corpus" in refusal([texts], out, validation_fraction=0.2)
    assert TokenStore(out).manifest == before
    assert names(out) == ["manifest.json", "train-00000.bin", "validation-00000.bin"]


def test_other_text_is_refused_where_it_first_differs(tmp_path, monkeypatch):
    """The rest is never read, and a damaged shard is no other text."""
    monkeypatch.setattr(document_split, "_MAX_BATCH_BYTES", 2000)
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    lines = [f"document {number} of several" for number in range(2000)]
    source.write_bytes(jsonl(lines))
    before = tokenize([source], out, validation_fraction=0.3)
    more = [f"{line} more" for line in lines]
    for changed in (
        ["another document", *lines],
        [*lines[:1000], *more],
        [*lines, *more],
        lines[::-1],
    ):
        source.write_bytes(jsonl(changed) + b"this is no JSON\n")
        message = refusal([source], out, validation_fraction=0.3)
        assert "holds another corpus" in message and "not JSON" not in message
    source.write_bytes(jsonl(lines) + b"this is no JSON\n")
    for spoil in (lambda shard: shard.write_bytes(shard.read_bytes()[:-2] + b"zz"), Path.unlink):
        spoil(out / "train-00000.bin")
        assert "not JSON" in refusal([source], out, validation_fraction=0.3)
    source.write_bytes(jsonl(lines))
    lines_said = []
    assert tokenize([source], out, validation_fraction=0.3, say=lines_said.append) == before
    assert (
        TokenStore(out).manifest == before and "holds a corpus of 2,000 documents" in lines_said[0]
    )
    assert not any("was made from" in line for line in lines_said)
    source.write_bytes(jsonl([*lines, lines[0]]))  # nothing new
    assert (
        tokenize([source], out, validation_fraction=0.3, say=lines_said.append).data_id
        == before.data_id
    )
    assert any(f"was made from {before.source_bytes:,} bytes" in line for line in lines_said)


def test_few_texts_that_are_gone_through_twice_are_no_other_corpus(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["first", "second", "third"]))
    for fraction in (1e-5, 1 - 1e-5):
        before = tokenize(
            [tmp_path / "a.jsonl"], tmp_path / f"{fraction}", validation_fraction=fraction
        )
        again = tokenize(
            [tmp_path / "a.jsonl"], tmp_path / f"{fraction}", validation_fraction=fraction
        )
        assert again == before


def test_other_sources_or_weights_are_refused_before_a_file_is_looked_for(
    texts, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    (tmp_path / "more.jsonl").write_bytes(jsonl(f"more {number}" for number in range(40)))
    named = {"web": [texts], "code": [tmp_path / "more.jsonl"]}
    tokenize(named, out, validation_fraction=0.3, weights={"web": 3.0, "code": 1.0})
    monkeypatch.setattr(
        "proxies.data.corpus.find_files", lambda *_: pytest.fail("files were looked for")
    )
    for sources, weights in (
        (named, None),
        (named, {"web": 1.0, "code": 1.0}),
        ({"web": [texts]}, None),
        ([texts], None),
    ):
        message = refusal(sources, out, validation_fraction=0.3, weights=weights)
        assert "holds another corpus" in message


def test_another_tokenizer_is_refused_before_a_text_is_read(texts, tmp_path, monkeypatch):
    out = tmp_path / "out"
    tokenize([texts], out, validation_fraction=0.2)
    monkeypatch.setattr(
        "proxies.data.corpus.write_source", lambda *_: pytest.fail("the texts were read")
    )
    assert "holds another corpus" in refusal(
        [texts], out, validation_fraction=0.2, bpe_vocab_size=300
    )


def test_identical_documents_count_once(tmp_path):
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text(f"text {number % 20}")
    (source / "blank.txt").write_text(" \n")
    # NUL marks a document's end: with or without it, this is the same text.
    (source / "nul.jsonl").write_bytes(jsonl(["text\0 3", "\0\0"]))
    said = []
    manifest = tokenize([source], tmp_path / "out", validation_fraction=0.3, say=said.append)
    assert manifest.num_documents == 20
    found = texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "validation")
    assert sorted(found) == sorted(f"text {number}" for number in range(20))
    assert (
        said[0]
        == f"text: 41 text, 1 jsonl; {sum(f.stat().st_size for f in source.iterdir())} bytes"
    )
    assert "left out: 23 " in said[-1]


def test_sources_that_give_nothing_are_refused(tmp_path):
    assert "nowhere is not a file or folder" in refusal([tmp_path / "nowhere"], tmp_path / "out")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "0 documents with text found: of folders, files ending in .txt" in refusal(
        [empty], tmp_path / "out"
    )
    (empty / "one.txt").write_text("")
    assert "0 new documents" in refusal([empty], tmp_path / "out")
    (empty / "one.txt").write_text("one text alone")
    assert "1 new document" in refusal([empty], tmp_path / "out")
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        assert "validation_fraction = " in refusal(
            [empty], tmp_path / "out", validation_fraction=fraction
        )
    assert "no source was named" in refusal([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Tokenizers by file


def test_a_tokenizer_travels_with_its_corpus(tmp_path):
    path = word_tokenizer(tmp_path / "tokens.json")
    texts = [
        f"{a} {b} {c}"
        for a in ("one", "two")
        for b in ("red", "blue", "three")
        for c in ("one", "three")
    ]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    manifest = tokenize(
        [tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(path), validation_fraction=0.3
    )
    assert (manifest.vocab_size, manifest.dtype, manifest.end_id) == (11, "uint16", 10)
    assert manifest.tokenizer == f"sha256:{canon.file_sha256(path)}"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    words = ["[UNK]", "one", "two", "three", "red", "blue"]
    found = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "validation")
    assert sorted(" ".join(words[i] for i in document) for document in found) == sorted(texts)
    TokenStore(tmp_path / "out")


@pytest.mark.parametrize(("at", "tokenizer"), [(3, "bytes"), (2**20 + 3, "words")])
def test_text_that_is_not_utf8_is_refused(tmp_path, at, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"all is well")
    (tmp_path / "b.txt").write_bytes(b"cafe" * (at // 4) + b"caf\xe9 latin")
    path = word_tokenizer(tmp_path / "tokens.json") if tokenizer == "words" else "bytes"
    said = refusal([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", tokenizer=str(path))
    assert f"{tmp_path / 'b.txt'} is not UTF-8 text" in said and "0xe9" in said


# Pre-tokenized files


def some_ids(num_documents=80, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, END, rng.integers(3, 40)).tolist()) for _ in range(num_documents)]


@pytest.mark.parametrize(("write", "trailing"), [(nanogpt, True), (llm_c, False)])
def test_pretokenized_documents_go_whole_to_one_split(tmp_path, write, trailing):
    made = some_ids()
    given = [*made, made[0]]
    flat = [i for document in given for i in ((*document, END) if trailing else (END, *document))]
    path = write(tmp_path / "a.bin", flat)
    options = {} if write is llm_c else {"vocab_size": 50257}
    manifest = tokenize([path], tmp_path / "out", validation_fraction=0.3, **options)
    train, validation = (
        documents_of(tmp_path / "out", "train"),
        documents_of(tmp_path / "out", "validation"),
    )
    assert sorted(train + validation) == sorted(made) and len(validation) > 5
    assert (manifest.tokenizer, manifest.vocab_size, manifest.end_id) == ("unnamed", 50257, END)
    assert manifest.num_documents == 80
    TokenStore(tmp_path / "out")


def test_ids_and_text_go_together_under_the_ids_own_tokenizer(tmp_path):
    tokenizer = str(word_tokenizer(tmp_path / "tokens.json"))
    ids = nanogpt(tmp_path / "a.bin", [1, 2, 10, 3, 4, 10])
    (tmp_path / "a.jsonl").write_bytes(jsonl(["red", "blue red"]))
    given = [ids, tmp_path / "a.jsonl"]
    assert "a.bin holds ids, " in refusal(given, tmp_path / "out")
    tokenize(given, tmp_path / "out", tokenizer=tokenizer, validation_fraction=0.3)
    found = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "validation")
    assert sorted(found) == [(1, 2), (3, 4), (4,), (5, 4)]
    assert "--end-id 3: the tokenizer ends documents with 10" in refusal(
        given, tmp_path / "x", tokenizer=tokenizer, end_id=3
    )
    nanogpt(ids, [1, 11, 10])
    assert "token 1 is the id 11, outside the vocabulary of 11" in refusal(
        given, tmp_path / "x", tokenizer=tokenizer
    )


# Mixtures


def test_a_document_of_two_sources_counts_in_the_first(tmp_path):
    for name, numbers in (("web", range(40)), ("code", range(20, 70))):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(f"document {i}" for i in numbers))
    said = []
    named = {name: [tmp_path / f"{name}.jsonl"] for name in ("web", "code")}
    manifest = tokenize(named, tmp_path / "out", validation_fraction=0.2, say=said.append)
    web, code = (
        {*texts_of(tmp_path / "out", "train", i), *texts_of(tmp_path / "out", "validation", i)}
        for i in (0, 1)
    )
    assert web == {f"document {i}" for i in range(40)} and code == {
        f"document {i}" for i in range(40, 70)
    }
    assert [source.num_documents for source in manifest.sources] == [40, 30]
    assert "left out: 20 " in said[-1]
    assert {shard.file for source in manifest.sources for shard in source.train} == {
        "web-train-00000.bin",
        "code-train-00000.bin",
    }
    tokens = [source.num_tokens("train") for source in manifest.sources]
    assert manifest.weights == {"web": tokens[0] / sum(tokens), "code": tokens[1] / sum(tokens)}
    alone = {"web": named["code"], "code": named["code"]}
    assert "'code': 0 new documents" in refusal(alone, tmp_path / "x")


# Interruptions and disks


def test_a_full_disk_is_named_and_leaves_nothing(texts, tmp_path, monkeypatch):
    real = Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            self.file.close()

    def opened(path, mode="r", *arguments, **options):
        file = real(path, mode, *arguments, **options)
        return Full(file) if mode == "wb" and path.suffix == ".bin" else file

    monkeypatch.setattr(Path, "open", opened)
    said = refusal([texts], tmp_path / "out")
    assert (
        "train-00000.bin cannot be written: No space left on device" in said
        and "free some space" in said
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("before", [False, True])
def test_a_disk_that_fills_up_at_the_last_byte_leaves_what_was_there(
    texts, tmp_path, monkeypatch, before
):
    out = tmp_path / "out"
    if before:
        tokenize([texts], out)
    there = names(out) if before else None

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(canon, "write_atomic", full)
        assert "manifest.json cannot be written: No space left on device" in refusal([texts], out)
    assert names(out) == there if before else not out.exists()
    assert TokenStore(out).manifest == tokenize([texts], out) if before else tokenize([texts], out)


def test_the_manifest_comes_last(texts, tmp_path, monkeypatch):
    """Stopped after the first of the files has moved, there is no corpus; a manifest first would be
    one.
    """
    real, calls = Path.replace, []

    def stopped(path, target):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", stopped)
        tokenize([texts], tmp_path / "out")
    assert len(calls) == 2 and not (tmp_path / "out").exists()
    tokenize([texts], tmp_path / "out")


KILLED = """
import sys, time
from pathlib import Path
from proxies.data import shards
from proxies.data.corpus import tokenize
shards.SHARD_TOKENS = 50
def slow(progress):
    if progress.num_documents > 200:
        print("written", flush=True)
        time.sleep(60)
tokenize([Path(sys.argv[1])], Path(sys.argv[2]), progress=slow)
"""


def test_a_killed_run_leaves_no_corpus_and_is_replaced(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(jsonl(f"document {i} of several" * 20 for i in range(600)))
    command = [sys.executable, "-c", KILLED, str(source), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        assert "is being written by another process" in refusal([source], out)
        process.send_signal(signal.SIGKILL)
    assert names(out) == [".unfinished"]
    with pytest.raises(DataError, match="does not exist"):
        TokenStore(out)
    (out / ".unfinished" / "train-00099.bin").write_bytes(b"left")
    manifest = tokenize([source], out)
    assert TokenStore(out).manifest == manifest
    assert names(out) == ["manifest.json", "train-00000.bin", "validation-00000.bin"]


def test_files_of_somebody_else_are_not_overwritten(texts, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.md").write_text("mine")
    (out / "train-00000.bin").write_bytes(b"mine")
    assert "has no manifest.json but has train-00000.bin, which would be overwritten" in refusal(
        [texts], out
    )
    (out / "train-00000.bin").unlink()
    tokenize([texts], out)
    assert (out / "notes.md").read_text() == "mine"
    (tmp_path / "file").touch()
    assert "file is a file: name a folder with --out" in refusal([texts], tmp_path / "file")


# Put back: what docs/data.md promises and nothing else showed.


def test_a_documents_split_does_not_depend_on_its_company(corpus, tmp_path):
    fewer = write_corpus(tmp_path, num_documents=60)
    assert held(fewer) == held(corpus) & set(documents(60))


def test_a_few_documents_still_have_both_splits(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["first", "second", "third"]))
    for fraction, num_held in ((1e-5, 1), (1 - 1e-5, 2)):
        tokenize([tmp_path / "a.jsonl"], tmp_path / f"{num_held}", validation_fraction=fraction)
        assert len(held(tmp_path / f"{num_held}")) == num_held
        assert len(texts_of(tmp_path / f"{num_held}", "train")) == 3 - num_held


def test_ids_beyond_16_bits_take_wide_shards_and_long_documents_are_cut(tmp_path):
    ids = np.arange(65_536 + 10_000)
    path = llm_c(tmp_path / "llama.bin", ids, 20240801, 7)
    manifest = tokenize([path], tmp_path / "out", validation_fraction=0.3)
    assert (manifest.dtype, manifest.vocab_size, manifest.num_documents) == ("uint32", 128_256, 2)
    found = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "validation")
    assert (
        sorted(map(len, found)) == [10_000, 65_536]
        and sorted(i for each in found for i in each) == ids.tolist()
    )
    assert (
        TokenStore(tmp_path / "out")
        .train_batch(seed=0, first_sequence=0, num_sequences=1, seq_len=9)
        .max()
        < 2**17
    )


def words(folder, num_documents=60):
    """Texts of many different words."""
    folder.mkdir()
    rng = random.Random(0)
    for number in range(num_documents):
        text = " ".join("".join(rng.choices("etaoinshr", k=rng.randint(2, 9))) for _ in range(200))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def test_a_trained_tokenizer_is_in_the_corpus_and_sees_no_validation_text(tmp_path, monkeypatch):
    source = words(tmp_path / "source")
    options = {"bpe_vocab_size": 400, "validation_fraction": 0.3}
    manifest = tokenize([source], tmp_path / "a", **options)
    content = (tmp_path / "a" / "tokenizer.json").read_bytes()
    assert (manifest.vocab_size, manifest.end_id) == (400, 0)
    assert manifest.tokenizer == "sha256:" + hashlib.sha256(content).hexdigest()
    TokenStore(tmp_path / "a")
    assert tokenize([source], tmp_path / "b", **options) == manifest, "equal input gives equal ids"
    given = tokenize(
        [source],
        tmp_path / "c",
        tokenizer=str(tmp_path / "a" / "tokenizer.json"),
        validation_fraction=0.3,
    )
    assert given == manifest, "the file is a tokenizer like any other"
    seen = []
    monkeypatch.setattr(
        corpus_module, "train_bpe", lambda texts, size: seen.extend(texts) or content
    )
    tokenize([source], tmp_path / "d", **options)
    assert len(seen) == sum(1 for _ in documents_of(tmp_path / "a", "train"))
    before = list(seen)
    seen.clear()
    monkeypatch.setattr(tokenizer_sample, "MAX_SAMPLE_BYTES", sum(map(len, before)) // 2)
    tokenize([source], tmp_path / "e", **options)
    assert seen == before[-len(seen) :] and len(before) * 0.4 < len(seen) < len(before) * 0.6, (
        "a bounded sample"
    )


def test_bad_values_for_a_trained_tokenizer_are_refused_at_once(tmp_path):
    source = words(tmp_path / "source", 3)
    message = refusal(
        [source], tmp_path / "a", bpe_vocab_size=256, tokenizer="t.json", end_token="<eos>"
    )
    assert "train_bpe = 256: must be 257" in message and "262144" in message
    assert "tokenizer = t.json: give one" in message and "end_token = <eos>" in message
    assert "gives only" in refusal([source], tmp_path / "a", bpe_vocab_size=20_000)
    (tmp_path / "ids.bin").write_bytes(np.arange(1000, dtype="<u2").tobytes())
    assert "ids.bin holds token ids" in refusal(
        [tmp_path / "ids.bin"], tmp_path / "a", bpe_vocab_size=400
    )
    assert not (tmp_path / "a").exists()
