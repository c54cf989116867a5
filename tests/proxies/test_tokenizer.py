import hashlib

import pytest
from corpus_cases import word_tokenizer
from tokenizers import Tokenizer

from proxies.data.tokenizer import load_tokenizer, train_bpe
from proxies.data.tokens import DataError


def test_a_file_says_vocabulary_end_and_name(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.end_id) == (11, 10)
    assert tokenizer.name == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    assert tokenizer.encode([b"one two three red", b"blue"]).tolist() == [1, 2, 3, 4, 10, 5, 10], "not cut to 2 ids"
    assert tokenizer.encode([b"<|endoftext|>"]).tolist()[:-1] != [10], "text that spells a special token stays text"


def test_the_end_token_is_found_or_named(tmp_path):
    several = word_tokenizer(tmp_path / "a.json", ("<pad>", "</s>", "<|im_end|>"))
    assert load_tokenizer(str(several)).end_id == 11
    assert load_tokenizer(str(several), "<|im_end|>").end_id == 12
    with pytest.raises(DataError, match=r"a.json has no token <eot>: name with --end-token"):
        load_tokenizer(str(several), "<eot>")
    none = word_tokenizer(tmp_path / "b.json", ())
    with pytest.raises(DataError, match=r"b.json has no token <|endoftext|> or .*: name with --end-token"):
        load_tokenizer(str(none))
    with pytest.raises(DataError, match="the byte tokenizer ends documents by NUL"):
        load_tokenizer("bytes", "</s>")


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"gone.json cannot be read: No such file"):
        load_tokenizer(str(tmp_path / "gone.json"))
    for content in (b"", b"{}", b"\xff\xfe", b'{"version": "1.0"}'):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(DataError, match=r"bad.json is not a tokenizer.json"):
            load_tokenizer(str(tmp_path / "bad.json"))


def test_a_trained_tokenizer_has_its_size_reads_text_back_and_ends_documents():
    texts = [f"def f{i}(value): return value * {i}".encode() for i in range(200)]
    content = train_bpe(texts, 300)
    assert content == train_bpe(list(texts), 300)
    tokenizer = Tokenizer.from_str(content.decode())
    assert tokenizer.get_vocab_size() == 300
    for text in ("def f7(value):", "ünïcode \x00 bytes that it never saw 漢"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(DataError, match=r"train_bpe = 5000: the text gives only \d+ entries"):
        train_bpe(texts, 5000)
