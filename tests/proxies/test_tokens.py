import dataclasses
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from proxy_cases import write_corpus

from proxies.core import canon
from proxies.data import shards, tokens
from proxies.data.corpus import tokenize
from proxies.data.permutation import permuted
from proxies.data.tokens import CorruptCorpusError, DataError, TokenStore, read_manifest


@pytest.fixture
def small(tmp_path):
    """A corpus of its own, to be damaged."""
    return write_corpus(tmp_path, num_documents=60, num_words=30, validation_fraction=0.2)


def ids_of(folder, split):
    manifest = read_manifest(folder)
    files = [shard.file for source in manifest.sources for shard in getattr(source, split)]
    return np.concatenate([np.fromfile(folder / file, dtype=manifest.dtype) for file in files])


def problem(folder):
    with pytest.raises(DataError) as caught:
        TokenStore(folder)
    return str(caught.value)


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
    text = (small / "manifest.json").read_text()
    (small / "manifest.json").write_text(text.replace('"schema_version": 3', '"schema_version": 4'))
    assert "schema_version = 4: must be 3: write the corpus to a new folder" in problem(small)


def test_a_shard_cut_by_a_byte_or_grown_is_refused(small):
    path = small / "train-00000.bin"
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:-2], whole + b"\0\0", b""):
        path.write_bytes(content)
        wanted = f"train-00000.bin has {len(content):,} bytes, the manifest says {len(whole):,}"
        assert wanted in problem(small)
    path.write_bytes(whole)
    assert TokenStore(small).num_windows("train", 16) > 0


def test_a_flipped_byte_is_refused(small):
    path = small / "validation-00000.bin"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(bytes(content))
    assert "validation-00000.bin does not match the manifest's hash" in problem(small)


