"""A user's own model in the embedded trainer: equal to its proxy, sharded, resumed bitwise, proven,
rehearsed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from care_case import train
from main_run import QUIET_TORCH, decision_of, spec_of
from stage_case import HereStage

from launcher.base import metrics
from launcher.exporters.fidelity import ExportError
from launcher.exporters.trainers import native, torchtitan
from launcher.frozen.frozen import FrozenError, assign_groups, groups_of
from launcher.frozen.launch_file import read_launch, write_launch
from launcher.rehearsal import fault_drills, resume_drills
from launcher.rehearsal.run import set_up
from launcher.study.decide import frozen_model
from launcher.supervisor.launch import launch
from launcher.trainer.trained_model import trained_model
from proxies.core.hyperparameters import OwnValue
from proxies.core.programs import FactoryChangedError
from proxies.data.tokens import TokenStore, read_manifest
from proxies.external.factory import build_model, load
from proxies.training.solo import Solo

pytestmark = QUIET_TORCH

# What a decoder of ours has not: buffers, a tensor kept as an attribute, experts in one parameter,
# blocks that take keywords and hold numbered parts of different shapes, uniform initial values.
MODEL = """
import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self, shape, scale):
        super().__init__()
        d, f = shape.width, shape.ffn_width
        self.norm = nn.LayerNorm(d)
        self.mix = nn.Linear(d, d, bias=False)
        self.ffn = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))
        self.up = nn.Parameter((2 * torch.rand(2, d, f) - 1) * d**-0.5)
        self.down = nn.Parameter((2 * torch.rand(2, f, d) - 1) * f**-0.5 * scale)

    def forward(self, x, *, mask):
        y = self.norm(x)
        x = x + self.mix(mask @ y)
        hidden = functional.silu(torch.einsum("btd,edf->betf", y, self.up))
        return x + self.ffn(y) + torch.einsum("betf,efd->btd", hidden, self.down)

class Model(nn.Module):
    def __init__(self, shape, scale):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = torch.linspace(-1, 1, shape.seq_len)[:, None]
        mask = torch.ones(shape.seq_len, shape.seq_len).tril()
        self.register_buffer("mask", mask / mask.sum(1, keepdim=True), persistent=False)
        self.layers = nn.ModuleList(Block(shape, scale) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids):
        T = ids.shape[1]
        x = self.embed(ids) + self.positions[:T]
        for layer in self.layers:
            x = layer(x, mask=self.mask[:T, :T])
        return Output(self.head(self.norm(x)))

class Output:
    def __init__(self, logits):
        self.logits = logits

def build(shape, expert_scale=1.0):
    return Model(shape, expert_scale)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "theirs.py").write_text(MODEL)
    yield folder
    sys.modules.pop("theirs", None)


@pytest.fixture(scope="module")
def spec(code, corpus):
    """A run of that model at twice its base width."""
    plain = spec_of(read_manifest(corpus).data_id)
    own = (OwnValue(name="expert_scale", value=0.5),)
    return dataclasses.replace(
        plain,
        hparams=dataclasses.replace(plain.hparams, own=own),
        factory=load("theirs:build", code)[1],
    )


def frozen(spec, code, corpus, **changes):
    """The decision whose main run this is."""
    table, model = frozen_model(spec, code)
    plain = decision_of(dataclasses.replace(spec, factory=None), read_manifest(corpus))
    layout = dataclasses.replace(plain.parallelism, **changes)
    return dataclasses.replace(plain, groups=groups_of(table), model=model, parallelism=layout)


@pytest.fixture(scope="module")
def decision(spec, code, corpus):
    return frozen(spec, code, corpus)


@pytest.fixture(scope="module")
def proxy(spec, code, corpus):
    """Losses by step and validation loss of the same run as a proxy."""
    solo = Solo(TokenStore(corpus), device="cpu", build=partial(build_model, folder=code))
    solo.admit(0, spec)
    ((_, result, curve),) = solo.advance(100)
    return dict(zip(curve.steps, curve.train_loss_nats, strict=True)), result.loss_nats


def curve(run_dir):
    return {
        line["step"]: line["train_loss_nats"]
        for line in metrics.read(run_dir)
        if "train_loss_nats" in line
    }


def test_the_frozen_model_has_numbers_for_every_parameter(decision, tmp_path):
    model = decision.model
    assert (model.blocks, model.values) == (("layers.*",), {"expert_scale": 0.5})
    assert (model.embeddings, model.readouts) == (("embed",), ("head",))
    names = [name for name, _ in trained_model(decision, None).outline().named_parameters()]
    assigned = assign_groups(decision.groups, names)
    # Parts of a numbered list that start otherwise are groups of their own.
    first, second = assigned["layers.0.ffn.0.weight"], assigned["layers.1.ffn.2.weight"]
    assert first.init_std == pytest.approx(second.init_std * 2**0.5, rel=0.02)
    assert assigned["layers.1.up"].learning_rate == pytest.approx(
        assigned["head.weight"].learning_rate / 2
    )
    assert native.parity(decision) == []
    assert read_launch(write_launch(tmp_path, decision)) == decision
    with pytest.raises(ExportError, match="your own model"):
        torchtitan.export(decision, tmp_path / "titan")


