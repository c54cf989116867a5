import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpus_cases import word_tokenizer
from tokenizers import Tokenizer

from proxies.data import tokenizer
from proxies.data.corpus import tokenize
from proxies.data.tokenizer import load_tokenizer, train_bpe
from proxies.data.tokens import DataError


def test_a_file_says_vocabulary_end_and_name(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.end_id) == (11, 10)
    assert tokenizer.name == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    assert tokenizer.encode([b"one two three red", b"blue"]).tolist() == [1, 2, 3, 4, 10, 5, 10], (
        "not cut to 2 ids"
    )
    assert tokenizer.encode([b"<|endoftext|>"]).tolist()[:-1] != [10], (
        "text that spells a special token stays text"
    )


def test_the_end_token_is_found_or_named(tmp_path):
    several = word_tokenizer(tmp_path / "a.json", ("<pad>", "</s>", "<|im_end|>"))
    assert load_tokenizer(str(several)).end_id == 11
    assert load_tokenizer(str(several), "<|im_end|>").end_id == 12
    with pytest.raises(DataError, match=r"a.json has no token <eot>: name with --end-token"):
        load_tokenizer(str(several), "<eot>")
    none = word_tokenizer(tmp_path / "b.json", ())
    with pytest.raises(
        DataError, match=r"b.json has no token <|endoftext|> or .*: name with --end-token"
    ):
        load_tokenizer(str(none))
    with pytest.raises(DataError, match="the byte tokenizer ends documents with NUL"):
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


def end_of(path, **options):
    tokens = load_tokenizer(str(path), **options)
    return tokens.end_id, tokens.end_reason


def test_a_word_that_looks_like_an_end_token_is_not_taken_for_it(tmp_path):
    """Gemma's vocabulary has `</s>` as an HTML tag, and `<eos>` as the special token."""
    value = json.loads(word_tokenizer(tmp_path / "t.json", ("<eos>", "</s>", "<b>")).read_text())
    value["added_tokens"][1]["special"] = False
    (tmp_path / "t.json").write_text(json.dumps(value))
    end_id, reason = end_of(tmp_path / "t.json")
    assert end_id == 10 and "<eos>" in reason and "special" in reason
    value["added_tokens"][0]["special"] = False
    (tmp_path / "t.json").write_text(json.dumps(value))
    assert "does not mark it as special" in end_of(tmp_path / "t.json")[1]


def test_an_end_token_with_full_width_bars_is_known(tmp_path):
    path = word_tokenizer(
        tmp_path / "t.json", ("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>")
    )
    assert end_of(path)[0] == 11


@pytest.mark.parametrize("written", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_the_configuration_beside_a_tokenizer_says_its_end_token(tmp_path, written):
    path = word_tokenizer(tmp_path / "t.json", ("<|endoftext|>", "<|im_end|>"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": written}))
    end_id, reason = end_of(path)
    assert end_id == 11 and "tokenizer_config.json" in reason
    assert end_of(path, end_token="<|endoftext|>")[0] == 10
    config.write_text('{"eos_token": "<absent>"}')
    assert end_of(path)[0] == 10 and "<absent>" in end_of(path)[1]
    config.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json cannot be read: it is not JSON"):
        load_tokenizer(str(path))


def test_what_other_files_beside_a_tokenizer_say_of_its_end_token_counts(tmp_path):
    """Older releases have `special_tokens_map.json`; others mark tokens as special in the
    configuration alone.
    """
    path = word_tokenizer(tmp_path / "t.json", ("</s>", "<fin>", "<eos>"))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<fin>"}})
    )
    assert end_of(path)[0] == 11 and "special_tokens_map.json" in end_of(path)[1]
    (tmp_path / "special_tokens_map.json").unlink()
    value = json.loads(path.read_text())
    for token in value["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(value))
    decoder = {
        "10": {"content": "</s>", "special": False},
        "12": {"content": "<eos>", "special": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert end_of(path)[0] == 12


def damaged(path, **parts):
    value = json.loads(word_tokenizer(path).read_text()) | parts
    path.write_text(json.dumps(value))
    return path


EXPLODES = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$|(a|a)+b|(a|aa)+c"},
    "behavior": "Isolated",
    "invert": False,
}
GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000_000}


def test_a_tokenizer_that_fails_or_hangs_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "BATCH_SECONDS", 1.0)
    for parts in ({"pre_tokenizer": EXPLODES}, {"normalizer": GROWS}):
        tokens = load_tokenizer(str(damaged(tmp_path / "t.json", **parts)))
        began = time.monotonic()
        with pytest.raises(
            DataError, match=r"t.json: the tokenizer (failed: |took longer than its limit)"
        ):
            tokens.encode([b"a" * 30 + b"!"] * 50)
        assert time.monotonic() - began < 60


def test_a_tokenizer_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "t.json")
    with pytest.raises(DataError, match="it is a pipe"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_a_tokenizer_ends_with_its_asker(tmp_path):
    """Also while it works, when nothing of Python runs in it, and however the asker ends."""
    path = damaged(tmp_path / "t.json", normalizer=GROWS)
    code = (
        "import sys; from proxies.data.tokenizer import load_tokenizer; tokens = "
        "load_tokenizer(sys.argv[1]);"
        "print(tokens._process._process.pid, flush=True); tokens.encode([b'a' * 100] * 200)"
    )
    for number in (signal.SIGINT, signal.SIGKILL):
        asker = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        child = int(asker.stdout.readline())
        time.sleep(0.3)
        asker.send_signal(number)
        assert asker.wait(5) != 0
        asker.stdout.close()
        until = time.monotonic() + 5
        while is_alive(child) and time.monotonic() < until:
            time.sleep(0.02)
        assert not is_alive(child)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_corpus_says_which_end_token_was_taken(tmp_path):
    path = word_tokenizer(tmp_path / "t.json")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    lines = []
    tokenize([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(path), say=lines.append)
    assert any(
        "<|endoftext|> (id 10), a usual name that the file marks as special" in line
        for line in lines
    )


def test_a_tokenizer_is_not_trained_on_files_named_validation(tmp_path):
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
