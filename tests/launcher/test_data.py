import json
import struct

import numpy as np
import pytest
from tiny_study import forerun

from launcher.verbs import data
from proxies.data.documents import TEXT_SUFFIXES


def ask(*arguments):
    code, out, err = forerun(*arguments, "--json")
    return code, json.loads(out), err


@pytest.fixture
def folder(tmp_path):
    """Two folders of texts."""
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        for number in range(40):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} document {number}")
    return tmp_path


def test_the_keys_of_tokenize(folder):
    code, body, err = ask("tokenize", folder / "web", "--out", folder / "corpus", "--validation-fraction", 0.3)
    assert code == 0
    assert set(body) == {
        "data_id", "tokenizer", "num_documents", "num_train_tokens", "num_validation_tokens", "vocab_size", "end_id",
        "sources", "out", "not_read",
    }  # fmt: skip
    assert (body["num_documents"], body["tokenizer"], body["end_id"]) == (40, "bytes", 0)
    (part,) = body["sources"]
    assert set(part) == {"name", "weight", "num_documents", "num_train_tokens", "num_validation_tokens"}
    assert (part["name"], part["weight"]) == ("text", 1.0)
    assert "text: 40 text; " in err and "tokenize: 100%" in err, "what was recognised, and progress"


def test_a_tokenizer_is_trained_and_its_sample_is_told(folder):
    options = ["--train-bpe", 280, "--validation-fraction", 0.3]
    code, body, err = ask("tokenize", folder / "web", "--out", folder / "corpus", *options)
    assert (code, body["vocab_size"], body["tokenizer"][:7]) == (0, 280, "sha256:"), err
    assert "training a byte-level BPE of 280 entries on" in err
    code, body, _ = ask("tokenize", folder / "web", "--out", folder / "other", "--train-bpe", 10**6)
    assert (code, "train_bpe = 1000000: must be 257" in body["message"]) == (2, True)


def test_a_mixture_by_name_and_weight(folder):
    named = [f"web={folder / 'web'}", f"code={folder / 'code'}"]
    shares = ["--weight", "web=0.7", "--weight", "code=0.3"]
    code, body, _ = ask("tokenize", *named, *shares, "--out", folder / "out", "--validation-fraction", 0.3)
    assert code == 0
    assert [(part["name"], part["weight"]) for part in body["sources"]] == [("web", 0.7), ("code", 0.3)]
    code, out, _ = forerun("tokenize", *named, *shares, "--out", folder / "out", "--validation-fraction", 0.3)
    assert code == 0
    assert out.splitlines()[1:] == [
        "  web: weight 0.7",
        "  code: weight 0.3",
        f"next: forerun init --data {folder}/out",
    ]


def test_a_path_that_exists_is_no_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "web").rename(folder / "date=2026")
    code, body, _ = ask("tokenize", "date=2026", "--out", "out", "--validation-fraction", 0.3)
    assert (code, body["sources"][0]["name"]) == (0, "text")


def test_options_reach_the_readers(folder):
    ids = np.random.default_rng(0).integers(0, 300, 2000).astype("<u2")
    (folder / "train.bin").write_bytes(ids.tobytes())
    options = ["--vocab-size", 300, "--end-id", 7, "--validation-fraction", 0.3]
    code, body, err = ask("tokenize", folder / "train.bin", "--out", folder / "out", *options)
    assert (code, body["vocab_size"], body["end_id"], body["tokenizer"]) == (0, 300, 7, "unnamed")
    assert "text: 1 nanogpt; 4,000 bytes" in err
    (folder / "a.jsonl").write_text("".join(json.dumps({"body": f"text {i}"}) + "\n" for i in range(9)))
    code, body, _ = ask("tokenize", folder / "a.jsonl", "--out", folder / "out2", "--text-key", "body")
    assert (code, body["num_documents"]) == (0, 9)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["web=web", "code"], "code has no name: give every source one (NAME=code), or none"),
        ([""], "'': no such file or folder"),
        (["web=web", "--weight", "web"], "--weight web: must be NAME=SHARE, such as web=0.7"),
        (["ids.bin"], "ids.bin holds ids and does not state its vocabulary: give --vocab-size"),
    ],
)
def test_bad_input_is_two_and_says_what_to_do(folder, monkeypatch, arguments, said):
    monkeypatch.chdir(folder)
    (folder / "ids.bin").write_bytes(struct.pack("<3H", 1, 7, 2))
    code, body, _ = ask("tokenize", *arguments, "--out", "out")
    assert (code, said in body["message"]) == (2, True), body["message"]
    assert not (folder / "out").exists()


def test_the_suffixes_are_those_of_the_readers():
    """Written out in the verb, which must load nothing."""
    assert data._SUFFIXES == TEXT_SUFFIXES