def test_a_sequence_depends_on_its_place_in_the_run_alone(store):
    whole = store.train_batch(seed=5, first_sequence=0, num_sequences=24, seq_len=16)
    for num_sequences in (1, 3, 8):
        steps = [
            store.train_batch(seed=5, first_sequence=num_sequences * step, num_sequences=num_sequences, seq_len=16)
            for step in range(24 // num_sequences)
        ]
        assert np.array_equal(np.concatenate(steps), whole)
    assert whole.dtype == np.int64 and whole.shape == (24, 17)
    assert not np.array_equal(whole, store.train_batch(seed=6, first_sequence=0, num_sequences=24, seq_len=16))


def test_the_order_of_a_single_source_is_of_seed_and_epoch_alone(small):
    """Curves that were recorded depend on it."""
    store, seq_len = TokenStore(small), 32
    num_windows, flat = store.num_windows("train", seq_len), ids_of(small, "train")
    batch = store.train_batch(seed=3, first_sequence=num_windows, num_sequences=num_windows, seq_len=seq_len)
    for row, window in zip(batch, permuted(np.arange(num_windows), num_windows, "3/1"), strict=True):
        assert np.array_equal(row, flat[window * seq_len : (window + 1) * seq_len + 1])
    across = store.train_batch(seed=3, first_sequence=num_windows - 2, num_sequences=num_windows + 3, seq_len=seq_len)
    assert (across[2 : 2 + num_windows] == batch).all(), "a batch over the end of an epoch, and into a third one"


EXPORTED = (
    "__init__",
    "core/__init__",
    "core/canon",
    "core/checks",
    "core/errors",
    "core/notation",
    "core/plain_files",
    "data/__init__",
    "data/mixture",
    "data/permutation",
    "data/tokens",
    "data/windows",
)
READ = """
import sys
from pathlib import Path
from proxies.data.tokens import TokenStore
batch = TokenStore(Path(sys.argv[1])).train_batch(seed=0, first_sequence=5, num_sequences=3, seq_len=16)
print(batch.sum(), *sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
"""


def test_a_corpus_is_read_with_numpy_and_these_modules_alone(small, tmp_path):
    for folder in ("core", "data"):
        (tmp_path / "proxies" / folder).mkdir(parents=True)
    for name in EXPORTED:
        shutil.copy(Path(tokens.__file__).parents[1] / f"{name}.py", tmp_path / "proxies" / f"{name}.py")
    done = subprocess.run(
        [sys.executable, "-c", READ, small], cwd=tmp_path, capture_output=True, text=True, check=True
    )  # fmt: skip
    total, *loaded = done.stdout.split()
    batch = TokenStore(small).train_batch(seed=0, first_sequence=5, num_sequences=3, seq_len=16)
    assert int(total) == batch.sum()
    sites = {"sitecustomize", "usercustomize"}  # a distribution's Python brings its own
    assert {name for name in loaded if not name.startswith("_")} - sites <= {"numpy", "proxies"}


def test_windows_do_not_cross_shards(tmp_path, monkeypatch):
    whole = write_corpus(tmp_path / "one", num_documents=40, num_words=30, validation_fraction=0.2)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 304)  # the last token of a shard is a target only
    folder = write_corpus(tmp_path / "many", num_documents=40, num_words=30, validation_fraction=0.2)
    store, seq_len = TokenStore(folder), 16
    parts = [np.fromfile(folder / s.file, dtype="<u2") for s in store.manifest.sources[0].train]
    assert np.array_equal(np.concatenate(parts), ids_of(whole, "train"))
    assert len(parts) > 5 and all(len(shard) == 304 for shard in parts[:-1])
    inside = {
        tuple(shard[start : start + seq_len + 1])
        for shard in parts
        for start in range(0, (len(shard) - 1) // seq_len * seq_len, seq_len)
    }
    num_windows = store.num_windows("train", seq_len)
    assert num_windows == sum((len(shard) - 1) // seq_len for shard in parts)
    batch = store.train_batch(seed=0, first_sequence=0, num_sequences=num_windows, seq_len=seq_len)
    assert {tuple(row) for row in batch} == inside


def test_validation_windows_are_the_same_spread_for_everybody(store):
    batch = store.validation_batch(num_sequences=10, seq_len=16)
    assert np.array_equal(batch, store.validation_batch(num_sequences=10, seq_len=16))
    num_windows = store.num_windows("validation", 16)
    every = store.validation_batch(num_sequences=num_windows, seq_len=16)
    assert np.array_equal(batch, every[[i * num_windows // 10 for i in range(10)]])
    with pytest.raises(DataError, match=f"holds {num_windows:,} windows of 16 tokens: {num_windows + 1:,} are needed"):
        store.validation_batch(num_sequences=num_windows + 1, seq_len=16)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Three sources that share no character, so that a token tells where it came from."""
    folder = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    for name, letters, size in (("web", "abc", 4000), ("code", "xyz", 900), ("math", "123", 2500)):
        (folder / name).mkdir()
        for number in range(12):
            (folder / name / f"{number}.txt").write_text("".join(rng.choice(list(letters), size)))
    named = {name: [folder / name] for name in ("web", "code", "math")}
    tokenize(named, folder / "out", validation_fraction=0.3, weights={"web": 0.5, "code": 0.3, "math": 0.2})
    return folder / "out"


def origins(batch_BT):
    """The source of each row; its first token may be the end of a document."""
    letters = {**dict.fromkeys(b"abc", "web"), **dict.fromkeys(b"xyz", "code"), **dict.fromkeys(b"123", "math")}
    return [{letters[token] for token in row if token}.pop() for row in batch_BT.tolist()]


def test_a_mixture_keeps_its_weights_at_every_prefix(mixed):
    store = TokenStore(mixed)
    assert store.manifest.weights == {"web": 0.5, "code": 0.3, "math": 0.2}
    rows = origins(store.train_batch(seed=1, first_sequence=0, num_sequences=400, seq_len=16))
    for name, weight in store.manifest.weights.items():
        had = np.cumsum([row == name for row in rows])
        assert np.abs(had - weight * np.arange(1, 401)).max() < 2


def test_sources_of_equal_size_have_orders_of_their_own(tmp_path):
    for number, name in enumerate("ab"):
        parts = [[*range(start, start + 999), 50_256] for start in range(number * 20_000, number * 20_000 + 8000, 1000)]
        (tmp_path / f"{name}.bin").write_bytes(np.array(parts, dtype="<u2").tobytes())
    named = {name: [tmp_path / f"{name}.bin"] for name in "ab"}
    tokenize(named, tmp_path / "out", vocab_size=50_257, validation_fraction=1e-5)
    store = TokenStore(tmp_path / "out")
    assert [source.num_tokens("train") for source in store.manifest.sources] == [7000, 7000]
    batch = store.train_batch(seed=0, first_sequence=0, num_sequences=100, seq_len=10)
    starts = [np.fromfile(tmp_path / "out" / f"{name}-train-00000.bin", dtype="<u2")[::10].tolist() for name in "ab"]
    orders = [[starts[number].index(token) for token in batch[number::2, 0].tolist()] for number in (0, 1)]
    assert orders[0] != orders[1]


def test_other_weights_are_another_corpus(mixed):
    stored = read_manifest(mixed)
    store = TokenStore(mixed, weights={"web": 0, "code": 1, "math": 3})
    assert store.manifest.weights == {"web": 0.0, "code": 0.25, "math": 0.75}
    assert store.manifest.data_id != stored.data_id
    assert store.manifest == stored.reweighted({"math": 30, "code": 10, "web": 0})
    assert stored.reweighted(stored.weights).data_id == stored.data_id
    thirds = stored.reweighted({"web": 1 / 3, "code": 1 / 3, "math": 1 / 3})
    assert thirds == thirds.reweighted(thirds.weights) == stored.reweighted(dict.fromkeys(stored.names, 7))
    rows = origins(store.train_batch(seed=1, first_sequence=0, num_sequences=40, seq_len=16))
    assert (rows.count("web"), rows.count("code"), rows.count("math")) == (0, 10, 30)
    with pytest.raises(DataError) as caught:
        TokenStore(mixed, weights={"wbe": 1, "web": -1, "code": float("inf")})
    assert len(caught.value.problems) == 4
    with pytest.raises(DataError, match="add up to 0"):
        stored.reweighted(dict.fromkeys(stored.names, 0.0))


def test_a_tokenizer_that_is_gone_or_another_is_refused(small):
    manifest = dataclasses.replace(read_manifest(small), tokenizer="sha256:" + hashlib.sha256(b"{}").hexdigest())
    (small / "manifest.json").write_bytes(canon.pretty(manifest))
    with pytest.raises(CorruptCorpusError, match=r"tokenizer\.json is missing; run `forerun tokenize` again"):
        TokenStore(small)
    (small / "tokenizer.json").write_bytes(b"{ }")
    with pytest.raises(CorruptCorpusError, match=r"tokenizer\.json does not match the manifest's hash"):
        TokenStore(small)
    (small / "tokenizer.json").write_bytes(b"{}")
    assert TokenStore(small).manifest == manifest
