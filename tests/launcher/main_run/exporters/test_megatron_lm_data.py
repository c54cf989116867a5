"""Tests of convert_data.py, the script of the Megatron-LM export that converts a corpus of forerun.

The tests check the files that the script writes, and the windows that Megatron reads from them.
"""

import dataclasses
import random
import sys

import numpy as np
import pytest
from main_run import SENTENCE
from megatron_lm_case import make_megatron_decision, make_megatron_spec
from trainer_venv import require_interpreter, run_in_trainer

from forerun._launcher.main_run.exporters.trainers import megatron_lm
from forerun._proxies.data import shards
from forerun._proxies.data.corpus import tokenize

STAND_IN = """
import numpy as np
class IndexedDatasetBuilder:
    def __init__(self, path, dtype):
        self.file, self.dtype, self.lengths = open(path, "wb"), dtype, []
    def add_document(self, tokens, lengths):
        self.file.write(np.array(tokens, dtype=self.dtype).tobytes())
        self.lengths += lengths
    def finalize(self, path):
        self.file.close()
        open(path, "w").write(f"{self.dtype.__name__} {self.lengths}")
"""
"""Module that stands in for Megatron's builder, with the methods that convert_data.py uses."""

READ_BACK = """
import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.tokenizers import MegatronTokenizer
blend = get_blend_from_list(open("data/data_args.txt").read().split())
tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=256)
config = GPTDatasetConfig(
    random_seed=8, sequence_length=32, blend=blend, split="1,0,0", path_to_cache="cache", tokenizer=tokenizer,
    reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
)
train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, [SAMPLES, 0, 0], lambda: True, config).build()
rows = [train[i] for i in range(SAMPLES)]
assert all(row["loss_mask"].all() for row in rows)
np.save("found.npy", [[*row["tokens"].tolist(), row["labels"][-1].item()] for row in rows])
"""  # noqa: E501


def tokenize_two_sources(folder, weights):
    """Write and tokenize two sources of thirty documents."""
    draw = random.Random(0)
    for name in ("code", "web"):
        (folder / name).mkdir(parents=True)
        for document in range(30):
            (folder / name / f"{document}.txt").write_text(
                " ".join(draw.choices(SENTENCE.split(), k=120))
            )
    sources = {name: [folder / name] for name in ("code", "web")}
    return tokenize(sources, folder / "tokens", validation_fraction=0.2, weights=weights)


@pytest.fixture
def export_corpus(tmp_path, monkeypatch):
    """Function that tokenizes a corpus with some weights of its sources, and exports a decision.

    If `planned` is given, the decision has these weights instead of those of the corpus.
    """
    monkeypatch.setattr(shards, "SHARD_TOKENS", 4096)

    def export(weights, planned=()):
        manifest = tokenize_two_sources(tmp_path / "corpus", weights)
        planned_manifest = manifest.reweight(dict(planned)) if planned else manifest
        spec = make_megatron_spec(planned_manifest.data_id)
        decision = make_megatron_decision(planned_manifest, spec)
        decision = dataclasses.replace(
            decision, data=dataclasses.replace(decision.data, weights=planned)
        )
        megatron_lm.export(decision, tmp_path)
        return manifest, decision

    return export


def convert_corpus(folder, corpus, out="data"):
    """Run the export's conversion script with a stand-in for Megatron's builder."""
    (folder / "megatron/core/datasets").mkdir(parents=True, exist_ok=True)
    (folder / "megatron/core/datasets/indexed_dataset.py").write_text(STAND_IN)
    return run_in_trainer([sys.executable, "convert_data.py", corpus, out], folder)


@pytest.mark.parametrize("planned", [(), (("code", 0.25), ("web", 0.75))])
def test_every_source_becomes_a_file_with_its_weight(tmp_path, export_corpus, planned):
    manifest, _ = export_corpus({"code": 0.5, "web": 0.5}, planned)
    process = convert_corpus(tmp_path, "corpus/tokens")
    assert process.returncode == 0, process.stderr
    weights = dict(planned) or manifest.weights
    words = (tmp_path / "data" / "data_args.txt").read_text().split()
    expected_words = []
    for name in manifest.names:
        expected_words += [str(weights[name]), str(tmp_path / "data" / name)]
    assert words == expected_words
    for source in manifest.sources:
        assert len(source.train) > 1
        content = b"".join(
            (tmp_path / "corpus/tokens" / shard.file).read_bytes() for shard in source.train
        )
        assert (tmp_path / "data" / f"{source.name}.bin").read_bytes() == content
        index = (tmp_path / "data" / f"{source.name}.idx").read_text()
        assert index == f"uint16 {[shard.num_tokens for shard in source.train]}"


def test_source_with_weight_zero_is_left_out(tmp_path, export_corpus):
    export_corpus(None, (("code", 0.0), ("web", 1.0)))
    assert convert_corpus(tmp_path, "corpus/tokens").returncode == 0
    assert (tmp_path / "data" / "data_args.txt").read_text() == str(tmp_path / "data" / "web")
    assert not (tmp_path / "data" / "code.bin").exists()


def test_wrong_or_damaged_corpus_and_path_with_a_space_are_refused(tmp_path, export_corpus):
    export_corpus(None)
    tokenize_two_sources(tmp_path / "other", {"code": 0.5, "web": 0.5})
    cases = {("other/tokens", "data"): "frozen as", ("nowhere", "data"): "does not exist"}
    cases[("corpus/tokens", "a b")] = "with a space in it"
    shard = next((tmp_path / "other/tokens").glob("web-train-*.bin"))
    for (corpus, out), message in cases.items():
        process = convert_corpus(tmp_path, corpus, out)
        assert process.returncode == 2, process.stderr
        assert message in process.stderr and "Traceback" not in process.stderr
    shard.write_bytes(shard.read_bytes()[:-2])
    assert "the manifest says" in convert_corpus(tmp_path, "other/tokens").stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_megatrons_datasets_read_the_windows_of_the_embedded_trainer(tmp_path):
    manifest = tokenize_two_sources(tmp_path / "corpus", {"code": 0.25, "web": 0.75})
    assert all(len(source.train) == 1 for source in manifest.sources)
    megatron_lm.export(
        make_megatron_decision(manifest, make_megatron_spec(manifest.data_id)), tmp_path
    )
    python = require_interpreter("megatron-lm")
    samples = 200
    for command in (
        ["convert_data.py", "corpus/tokens", "data"],
        ["-c", f"SAMPLES = {samples}{READ_BACK}"],
    ):
        process = run_in_trainer([python, *command], tmp_path)
        assert process.returncode == 0, process.stderr[-3000:]
    rows = np.load(tmp_path / "found.npy")
    # Every row that Megatron reads is a window of 33 tokens of one source, at a multiple of 32.
    windows_read = {}
    for source in manifest.sources:
        ids = np.fromfile(tmp_path / "corpus/tokens" / source.train[0].file, "<u2").astype(np.int64)
        windows = {
            window.tobytes() for window in np.lib.stride_tricks.sliding_window_view(ids, 33)[::32]
        }
        windows_read[source.name] = [row.tobytes() for row in rows if row.tobytes() in windows]
    assert {name: len(windows) for name, windows in windows_read.items()} == {
        "code": 50,
        "web": 150,
    }
    # No window is read twice, because no epoch has ended.
    assert all(len(set(windows)) == len(windows) for windows in windows_read.values())
