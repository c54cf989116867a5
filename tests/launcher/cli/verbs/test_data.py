"""Tests of `forerun tokenize` and of the corpus checks of `validate` and `check`."""

import json
import os
import struct

import numpy as np
import pytest
from tiny_study import run_forerun, write_plan

from forerun._launcher.cli.verbs import data
from forerun._proxies.data.documents import TEXT_SUFFIXES
from forerun._proxies.data.raw_ids import RAW_DTYPES


def ask(*arguments):
    """Run a command with --json and return its exit code, its JSON, and stderr."""
    code, out, err = run_forerun(*arguments, "--json")
    return code, json.loads(out), err


@pytest.fixture
def folder(tmp_path):
    """A folder with 40 texts in `web` and 40 in `code`."""
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        for number in range(40):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} document {number}")
    return tmp_path


def test_tokenize_prints_its_keys_and_progress(folder):
    code, body, err = ask(
        "tokenize", folder / "web", "--out", folder / "corpus", "--validation-fraction", 0.3
    )
    assert code == 0
    assert set(body) == {
        "data_id",
        "tokenizer",
        "num_documents",
        "num_train_tokens",
        "num_validation_tokens",
        "vocab_size",
        "end_id",
        "sources",
        "out",
        "not_read",
    }
    assert (body["num_documents"], body["tokenizer"], body["end_id"]) == (40, "bytes", 0)
    (part,) = body["sources"]
    assert set(part) == {
        "name",
        "weight",
        "num_documents",
        "num_train_tokens",
        "num_validation_tokens",
    }
    assert (part["name"], part["weight"]) == ("text", 1.0)
    assert "text: 40 text; " in err, "the recognized files are counted"
    assert "tokenize: 100\u00a0%" in err, "progress is shown"


def test_tokenizer_is_trained_on_the_corpus(folder):
    options = ["--train-bpe", 280, "--validation-fraction", 0.3]
    code, body, err = ask("tokenize", folder / "web", "--out", folder / "corpus", *options)
    assert (code, body["vocab_size"], body["tokenizer"][:7]) == (0, 280, "sha256:"), err
    assert "training a byte-level BPE of 280 entries on" in err
    code, body, _ = ask("tokenize", folder / "web", "--out", folder / "other", "--train-bpe", 10**6)
    assert (code, "train_bpe = 1000000: must be 257" in body["message"]) == (2, True)


def test_mixture_has_names_and_weights(folder):
    sources = [f"web={folder / 'web'}", f"code={folder / 'code'}"]
    weights = ["--weight", "web=0.7", "--weight", "code=0.3"]
    options = ["--out", folder / "out", "--validation-fraction", 0.3]
    code, body, _ = ask("tokenize", *sources, *weights, *options)
    assert code == 0
    assert [(part["name"], part["weight"]) for part in body["sources"]] == [
        ("web", 0.7),
        ("code", 0.3),
    ]
    code, out, _ = run_forerun("tokenize", *sources, *weights, *options)
    assert code == 0
    assert out.splitlines()[1:] == [
        "  web: weight 0.7",
        "  code: weight 0.3",
        f"next: forerun init --data {folder}/out",
    ]


