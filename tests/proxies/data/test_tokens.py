"""Tests of the token store: it checks a corpus and gives each step of training its sequences.

A sequence is a window of the corpus: `seq_len` tokens and the token after them. Windows are read in
a random order that depends on the seed and the epoch.
"""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from proxy_cases import write_corpus

from forerun._proxies.core import canon
from forerun._proxies.data import shards, tokens
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.documents import ReaderOptions
from forerun._proxies.data.permutation import permute
from forerun._proxies.data.tokens import CorruptCorpusError, DataError, TokenStore, read_manifest


@pytest.fixture
def corpus_dir(tmp_path):
    """Folder of a small corpus that a test may damage."""
    return write_corpus(tmp_path, num_documents=60, num_words=30, validation_fraction=0.2)


def read_training_ids(folder):
    """Return all token ids of the training split, from the shards of all sources."""
    manifest = read_manifest(folder)
    files = [shard.file for source in manifest.sources for shard in source.train]
    return np.concatenate([np.fromfile(folder / file, dtype=manifest.dtype) for file in files])


def get_refusal(folder):
    """Return the message with which a corpus is refused."""
    with pytest.raises(DataError) as caught:
        TokenStore(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "forerun tokenize"),
        (b"{", "is not a manifest: not JSON"),
        (b"{}", "is not a manifest: .* lacks"),
    ],
)
def test_folder_without_a_valid_manifest_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path)


def test_manifest_of_another_schema_is_refused(corpus_dir):
    text = (corpus_dir / "manifest.json").read_text()
    (corpus_dir / "manifest.json").write_text(
        text.replace('"schema_version": 3', '"schema_version": 4')
    )
    assert "schema_version = 4: must be 3: write the corpus to a new folder" in get_refusal(
        corpus_dir
    )


def test_shard_of_another_size_is_refused(corpus_dir):
    path = corpus_dir / "train-00000.bin"
    original = path.read_bytes()
    for content in (original[:-1], original[:-2], original + b"\0\0", b""):
        path.write_bytes(content)
        message = f"train-00000.bin has {len(content):,} bytes, the manifest says {len(original):,}"
        assert message in get_refusal(corpus_dir)
    path.write_bytes(original)
    assert TokenStore(corpus_dir).count_windows("train", 16) > 0


def test_shard_with_a_flipped_bit_is_refused(corpus_dir):
    path = corpus_dir / "validation-00000.bin"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(bytes(content))
    assert "validation-00000.bin does not match the manifest's hash" in get_refusal(corpus_dir)


