"""Tests of tokenizers: files of users, the end token, training, and the process that encodes.

The files of these tests know `TOKENIZER_WORDS`, and their special tokens have the next ids.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from command_cases import wait_until_gone
from corpus_cases import TOKENIZER_WORDS, write_word_tokenizer
from tokenizers import Tokenizer

from forerun._proxies.data import tokenizer as tokenizer_module
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.tokenizer import load_tokenizer, train_bpe
from forerun._proxies.data.tokens import DataError


def test_vocabulary_end_and_name_come_from_the_file(tmp_path):
    path = write_word_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(path))
    num_words = len(TOKENIZER_WORDS)
    assert (tokenizer.vocab_size, tokenizer.end_id) == (num_words + 1, num_words)
    assert tokenizer.name == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    # The file asks for truncation to 2 ids, which must not be applied.
    assert tokenizer.encode([b"one two three red", b"blue"]).tolist() == [1, 2, 3, 4, 10, 5, 10]
    # A text that contains the name of a special token stays text.
    assert tokenizer.encode([b"<|endoftext|>"]).tolist()[:-1] != [10]


def test_end_token_is_recognized_or_must_be_named(tmp_path):
    several = write_word_tokenizer(tmp_path / "a.json", ("<pad>", "</s>", "<|im_end|>"))
    assert load_tokenizer(str(several)).end_id == 11
    assert load_tokenizer(str(several), "<|im_end|>").end_id == 12
    with pytest.raises(DataError, match=r"a.json has no token <eot>: name with --end-token"):
        load_tokenizer(str(several), "<eot>")
    without_specials = write_word_tokenizer(tmp_path / "b.json", ())
    with pytest.raises(DataError, match=r"b.json has no special token .*: name with --end-token"):
        load_tokenizer(str(without_specials))
    with pytest.raises(DataError, match="the byte tokenizer ends documents with NUL"):
        load_tokenizer("bytes", "</s>")


def test_file_that_is_not_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"gone.json cannot be read: No such file"):
        load_tokenizer(str(tmp_path / "gone.json"))
    for content in (b"", b"{}", b"\xff\xfe", b'{"version": "1.0"}'):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(DataError, match=r"bad.json.* is not a tokenizer.json"):
            load_tokenizer(str(tmp_path / "bad.json"))


def test_trained_tokenizer_has_its_size_and_decodes_what_it_encodes():
    texts = [f"def f{i}(value): return value * {i}".encode() for i in range(200)]
    content = train_bpe(texts, 300)
    assert content == train_bpe(list(texts), 300)
    tokenizer = Tokenizer.from_str(content.decode())
    assert tokenizer.get_vocab_size() == 300
    for text in ("def f7(value):", "ünïcode \x00 bytes that it never saw 漢"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(DataError, match=r"train_bpe = 5000: the text gives only \d+ entries"):
        train_bpe(texts, 5000)


def read_end_token(path, **options):
    """Return the end id of a tokenizer and the reason for it."""
    loaded = load_tokenizer(str(path), **options)
    return loaded.end_id, loaded.end_reason


def test_only_special_tokens_can_be_the_end_token(tmp_path):
    """Gemma's vocabulary has `</s>` as an HTML tag, and `<eos>` as the special token."""
    value = json.loads(
        write_word_tokenizer(tmp_path / "t.json", ("<eos>", "</s>", "<b>")).read_text()
    )
    value["added_tokens"][1]["special"] = False
    (tmp_path / "t.json").write_text(json.dumps(value))
    end_id, reason = read_end_token(tmp_path / "t.json")
    assert end_id == 10 and "<eos>" in reason and "special" in reason
    value["added_tokens"][0]["special"] = False
    (tmp_path / "t.json").write_text(json.dumps(value))
    with pytest.raises(DataError, match="has no special token"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_end_token_with_full_width_bars_is_recognized(tmp_path):
    """DeepSeek's tokenizers use such bars."""
    path = write_word_tokenizer(
        tmp_path / "t.json", ("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>")
    )
    assert read_end_token(path)[0] == 11


@pytest.mark.parametrize("eos_token", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_end_token_comes_from_tokenizer_config_in_the_same_folder(tmp_path, eos_token):
    path = write_word_tokenizer(tmp_path / "t.json", ("<|endoftext|>", "<|im_end|>"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": eos_token}))
    end_id, reason = read_end_token(path)
    assert end_id == 11 and "tokenizer_config.json" in reason
    assert read_end_token(path, end_token="<|endoftext|>")[0] == 10
    config.write_text('{"eos_token": "<absent>"}')
    assert read_end_token(path)[0] == 10 and "<absent>" in read_end_token(path)[1]
    config.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json cannot be read: it is not JSON"):
        load_tokenizer(str(path))


def write_changed_tokenizer(path, **parts):
    """Write a tokenizer with some parts replaced; return its path."""
    value = json.loads(write_word_tokenizer(path).read_text()) | parts
    path.write_text(json.dumps(value))
    return path


EXPLODING_PRE_TOKENIZER = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$|(a|a)+b|(a|aa)+c"},
    "behavior": "Isolated",
    "invert": False,
}
"""A regular expression that takes exponential time."""
GROWING_NORMALIZER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000_000}
"""A replacement that makes each letter `a` a text of a million letters."""


def test_tokenizer_that_fails_or_hangs_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "BATCH_SECONDS", 1.0)
    for parts in ({"pre_tokenizer": EXPLODING_PRE_TOKENIZER}, {"normalizer": GROWING_NORMALIZER}):
        loaded = load_tokenizer(str(write_changed_tokenizer(tmp_path / "t.json", **parts)))
        began = time.monotonic()
        with pytest.raises(
            DataError, match=r"t.json: the tokenizer (failed: |took longer than its limit)"
        ):
            loaded.encode([b"a" * 30 + b"!"] * 50)
        # The expression alone would take hours.
        assert time.monotonic() - began < 60


def test_tokenizer_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "t.json")
    with pytest.raises(DataError, match="it is a pipe"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_tokenizer_process_ends_with_its_parent(tmp_path):
    """While it encodes, the process runs no Python code that could see its parent's end."""
    path = write_changed_tokenizer(tmp_path / "t.json", normalizer=GROWING_NORMALIZER)
    code = (
        "import sys; from forerun._proxies.data.tokenizer import load_tokenizer; tokens = "
        "load_tokenizer(sys.argv[1]);"
        "print(tokens._process._process.pid, flush=True); tokens.encode([b'a' * 100] * 200)"
    )
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        parent = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        child = int(parent.stdout.readline())
        time.sleep(0.3)  # until the child encodes
        parent.send_signal(signal_number)
        assert parent.wait(5) != 0
        parent.stdout.close()
        assert wait_until_gone(child)


def test_tokenize_reports_the_end_token(tmp_path):
    path = write_word_tokenizer(tmp_path / "t.json")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    lines = []
    tokenize([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(path), say=lines.append)
    report = "<|endoftext|> (id 10), a usual name that the file marks as special"
    assert any(report in line for line in lines)


def test_tokenizer_is_not_trained_on_files_named_validation(tmp_path):
    data = tmp_path / "dataset" / "data"
    data.mkdir(parents=True)
    for split, word in (("train", "def"), ("validation", "zzzz")):
        lines = [
            json.dumps({"text": f"{word} f{i}(value): return value * {i}"}) for i in range(100)
        ]
        (data / f"{split}-00000.jsonl").write_text("\n".join(lines) + "\n")
    tokenize([tmp_path / "dataset"], tmp_path / "out", bpe_vocab_size=280)
    vocabulary = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab()
    assert "value" in vocabulary or "al" in vocabulary
    assert "zz" not in vocabulary