def test_existing_path_with_an_equals_sign_is_no_named_source(folder, monkeypatch):
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
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"body": f"text {i}"}) + "\n" for i in range(9))
    )
    code, body, _ = ask(
        "tokenize", folder / "a.jsonl", "--out", folder / "out2", "--text-key", "body"
    )
    assert (code, body["num_documents"]) == (0, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["web=web", "code"], "code has no name: give every source one (NAME=code), or none"),
        ([""], "'': no such file or folder"),
        (["web=web", "--weight", "web"], "--weight web: must be NAME=SHARE, such as web=0.7"),
        (["ids.bin"], "ids.bin holds ids and does not state its vocabulary: give --vocab-size"),
    ],
)
def test_bad_input_is_refused_with_advice(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    (folder / "ids.bin").write_bytes(struct.pack("<3H", 1, 7, 2))
    code, body, _ = ask("tokenize", *arguments, "--out", "out")
    assert (code, message in body["message"]) == (2, True), body["message"]
    assert not (folder / "out").exists()


def test_suffixes_and_dtypes_equal_those_of_the_readers():
    """The verb repeats the readers' constants, because it must not import the readers."""
    assert data._SUFFIXES == TEXT_SUFFIXES
    assert data._RAW_DTYPES == RAW_DTYPES


@pytest.fixture
def plan(tmp_path):
    """Path of a plan, with its corpus in the same folder."""
    return write_plan(tmp_path)


def test_validate_checks_sizes_and_with_full_the_content(plan):
    shard = plan.parent / "corpus" / "train-00000.bin"
    assert ask("validate", plan)[1]["corpus_checked"] == "sizes"
    assert ask("validate", plan, "--full")[1]["corpus_checked"] == "content"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    assert ask("validate", plan)[0] == 0
    code, body, _ = ask("validate", plan, "--full")
    assert (code, "train-00000.bin does not match" in body["message"]) == (5, True)
    shard.write_bytes(content[:-2])
    assert ask("validate", plan)[0] == 2


@pytest.mark.parametrize("name", ["manifest.json", "train-00000.bin"])
@pytest.mark.parametrize("verb", ["validate", "check"])
def test_corpus_with_a_pipe_is_refused_by_kind(plan, name, verb):
    path = plan.parent / "corpus" / name
    path.unlink()
    os.mkfifo(path)
    code, body, _ = ask(verb, plan)
    assert code in (2, 5) and "it is a pipe" in body["message"]


def test_dtype_of_raw_ids_is_recognized_or_given(tmp_path):
    """Read as uint16, 20,050 ids of uint32 would become 40,101 tokens, half of them 0."""
    ids = np.random.default_rng(0).integers(1, 50_000, 20_050)
    ids[::50] = 50_256
    ids.astype("<u4").tofile(tmp_path / "a.bin")
    code, body, err = ask(
        "tokenize", tmp_path / "a.bin", "--out", tmp_path / "out", "--vocab-size", 50_257
    )
    assert code == 0 and "raw ids: 1 of uint32" in err
    assert body["num_train_tokens"] + body["num_validation_tokens"] in (20_050, 20_051)
    options = ("--vocab-size", 300, "--dtype", "int32")
    code, body, _ = ask("tokenize", tmp_path / "a.bin", "--out", tmp_path / "o", *options)
    assert code == 2 and "outside the vocabulary of 300" in body["message"]
    (tmp_path / "a.txt").write_text("a")
    code, body, _ = ask(
        "tokenize", tmp_path / "a.txt", "--out", tmp_path / "o", "--dtype", "uint32"
    )
    assert code == 2 and "--dtype uint32" in body["message"]


def test_unread_files_are_summarized_in_one_line_and_listed_in_json(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"a{number}.txt").write_text(f"document {number}")
        (folder / f"b.x{number}").write_bytes(b"z" * number)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    code, body, err = ask("tokenize", folder, "--out", tmp_path / "out", "--suffix", ".txt")
    (line,) = [line for line in err.splitlines() if "not read" in line]
    assert code == 0 and len(body["not_read"]) == 31
    assert len(line) < 250 and ".x29" in line and ".x1 " not in line, "the largest are named"
    num_unnamed = int(line.rpartition("; --suffix")[0].rpartition(";")[2].split()[0])
    assert line.count("(b.x") + line.count("README") + num_unnamed == 31


def test_source_with_only_duplicates_is_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.txt").write_text(f"document {number}")
    code, body, _ = ask(
        "tokenize", f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}", "--out", tmp_path / "out"
    )
    assert code == 2
    assert "'b': 0 new documents" in body["message"] and "5 left out" in body["message"]


def test_dataset_folder_keeps_its_splits(tmp_path):
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    (hub / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    for split, numbers in (
        ("train", range(50)),
        ("validation", range(45, 60)),
        ("test", range(60, 70)),
    ):
        rows = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in numbers)
        (hub / "data" / f"{split}-00000-of-00001.jsonl").write_text(rows)
    code, body, err = ask("tokenize", hub, "--out", tmp_path / "out")
    (part,) = body["sources"]
    num_tokens = len("document 00") + 1
    assert (code, part["num_documents"], part["num_validation_tokens"]) == (0, 60, 15 * num_tokens)
    # Five of the 50 training documents are held out; ten have a number of one digit.
    assert part["num_train_tokens"] == 45 * num_tokens - 10
    unread = {kind["suffix"]: kind["examples"] for kind in body["not_read"]}
    test_file = "data/test-00000-of-00001.jsonl"
    assert unread == {"dataset card": ["README.md"], "test split": [test_file]}
    assert "split by their names: 1 for training, 1 for validation" in err and "README.md" in err


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_validation_file_is_held_out(tmp_path, suffix):
    hub = tmp_path / "hub"
    hub.mkdir()
    for name, numbers in (("data", range(40)), ("val", range(38, 50)), ("test", range(50, 60))):
        texts = [f"document {number:02}" for number in numbers]
        rows = [json.dumps({"text": text}) for text in texts] if suffix == "jsonl" else texts
        (hub / f"{name}.{suffix}").write_text("\n".join(rows))
    code, body, err = ask("tokenize", hub, "--out", tmp_path / "out")
    (part,) = body["sources"]
    assert code == 0 and [kind["suffix"] for kind in body["not_read"]] == ["test split"]
    assert f"1 for validation; files without a split's name are for training: data.{suffix}" in err
    # Two lines are in both files: the JSONL reader drops them, a text file is one document.
    num_validation, num_train = (12, 38) if suffix == "jsonl" else (12, 40)
    assert part["num_validation_tokens"] == num_validation * len("document 00\0")
    assert part["num_train_tokens"] == num_train * len("document 00\0")


def test_test_file_is_left_out_and_training_files_are_split_by_content(tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    for name in ("train", "test"):
        rows = "".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(40))
        (hub / f"{name}.jsonl").write_text(rows)
    code, body, err = ask("tokenize", hub, "--out", tmp_path / "out", "--validation-fraction", 0.3)
    assert (code, body["num_documents"]) == (0, 40) and body["num_validation_tokens"] > 0
    assert "test.jsonl" in err and "no file is named for validation: split by content" in err
