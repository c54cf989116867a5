"""The Megatron-LM export's corpus: what its script writes, and what Megatron's own datasets read
from that.
"""

import dataclasses
import random
import sys

import numpy as np
import pytest
from main_run import SENTENCE
from megatron_lm_case import decision_for, spec_for
from trainer_venv import in_trainer, interpreter

from launcher.exporters.trainers import megatron_lm
from proxies.data import shards
from proxies.data.corpus import tokenize

# Megatron's builder as far as the script knows it.
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


def corpus_of(folder, weights):
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
def exported(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 4096)

    def export(weights, planned=()):
        manifest = corpus_of(tmp_path / "corpus", weights)
        known = manifest.reweighted(dict(planned)) if planned else manifest
        decision = decision_for(known, spec_for(known.data_id))
        decision = dataclasses.replace(
            decision, data=dataclasses.replace(decision.data, weights=planned)
        )
        megatron_lm.export(decision, tmp_path)
        return manifest, decision

    return export


def convert(folder, corpus, out="data"):
    (folder / "megatron/core/datasets").mkdir(parents=True, exist_ok=True)
    (folder / "megatron/core/datasets/indexed_dataset.py").write_text(STAND_IN)
    return in_trainer([sys.executable, "convert_data.py", corpus, out], folder)


@pytest.mark.parametrize("planned", [(), (("code", 0.25), ("web", 0.75))])
def test_every_source_becomes_a_file_and_keeps_its_share(tmp_path, exported, planned):
    manifest, _ = exported({"code": 0.5, "web": 0.5}, planned)
    done = convert(tmp_path, "corpus/tokens")
    assert done.returncode == 0, done.stderr
    shares = dict(planned) or manifest.weights
    told = (tmp_path / "data" / "data_args.txt").read_text().split()
    assert told == [
        word
        for name in manifest.names
        for word in (str(shares[name]), str(tmp_path / "data" / name))
    ]
    for source in manifest.sources:
        assert len(source.train) > 1
        ours = b"".join(
            (tmp_path / "corpus/tokens" / shard.file).read_bytes() for shard in source.train
        )
        assert (tmp_path / "data" / f"{source.name}.bin").read_bytes() == ours
        index = (tmp_path / "data" / f"{source.name}.idx").read_text()
        assert index == f"uint16 {[shard.num_tokens for shard in source.train]}"


def test_a_source_without_weight_is_left_out_and_one_alone_has_none(tmp_path, exported):
    exported(None, (("code", 0.0), ("web", 1.0)))
    assert convert(tmp_path, "corpus/tokens").returncode == 0
    assert (tmp_path / "data" / "data_args.txt").read_text() == str(tmp_path / "data" / "web")
    assert not (tmp_path / "data" / "code.bin").exists()


def test_another_corpus_a_damaged_one_and_a_path_with_a_space_are_refused(tmp_path, exported):
    exported(None)
    corpus_of(tmp_path / "other", {"code": 0.5, "web": 0.5})
    cases = {("other/tokens", "data"): "frozen as", ("nowhere", "data"): "does not exist"}
    cases[("corpus/tokens", "a b")] = "with a space in it"
    shard = next((tmp_path / "other/tokens").glob("web-train-*.bin"))
    for (corpus, out), said in cases.items():
        done = convert(tmp_path, corpus, out)
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (
            2,
            True,
            False,
        ), done.stderr
    shard.write_bytes(shard.read_bytes()[:-2])
    assert "the manifest says" in convert(tmp_path, "other/tokens").stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_megatrons_datasets_read_the_windows_that_we_train_on(tmp_path):
    manifest = corpus_of(tmp_path / "corpus", {"code": 0.25, "web": 0.75})
    assert all(len(source.train) == 1 for source in manifest.sources)
    megatron_lm.export(decision_for(manifest, spec_for(manifest.data_id)), tmp_path)
    python = interpreter("megatron-lm")
    samples = 200
    for command in (
        ["convert_data.py", "corpus/tokens", "data"],
        ["-c", f"SAMPLES = {samples}{READ_BACK}"],
    ):
        done = in_trainer([python, *command], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(tmp_path / "found.npy")
    windows = {}
    for source in manifest.sources:
        ids = np.fromfile(tmp_path / "corpus/tokens" / source.train[0].file, "<u2").astype(np.int64)
        windows[source.name] = {
            row.tobytes() for row in np.lib.stride_tricks.sliding_window_view(ids, 33)[::32]
        }
    drawn = {
        name: [row.tobytes() for row in found if row.tobytes() in there]
        for name, there in windows.items()
    }
    assert {name: len(rows) for name, rows in drawn.items()} == {"code": 50, "web": 150}
    # none twice: no epoch has ended
    assert all(len(set(rows)) == len(rows) for rows in drawn.values())
