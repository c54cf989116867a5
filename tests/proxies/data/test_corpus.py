"""Tests of `tokenize`: documents become a corpus, once each, split by their content.

They cover repeated writing, users' and trained tokenizers, files of token ids, and mixtures of
sources. Writing that is interrupted has a file of its own, test_corpus_interruptions.py.
"""

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
from corpus_cases import (
    LLAMA_3_MAGIC,
    TOKENIZER_WORDS,
    get_tokenize_refusal,
    list_names,
    read_split_documents,
    read_split_ids,
    read_split_texts,
    to_jsonl,
    write_llm_c,
    write_nanogpt,
    write_short_texts,
    write_word_tokenizer,
)
from proxy_cases import generate_documents, write_corpus

from forerun._proxies.core import canon
from forerun._proxies.data import corpus as corpus_module
from forerun._proxies.data import pretokenized, tokenizer_sample
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.documents import ReaderOptions
from forerun._proxies.data.tokens import TokenStore, read_manifest

END = 50256
"""Id of GPT-2's token for the end of a document."""


def read_validation_texts(folder):
    """Return the set of texts in the validation split."""
    return set(read_split_texts(folder, "validation"))


def read_all_documents(folder):
    """Return the documents of both splits as tuples of ids."""
    return read_split_documents(folder, "train") + read_split_documents(folder, "validation")


def read_all_texts(folder, source=0):
    """Return the documents of both splits as texts."""
    train = read_split_texts(folder, "train", source)
    return train + read_split_texts(folder, "validation", source)


@pytest.fixture
def texts_dir(tmp_path):
    """Folder of sixty short texts."""
    return write_short_texts(tmp_path / "texts")


def test_every_text_is_in_exactly_one_split(corpus):
    train, validation = read_split_texts(corpus, "train"), read_split_texts(corpus, "validation")
    assert len(train) + len(validation) == 120
    assert set(train + validation) == set(generate_documents())
    assert not set(train) & set(validation)
    assert read_split_ids(corpus, "train")[-1] == read_manifest(corpus).end_id == 0


def test_tokenizing_again_restores_the_corpus_and_refuses_other_texts(texts_dir, tmp_path):
    out = tmp_path / "out"
    before = tokenize([texts_dir], out, validation_fraction=0.2)
    (out / "train-00000.bin").write_bytes(b"damaged")
    assert tokenize([texts_dir], out, validation_fraction=0.2) == before
    (texts_dir / "more.txt").write_text("one more text")
    assert "holds another corpus" in get_tokenize_refusal([texts_dir], out, validation_fraction=0.2)
    assert TokenStore(out).manifest == before
    assert list_names(out) == ["manifest.json", "train-00000.bin", "validation-00000.bin"]