def test_sequence_depends_only_on_seed_and_position(store):
    """The batch size decides only how the sequences are grouped into steps."""
    sequences = store.read_train_batch(seed=5, first_sequence=0, num_sequences=24, seq_len=16)
    assert sequences.dtype == np.int64 and sequences.shape == (24, 17)
    for num_sequences in (1, 3, 8):
        steps = [
            store.read_train_batch(
                seed=5, first_sequence=num_sequences * step, num_sequences=num_sequences, seq_len=16
            )
            for step in range(24 // num_sequences)
        ]
        assert np.array_equal(np.concatenate(steps), sequences)
    other_seed = store.read_train_batch(seed=6, first_sequence=0, num_sequences=24, seq_len=16)
    assert not np.array_equal(sequences, other_seed)


def test_order_of_a_single_source_depends_only_on_seed_and_epoch(corpus_dir):
    """Stored results depend on this order. Never change it."""
    store, seq_len = TokenStore(corpus_dir), 32
    num_windows = store.count_windows("train", seq_len)
    ids = read_training_ids(corpus_dir)
    batch = store.read_train_batch(
        seed=3, first_sequence=num_windows, num_sequences=num_windows, seq_len=seq_len
    )
    # The key of the permutation is the seed and the epoch. The batch is the second epoch.
    order = permute(np.arange(num_windows), num_windows, "3/1")
    for row, window in zip(batch, order, strict=True):
        assert np.array_equal(row, ids[window * seq_len : (window + 1) * seq_len + 1])
    # A batch that begins in the first epoch and ends in the third
    across_epochs = store.read_train_batch(
        seed=3, first_sequence=num_windows - 2, num_sequences=num_windows + 3, seq_len=seq_len
    )
    assert (across_epochs[2 : 2 + num_windows] == batch).all()


EXPORTED_MODULES = (
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
"""Modules that read a corpus, of those that the exporters' `export_writer.py` copies."""
BATCH = {"seed": 0, "first_sequence": 5, "num_sequences": 3, "seq_len": 16}
"""Arguments of the batch that an export reads."""
READ_SCRIPT = f"""
import sys
from pathlib import Path
from forerun._proxies.data.tokens import TokenStore
batch = TokenStore(Path(sys.argv[1])).read_train_batch(**{BATCH})
packages = {{name.split(".")[0] for name in sys.modules}}
print(batch.sum(), *sorted(packages - set(sys.stdlib_module_names)))
"""
"""Program that prints the sum of the batch, and the packages that it imported."""


def test_corpus_is_read_with_numpy_and_a_few_modules(corpus_dir, tmp_path):
    """These modules are copied into exports, where forerun is not installed."""
    source, package = Path(tokens.__file__).parents[1], tmp_path / "forerun" / "_proxies"
    for folder in ("core", "data"):
        (package / folder).mkdir(parents=True)
    for name in EXPORTED_MODULES:
        shutil.copy(source / f"{name}.py", package / f"{name}.py")
    process = subprocess.run(
        [sys.executable, "-c", READ_SCRIPT, corpus_dir],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    total, *loaded_packages = process.stdout.split()
    assert int(total) == TokenStore(corpus_dir).read_train_batch(**BATCH).sum()
    public_packages = {name for name in loaded_packages if not name.startswith("_")}
    # Some distributions of Python load these two.
    public_packages -= {"sitecustomize", "usercustomize"}
    assert public_packages <= {"numpy", "forerun"}


def test_windows_do_not_cross_shards(tmp_path, monkeypatch):
    options = {"num_documents": 40, "num_words": 30, "validation_fraction": 0.2}
    single_shard_dir = write_corpus(tmp_path / "one", **options)
    # The size of a shard is a multiple of `seq_len`. A window needs one more token, so the last
    # `seq_len` tokens of a shard begin no window.
    seq_len = 16
    shard_tokens = 19 * seq_len
    monkeypatch.setattr(shards, "SHARD_TOKENS", shard_tokens)
    folder = write_corpus(tmp_path / "many", **options)
    store = TokenStore(folder)
    shard_ids = [np.fromfile(folder / s.file, dtype="<u2") for s in store.manifest.sources[0].train]
    assert np.array_equal(np.concatenate(shard_ids), read_training_ids(single_shard_dir))
    assert len(shard_ids) > 5 and all(len(ids) == shard_tokens for ids in shard_ids[:-1])

    windows = set()
    for ids in shard_ids:
        for start in range(0, (len(ids) - 1) // seq_len * seq_len, seq_len):
            windows.add(tuple(ids[start : start + seq_len + 1]))
    num_windows = store.count_windows("train", seq_len)
    assert num_windows == sum((len(ids) - 1) // seq_len for ids in shard_ids)
    batch = store.read_train_batch(
        seed=0, first_sequence=0, num_sequences=num_windows, seq_len=seq_len
    )
    assert {tuple(row) for row in batch} == windows


def test_validation_batch_is_evenly_spread_and_always_the_same(store):
    batch = store.read_validation_batch(num_sequences=10, seq_len=16)
    assert np.array_equal(batch, store.read_validation_batch(num_sequences=10, seq_len=16))
    num_windows = store.count_windows("validation", 16)
    all_windows = store.read_validation_batch(num_sequences=num_windows, seq_len=16)
    assert np.array_equal(batch, all_windows[[i * num_windows // 10 for i in range(10)]])
    with pytest.raises(
        DataError,
        match=f"holds {num_windows:,} windows of 16 tokens: {num_windows + 1:,} are needed",
    ):
        store.read_validation_batch(num_sequences=num_windows + 1, seq_len=16)


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory):
    """Folder of a mixture of three sources without a common character.

    Each token but the end of a document identifies its source.
    """
    folder = tmp_path_factory.mktemp("mixture")
    rng = np.random.default_rng(0)
    for name, letters, size in (("web", "abc", 4000), ("code", "xyz", 900), ("math", "123", 2500)):
        (folder / name).mkdir()
        for number in range(12):
            (folder / name / f"{number}.txt").write_text("".join(rng.choice(list(letters), size)))
    named = {name: [folder / name] for name in ("web", "code", "math")}
    tokenize(
        named,
        folder / "out",
        validation_fraction=0.3,
        weights={"web": 0.5, "code": 0.3, "math": 0.2},
    )
    return folder / "out"


def identify_sources(batch_BT):
    """Return the source of each row."""
    sources = {
        **dict.fromkeys(b"abc", "web"),
        **dict.fromkeys(b"xyz", "code"),
        **dict.fromkeys(b"123", "math"),
    }
    # The token 0 is the end of a document.
    return [{sources[token] for token in row if token}.pop() for row in batch_BT.tolist()]


def test_mixture_keeps_its_weights_in_every_prefix(mixture_dir):
    store = TokenStore(mixture_dir)
    assert store.manifest.weights == {"web": 0.5, "code": 0.3, "math": 0.2}
    batch = store.read_train_batch(seed=1, first_sequence=0, num_sequences=400, seq_len=16)
    row_sources = identify_sources(batch)
    for name, weight in store.manifest.weights.items():
        counts = np.cumsum([source == name for source in row_sources])
        assert np.abs(counts - weight * np.arange(1, 401)).max() < 2


def test_sources_of_equal_size_have_different_orders(tmp_path):
    for number, name in enumerate("ab"):
        # Eight documents of 999 ids that count up, and the end id
        first_id = number * 20_000
        documents = [
            [*range(start, start + 999), 50_256] for start in range(first_id, first_id + 8000, 1000)
        ]
        (tmp_path / f"{name}.bin").write_bytes(np.array(documents, dtype="<u2").tobytes())
    named = {name: [tmp_path / f"{name}.bin"] for name in "ab"}
    tokenize(
        named,
        tmp_path / "out",
        reading=ReaderOptions(vocab_size=50_257),
        validation_fraction=1e-5,
    )
    store = TokenStore(tmp_path / "out")
    # At this fraction, one document of each source is for validation.
    assert [source.count_tokens("train") for source in store.manifest.sources] == [7000, 7000]
    batch = store.read_train_batch(seed=0, first_sequence=0, num_sequences=100, seq_len=10)
    # Equal weights alternate the sources. The first token identifies a window.
    orders = []
    for number, name in enumerate("ab"):
        ids = np.fromfile(tmp_path / "out" / f"{name}-train-00000.bin", dtype="<u2")
        window_starts = ids[::10].tolist()
        orders.append([window_starts.index(token) for token in batch[number::2, 0].tolist()])
    assert orders[0] != orders[1]


def test_other_weights_give_another_corpus(mixture_dir):
    stored = read_manifest(mixture_dir)
    store = TokenStore(mixture_dir, weights={"web": 0, "code": 1, "math": 3})
    assert store.manifest.weights == {"web": 0.0, "code": 0.25, "math": 0.75}
    assert store.manifest.data_id != stored.data_id
    assert store.manifest == stored.reweight({"math": 30, "code": 10, "web": 0})
    assert stored.reweight(stored.weights).data_id == stored.data_id
    thirds = stored.reweight({"web": 1 / 3, "code": 1 / 3, "math": 1 / 3})
    assert thirds == thirds.reweight(thirds.weights)
    assert thirds == stored.reweight(dict.fromkeys(stored.names, 7))
    batch = store.read_train_batch(seed=1, first_sequence=0, num_sequences=40, seq_len=16)
    row_sources = identify_sources(batch)
    assert [row_sources.count(name) for name in ("web", "code", "math")] == [0, 10, 30]
    with pytest.raises(DataError) as caught:
        TokenStore(mixture_dir, weights={"wbe": 1, "web": -1, "code": float("inf")})
    assert len(caught.value.problems) == 4
    with pytest.raises(DataError, match="add up to 0"):
        stored.reweight(dict.fromkeys(stored.names, 0.0))


def test_missing_or_changed_tokenizer_is_refused(corpus_dir):
    manifest = dataclasses.replace(
        read_manifest(corpus_dir), tokenizer="sha256:" + hashlib.sha256(b"{}").hexdigest()
    )
    (corpus_dir / "manifest.json").write_bytes(canon.to_pretty_json(manifest))
    with pytest.raises(
        CorruptCorpusError, match=r"tokenizer\.json is missing; run `forerun tokenize` again"
    ):
        TokenStore(corpus_dir)
    (corpus_dir / "tokenizer.json").write_bytes(b"{ }")
    with pytest.raises(
        CorruptCorpusError, match=r"tokenizer\.json does not match the manifest's hash"
    ):
        TokenStore(corpus_dir)
    (corpus_dir / "tokenizer.json").write_bytes(b"{}")
    assert TokenStore(corpus_dir).manifest == manifest