def test_one_rank_trains_as_the_proxy_did_and_resumes_bitwise(
    one_rank, decision, code, corpus, proxy, tmp_path
):
    losses, validation = proxy
    ending = train(decision, corpus, tmp_path / "whole", code=code)
    mine = curve(tmp_path / "whole" / "run")
    assert mine.keys() == losses.keys()
    assert max(abs(mine[step] - losses[step]) for step in mine) < 1e-5
    assert abs(ending.validation_loss_nats - validation) < 1e-5
    train(decision, corpus, tmp_path / "cut", code=code, stop_after=5)
    train(decision, corpus, tmp_path / "cut", code=code)
    assert curve(tmp_path / "cut" / "run") == mine


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_llama_trains_as_its_proxy(one_rank, corpus, tmp_path, tied):
    """The example's: rotary buffers that no checkpoint holds, blocks that take keywords, a tied
    readout.
    """
    pytest.importorskip("transformers")
    folder = Path(__file__).parents[2] / "examples" / "own_model"
    plain = spec_of(read_manifest(corpus).data_id)
    shapes = {
        name: dataclasses.replace(getattr(plain, name), tied=tied)
        for name in ("shape", "base_shape")
    }
    spec = dataclasses.replace(plain, factory=load("models:llama", folder)[1], **shapes)
    decision = frozen(spec, folder, corpus)
    assert decision.model.blocks == ("model.layers.*",)
    solo = Solo(TokenStore(corpus), device="cpu", build=partial(build_model, folder=folder))
    solo.admit(0, spec)
    ((_, _, wanted),) = solo.advance(100)
    train(decision, corpus, tmp_path, code=folder, stop_after=5)
    train(decision, corpus, tmp_path, code=folder)
    mine = curve(tmp_path / "run")
    assert tuple(mine) == wanted.steps
    assert (
        max(abs(a - b) for a, b in zip(mine.values(), wanted.train_loss_nats, strict=True)) < 1e-5
    )
    sys.modules.pop("models", None)


@pytest.mark.parametrize("recomputed", ["full", "selective"])
def test_recomputing_changes_no_loss(one_rank, spec, code, corpus, proxy, tmp_path, recomputed):
    decision = frozen(spec, code, corpus, activation_checkpointing=recomputed)
    train(decision, corpus, tmp_path, code=code)
    assert max(abs(loss - proxy[0][step]) for step, loss in curve(tmp_path / "run").items()) < 1e-5


def test_wrong_initial_values_are_named(one_rank, decision, code, corpus, tmp_path):
    wrong = tuple(
        dataclasses.replace(group, init_std=group.init_std * 1.05)
        if "up" in group.pattern
        else group
        for group in decision.groups
    )
    live = trained_model(decision, code)
    module = live.outline().to_empty(device="cpu")
    live.initialize(module)
    live.prove_initial(module)
    other = trained_model(dataclasses.replace(decision, groups=wrong), code)
    with pytest.raises(FrozenError, match=r"layers\.\*\.(up|ffn.0.weight|mix.weight): init std"):
        other.prove_initial(module)


def test_another_source_is_refused_before_it_trains(one_rank, decision, corpus, tmp_path):
    (tmp_path / "theirs.py").write_text(MODEL + "\n# another\n")
    ending = train(decision, corpus, tmp_path, code=tmp_path)
    assert ending.event == "refused" and "theirs:build has changed" in ending.reason
    with pytest.raises(FactoryChangedError):
        native.parity(decision, tmp_path)
    sys.modules.pop("theirs", None)


def test_the_rehearsals_copy_is_the_proxys(one_rank, decision, code, corpus, tmp_path):
    stage = set_up(tmp_path, decision, corpus, full=False, code_dir=code)
    copy = stage.scaled.decision
    assert copy.shape.width == 2 * decision.base_shape.width
    assert copy.model.values == {"expert_scale": 0.5}
    stage = HereStage(
        **{field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
    )
    for drill in (resume_drills.loss, fault_drills.nan):
        found = drill(stage)
        assert found.outcome == "passed", found.said


@pytest.mark.slow
def test_two_ranks_under_the_supervisor_train_as_one(spec, code, corpus, proxy, tmp_path):
    decision = frozen(spec, code, corpus, data_parallel_shard=2)
    decision = dataclasses.replace(
        decision,
        monitoring=dataclasses.replace(
            decision.monitoring, layers_every_steps=4, replay_every_steps=4
        ),
    )
    path = write_launch(tmp_path / "frozen", decision)
    half = launch(path, corpus, tmp_path / "run", 5, 0, code_dir=code)
    assert half.event == "stopped", half.reason
    whole = launch(path, corpus, tmp_path / "run", None, 0, code_dir=code)
    assert whole.event == "finished", whole.reason
    assert max(abs(loss - proxy[0][step]) for step, loss in curve(tmp_path / "run").items()) < 1e-5
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    layers = next(line["layers"] for line in lines if "layers" in line)
    assert set(layers) == {"embed", "layers.0", "layers.1", "norm", "head"}
    assert torch.isfinite(torch.tensor([layer["update_ratio"] for layer in layers.values()])).all()