def test_damaged_shard_is_repaired_and_other_text_of_the_same_size_refused(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    lines = [f"document {number} of several" for number in range(2000)]
    source.write_bytes(to_jsonl(lines))
    before = tokenize([source], out, validation_fraction=0.3)
    for damage in (lambda shard: shard.write_bytes(shard.read_bytes()[:-2] + b"zz"), Path.unlink):
        damage(out / "train-00000.bin")
        assert tokenize([source], out, validation_fraction=0.3) == before
        assert TokenStore(out).manifest == before
    source.write_bytes(to_jsonl(lines[::-1]))
    assert "holds another corpus" in get_tokenize_refusal([source], out, validation_fraction=0.3)
    source.write_bytes(to_jsonl([*lines, "more"]))
    message = get_tokenize_refusal([source], out, validation_fraction=0.3)
    assert f"with source_bytes {before.source_bytes}, not " in message
    assert TokenStore(out).manifest == before


def test_tokenizing_few_texts_again_gives_the_same_corpus(tmp_path):
    """One split would be empty at these fractions, so `tokenize` reads the texts twice."""
    (tmp_path / "a.jsonl").write_bytes(to_jsonl(["first", "second", "third"]))
    for fraction in (1e-5, 1 - 1e-5):
        out = tmp_path / f"{fraction}"
        before = tokenize([tmp_path / "a.jsonl"], out, validation_fraction=fraction)
        assert tokenize([tmp_path / "a.jsonl"], out, validation_fraction=fraction) == before


def test_other_sources_or_weights_are_refused_before_reading(texts_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    (tmp_path / "more.jsonl").write_bytes(to_jsonl(f"more {number}" for number in range(40)))
    named = {"web": [texts_dir], "code": [tmp_path / "more.jsonl"]}
    tokenize(named, out, validation_fraction=0.3, weights={"web": 3.0, "code": 1.0})
    monkeypatch.setattr(
        "forerun._proxies.data.corpus.write_source", lambda *_: pytest.fail("the texts were read")
    )
    for sources, weights in (
        (named, None),
        (named, {"web": 1.0, "code": 1.0}),
        ({"web": [texts_dir]}, None),
        ([texts_dir], None),
    ):
        message = get_tokenize_refusal(sources, out, validation_fraction=0.3, weights=weights)
        assert "holds another corpus" in message


def test_other_tokenizer_is_refused_before_reading(texts_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    tokenize([texts_dir], out, validation_fraction=0.2)
    monkeypatch.setattr(
        "forerun._proxies.data.corpus.write_source", lambda *_: pytest.fail("the texts were read")
    )
    assert "holds another corpus" in get_tokenize_refusal(
        [texts_dir], out, validation_fraction=0.2, bpe_vocab_size=300
    )


def test_identical_documents_count_once(tmp_path):
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text(f"text {number % 20}")
    (source / "blank.txt").write_text(" \n")
    # NUL marks the end of a document and is dropped from texts, so these are no new documents.
    (source / "nul.jsonl").write_bytes(to_jsonl(["text\0 3", "\0\0"]))
    lines = []
    manifest = tokenize([source], tmp_path / "out", validation_fraction=0.3, say=lines.append)
    assert manifest.num_documents == 20
    texts = read_all_texts(tmp_path / "out")
    assert sorted(texts) == sorted(f"text {number}" for number in range(20))
    num_bytes = sum(file.stat().st_size for file in source.iterdir())
    assert lines[0] == f"text: 41 text, 1 jsonl; {num_bytes} bytes"
    # 20 repeated texts, the blank one, and both of nul.jsonl
    assert "left out: 23 " in lines[-1]


def test_sources_without_enough_documents_are_refused(tmp_path):
    assert "nowhere is not a file or folder" in get_tokenize_refusal(
        [tmp_path / "nowhere"], tmp_path / "out"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "0 documents with text found: of folders, files ending in .txt" in get_tokenize_refusal(
        [empty], tmp_path / "out"
    )
    (empty / "one.txt").write_text("")
    assert "0 new documents" in get_tokenize_refusal([empty], tmp_path / "out")
    (empty / "one.txt").write_text("one text alone")
    assert "1 new document" in get_tokenize_refusal([empty], tmp_path / "out")
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        assert "validation_fraction = " in get_tokenize_refusal(
            [empty], tmp_path / "out", validation_fraction=fraction
        )
    assert "no source was named" in get_tokenize_refusal([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- Users' tokenizers ----


def test_tokenizer_is_copied_into_the_corpus(tmp_path):
    path = write_word_tokenizer(tmp_path / "tokens.json")
    texts = [
        f"{a} {b} {c}"
        for a in ("one", "two")
        for b in ("red", "blue", "three")
        for c in ("one", "three")
    ]
    (tmp_path / "a.jsonl").write_bytes(to_jsonl(texts))
    manifest = tokenize(
        [tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(path), validation_fraction=0.3
    )
    # The end token follows the words.
    end_id = len(TOKENIZER_WORDS)
    assert (manifest.vocab_size, manifest.dtype, manifest.end_id) == (end_id + 1, "uint16", end_id)
    assert manifest.tokenizer == f"sha256:{canon.hash_file(path)}"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    documents = read_all_documents(tmp_path / "out")
    decoded = [" ".join(TOKENIZER_WORDS[i] for i in document) for document in documents]
    assert sorted(decoded) == sorted(texts)
    TokenStore(tmp_path / "out")


@pytest.mark.parametrize(("position", "tokenizer"), [(3, "bytes"), (2**20 + 3, "words")])
def test_text_that_is_not_utf8_is_refused(tmp_path, position, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"all is well")
    # Files are read in pieces, so the bad byte is in the first piece or in a later one.
    (tmp_path / "b.txt").write_bytes(b"cafe" * (position // 4) + b"caf\xe9 latin")
    path = write_word_tokenizer(tmp_path / "tokens.json") if tokenizer == "words" else "bytes"
    sources = [tmp_path / "a.txt", tmp_path / "b.txt"]
    message = get_tokenize_refusal(sources, tmp_path / "out", tokenizer=str(path))
    assert f"{tmp_path / 'b.txt'} is not UTF-8 text" in message and "0xe9" in message


# ---- Files of token ids ----


def draw_documents():
    """Draw 80 documents of 3 to 39 token ids."""
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, END, rng.integers(3, 40)).tolist()) for _ in range(80)]


@pytest.mark.parametrize(("write", "is_end_last"), [(write_nanogpt, True), (write_llm_c, False)])
def test_documents_of_ids_are_not_cut_by_the_split(tmp_path, write, is_end_last):
    documents = draw_documents()
    ids = []
    for document in [*documents, documents[0]]:  # one document twice
        ids += (*document, END) if is_end_last else (END, *document)
    path = write(tmp_path / "a.bin", ids)
    reading = ReaderOptions(vocab_size=0 if write is write_llm_c else 50257)
    manifest = tokenize([path], tmp_path / "out", validation_fraction=0.3, reading=reading)
    assert sorted(read_all_documents(tmp_path / "out")) == sorted(documents)
    assert len(read_split_documents(tmp_path / "out", "validation")) > 5
    assert (manifest.tokenizer, manifest.vocab_size, manifest.end_id) == ("unnamed", 50257, END)
    assert manifest.num_documents == 80
    TokenStore(tmp_path / "out")


def test_ids_and_text_are_mixed_if_the_tokenizer_is_given(tmp_path):
    tokenizer = str(write_word_tokenizer(tmp_path / "tokens.json"))
    # The id 10 is the end token of this tokenizer, and 4 and 5 are "red" and "blue".
    ids = write_nanogpt(tmp_path / "a.bin", [1, 2, 10, 3, 4, 10])
    (tmp_path / "a.jsonl").write_bytes(to_jsonl(["red", "blue red"]))
    sources = [ids, tmp_path / "a.jsonl"]
    assert "a.bin holds ids, " in get_tokenize_refusal(sources, tmp_path / "out")
    tokenize(sources, tmp_path / "out", tokenizer=tokenizer, validation_fraction=0.3)
    assert sorted(read_all_documents(tmp_path / "out")) == [(1, 2), (3, 4), (4,), (5, 4)]
    assert "--end-id 3: the tokenizer ends documents with 10" in get_tokenize_refusal(
        sources, tmp_path / "x", tokenizer=tokenizer, reading=ReaderOptions(end_id=3)
    )
    write_nanogpt(ids, [1, 11, 10])
    assert "token 1 is the id 11, outside the vocabulary of 11" in get_tokenize_refusal(
        sources, tmp_path / "x", tokenizer=tokenizer
    )


# ---- Mixtures ----


def test_document_of_two_sources_counts_in_the_first(tmp_path):
    for name, numbers in (("web", range(40)), ("code", range(20, 70))):
        (tmp_path / f"{name}.jsonl").write_bytes(to_jsonl(f"document {i}" for i in numbers))
    lines = []
    sources = {name: [tmp_path / f"{name}.jsonl"] for name in ("web", "code")}
    manifest = tokenize(sources, tmp_path / "out", validation_fraction=0.2, say=lines.append)
    web_texts = read_all_texts(tmp_path / "out", source=0)
    code_texts = read_all_texts(tmp_path / "out", source=1)
    assert set(web_texts) == {f"document {i}" for i in range(40)}
    assert set(code_texts) == {f"document {i}" for i in range(40, 70)}
    assert [source.num_documents for source in manifest.sources] == [40, 30]
    assert "left out: 20 " in lines[-1]
    assert {shard.file for source in manifest.sources for shard in source.train} == {
        "web-train-00000.bin",
        "code-train-00000.bin",
    }
    tokens = [source.count_tokens("train") for source in manifest.sources]
    assert manifest.weights == {"web": tokens[0] / sum(tokens), "code": tokens[1] / sum(tokens)}
    same_source_twice = {"web": sources["code"], "code": sources["code"]}
    assert "'code': 0 new documents" in get_tokenize_refusal(same_source_twice, tmp_path / "x")


# ---- Promises of docs/data.md ----


def test_split_of_a_document_does_not_depend_on_the_other_documents(corpus, tmp_path):
    smaller = write_corpus(tmp_path, num_documents=60)
    expected = read_validation_texts(corpus) & set(generate_documents(60))
    assert read_validation_texts(smaller) == expected


def test_three_documents_are_enough_for_both_splits(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(to_jsonl(["first", "second", "third"]))
    # At these fractions, all three documents would be in the same split.
    for fraction, num_validation in ((1e-5, 1), (1 - 1e-5, 2)):
        out = tmp_path / f"{num_validation}"
        tokenize([tmp_path / "a.jsonl"], out, validation_fraction=fraction)
        assert len(read_validation_texts(out)) == num_validation
        assert len(read_split_texts(out, "train")) == 3 - num_validation


def test_ids_above_16_bits_have_wide_shards_and_long_documents_are_cut(tmp_path):
    # A document without an end id is cut after this number of ids.
    piece_tokens = pretokenized.PIECE_TOKENS
    ids = np.arange(piece_tokens + 10_000)
    path = write_llm_c(tmp_path / "llama.bin", ids, magic=LLAMA_3_MAGIC, version=7)
    manifest = tokenize([path], tmp_path / "out", validation_fraction=0.3)
    assert (manifest.dtype, manifest.vocab_size, manifest.num_documents) == ("uint32", 128_256, 2)
    documents = read_all_documents(tmp_path / "out")
    assert sorted(map(len, documents)) == [10_000, piece_tokens]
    assert sorted(i for document in documents for i in document) == ids.tolist()
    store = TokenStore(tmp_path / "out")
    batch = store.read_train_batch(seed=0, first_sequence=0, num_sequences=1, seq_len=9)
    assert batch.max() < 2**17, "the shards are read with 32 bits"


# ---- Trained tokenizers ----


def write_random_words(folder, num_documents=60):
    """Write texts of many different words into a new folder; return it."""
    folder.mkdir()
    rng = random.Random(0)
    for number in range(num_documents):
        text = " ".join("".join(rng.choices("etaoinshr", k=rng.randint(2, 9))) for _ in range(200))
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def test_trained_tokenizer_is_stored_with_the_corpus(tmp_path):
    source = write_random_words(tmp_path / "source")
    options = {"bpe_vocab_size": 400, "validation_fraction": 0.3}
    manifest = tokenize([source], tmp_path / "a", **options)
    content = (tmp_path / "a" / "tokenizer.json").read_bytes()
    assert (manifest.vocab_size, manifest.end_id) == (400, 0)
    assert manifest.tokenizer == "sha256:" + hashlib.sha256(content).hexdigest()
    TokenStore(tmp_path / "a")
    assert tokenize([source], tmp_path / "b", **options) == manifest, "equal input gives equal ids"
    tokenizer = str(tmp_path / "a" / "tokenizer.json")
    with_file = tokenize([source], tmp_path / "c", tokenizer=tokenizer, validation_fraction=0.3)
    assert with_file == manifest, "the file can be given as a tokenizer"


def test_tokenizer_is_trained_on_a_bounded_sample_without_validation_texts(tmp_path, monkeypatch):
    source = write_random_words(tmp_path / "source")
    options = {"bpe_vocab_size": 400, "validation_fraction": 0.3}
    real_train_bpe, samples = corpus_module.train_bpe, []

    def record_sample(texts, vocab_size):
        samples.append(list(texts))
        return real_train_bpe(samples[-1], vocab_size)

    monkeypatch.setattr(corpus_module, "train_bpe", record_sample)
    tokenize([source], tmp_path / "a", **options)
    (sample,) = samples
    assert len(sample) == len(read_split_documents(tmp_path / "a", "train"))

    # With half of the bytes allowed, the last half of the sample is kept.
    monkeypatch.setattr(tokenizer_sample, "MAX_SAMPLE_BYTES", sum(map(len, sample)) // 2)
    tokenize([source], tmp_path / "b", **options)
    half_sample = samples[-1]
    assert half_sample == sample[-len(half_sample) :]
    assert len(sample) * 0.4 < len(half_sample) < len(sample) * 0.6


def test_bad_options_of_a_trained_tokenizer_are_refused_before_writing(tmp_path):
    source = write_random_words(tmp_path / "source", 3)
    message = get_tokenize_refusal(
        [source], tmp_path / "a", bpe_vocab_size=256, tokenizer="t.json", end_token="<eos>"
    )
    assert "train_bpe = 256: must be 257" in message and "262144" in message
    assert "tokenizer = t.json: give one" in message and "end_token = <eos>" in message
    assert "gives only" in get_tokenize_refusal([source], tmp_path / "a", bpe_vocab_size=20_000)
    (tmp_path / "ids.bin").write_bytes(np.arange(1000, dtype="<u2").tobytes())
    assert "ids.bin holds token ids" in get_tokenize_refusal(
        [tmp_path / "ids.bin"], tmp_path / "a", bpe_vocab_size=400
    )
    assert not (tmp_path / "a").exists()
