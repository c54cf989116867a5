"""Tests of a main run that trains the user's own model in forerun's trainer.

The main run must train as its proxy did, also if its parameters are sharded over ranks or its
activations are recomputed. It must resume bitwise, start from the frozen initial values, and pass
the drills of a rehearsal. The planted model has parts that the built-in decoder does not have.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from main_run import QUIET_TORCH, make_decision, make_spec
from spike_case import train
from stage_case import InProcessStage

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.exporters.export_checks import ExportError
from forerun._launcher.main_run.exporters.trainers import native, torchtitan
from forerun._launcher.main_run.frozen.frozen import FrozenError, assign_groups, build_groups
from forerun._launcher.main_run.frozen.launch_file import read_launch, write_launch
from forerun._launcher.main_run.rehearsal import fault_drills, resume_drills
from forerun._launcher.main_run.rehearsal.run import set_up_rehearsal
from forerun._launcher.main_run.supervisor.launch import launch
from forerun._launcher.main_run.trainer.model_builder import load_trained_model
from forerun._launcher.study.stages.main_run_choice import freeze_model
from forerun._proxies.core.hyperparameters import UserValue
from forerun._proxies.core.programs import FactoryChangedError
from forerun._proxies.data.tokens import TokenStore, read_manifest
from forerun._proxies.external.factory import build_model, load_factory
from forerun._proxies.training.single_trial import SingleTrialEngine

pytestmark = QUIET_TORCH

# Parts that the built-in decoder lacks: buffers, a tensor kept as an attribute, experts in one
# parameter, blocks that take keyword arguments and hold numbered parts of different shapes, and
# uniform initial values.
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
    """Folder of the module `user_module`, which builds the planted model."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "user_module.py").write_text(MODEL)
    yield folder
    sys.modules.pop("user_module", None)


@pytest.fixture(scope="module")
def spec(code, corpus):
    """A run of the planted model at twice its base width."""
    decoder_spec = make_spec(read_manifest(corpus).data_id)
    user_values = (UserValue(name="expert_scale", value=0.5),)
    return dataclasses.replace(
        decoder_spec,
        hparams=dataclasses.replace(decoder_spec.hparams, own=user_values),
        factory=load_factory("user_module:build", code)[1],
    )


def make_user_model_decision(spec, code, corpus, **changes):
    """Build a decision whose main run trains a spec, with some settings of its parallelism.

    Args:
        spec: The run, whose factory builds the user's model.
        code: Folder of the factory's module.
        corpus: Folder of the tokens.
        changes: Fields of `Parallelism` by name.
    """
    parameter_numbers, model = freeze_model(spec, code)
    decision = make_decision(dataclasses.replace(spec, factory=None), read_manifest(corpus))
    return dataclasses.replace(
        decision,
        groups=build_groups(parameter_numbers),
        model=model,
        parallelism=dataclasses.replace(decision.parallelism, **changes),
    )


@pytest.fixture(scope="module")
def decision(spec, code, corpus):
    """The decision whose main run trains `spec` on one rank."""
    return make_user_model_decision(spec, code, corpus)


@pytest.fixture(scope="module")
def proxy_losses(spec, code, corpus):
    """Training losses by step, and the validation loss, of `spec` trained as a proxy."""
    return train_proxy(spec, code, corpus)


def train_proxy(spec, code, corpus):
    """Train a run in the engine of the proxies.

    Returns:
        Training losses in nats by step, and the validation loss in nats.
    """
    engine = SingleTrialEngine(
        TokenStore(corpus), device="cpu", build=functools.partial(build_model, folder=code)
    )
    engine.admit(0, spec)
    ((_, result, curve),) = engine.advance(100)
    return dict(zip(curve.steps, curve.train_loss_nats, strict=True)), result.loss_nats


def read_losses(run_dir):
    """Return the training losses of a main run by step."""
    return {
        line["step"]: line["train_loss_nats"]
        for line in metrics_file.read_lines(run_dir)
        if "train_loss_nats" in line
    }


def test_decision_has_settings_for_every_parameter(decision, tmp_path):
    model = decision.model
    assert (model.blocks, model.values) == (("layers.*",), {"expert_scale": 0.5})
    assert (model.embeddings, model.readouts) == (("embed",), ("head",))
    names = [
        name for name, _ in load_trained_model(decision, None).build_on_meta().named_parameters()
    ]
    assigned = assign_groups(decision.groups, names)
    # Numbered parts with different initial values form separate groups. `nn.Linear` draws with a
    # std of 1 / sqrt(3 * fan_in), and the second layer of the FFN has twice the fan-in.
    first, second = assigned["layers.0.ffn.0.weight"], assigned["layers.1.ffn.2.weight"]
    assert first.init_std == pytest.approx(second.init_std * 2**0.5, rel=0.02)
    assert assigned["layers.1.up"].learning_rate == pytest.approx(
        assigned["head.weight"].learning_rate / 2
    )
    assert native.find_mismatches(decision) == []
    assert read_launch(write_launch(tmp_path, decision)) == decision
    with pytest.raises(ExportError, match="your own model"):
        torchtitan.export(decision, tmp_path / "titan")


def assert_losses_agree(losses, expected_losses):
    """Assert that two runs trained the same steps with the same losses, within 1e-5 nats."""
    assert losses.keys() == expected_losses.keys()
    assert max(abs(losses[step] - expected_losses[step]) for step in losses) < 1e-5


def test_one_rank_trains_as_the_proxy_and_resumes_bitwise(
    one_rank, decision, code, corpus, proxy_losses, tmp_path
):
    train_losses, validation_loss_nats = proxy_losses
    ending = train(decision, corpus, tmp_path / "whole", code=code)
    losses = read_losses(tmp_path / "whole" / "run")
    assert_losses_agree(losses, train_losses)
    assert abs(ending.validation_loss_nats - validation_loss_nats) < 1e-5

    train(decision, corpus, tmp_path / "cut", code=code, stop_after=5)
    train(decision, corpus, tmp_path / "cut", code=code)
    assert read_losses(tmp_path / "cut" / "run") == losses


@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_llama_trains_as_its_proxy(one_rank, corpus, tmp_path, tied):
    """The example's model has rotary buffers outside its checkpoints and may tie its readout."""
    pytest.importorskip("transformers")
    folder = Path(__file__).parents[4] / "examples" / "own_model"
    decoder_spec = make_spec(read_manifest(corpus).data_id)
    spec = dataclasses.replace(
        decoder_spec,
        factory=load_factory("models:llama", folder)[1],
        shape=dataclasses.replace(decoder_spec.shape, tied=tied),
        base_shape=dataclasses.replace(decoder_spec.base_shape, tied=tied),
    )
    decision = make_user_model_decision(spec, folder, corpus)
    assert decision.model.blocks == ("model.layers.*",)
    train_losses, _ = train_proxy(spec, folder, corpus)
    train(decision, corpus, tmp_path, code=folder, stop_after=5)
    train(decision, corpus, tmp_path, code=folder)
    assert_losses_agree(read_losses(tmp_path / "run"), train_losses)
    sys.modules.pop("models", None)


@pytest.mark.parametrize("recomputed", ["full", "selective"])
def test_activation_checkpointing_changes_no_loss(
    one_rank, spec, code, corpus, proxy_losses, tmp_path, recomputed
):
    decision = make_user_model_decision(spec, code, corpus, activation_checkpointing=recomputed)
    train(decision, corpus, tmp_path, code=code)
    assert_losses_agree(read_losses(tmp_path / "run"), proxy_losses[0])


def test_wrong_initial_values_are_named(one_rank, decision, code):
    wrong_groups = tuple(
        dataclasses.replace(group, init_std=group.init_std * 1.05)
        if group.pattern == r"layers\.\d+\.up"
        else group
        for group in decision.groups
    )
    model = load_trained_model(decision, code)
    module = model.build_on_meta().to_empty(device="cpu")
    model.initialize(module)
    model.prove_initial(module)
    wrong_decision = dataclasses.replace(decision, groups=wrong_groups)
    with pytest.raises(FrozenError, match=r"layers\.\*\.up: init std"):
        load_trained_model(wrong_decision, code).prove_initial(module)


def test_changed_source_is_refused_before_it_trains(one_rank, decision, corpus, tmp_path):
    (tmp_path / "user_module.py").write_text(MODEL + "\n# changed\n")
    ending = train(decision, corpus, tmp_path, code=tmp_path)
    assert ending.event == "refused" and "user_module:build has changed" in ending.reason
    with pytest.raises(FactoryChangedError):
        native.find_mismatches(decision, tmp_path)
    sys.modules.pop("user_module", None)


def test_rehearsal_trains_a_copy_at_twice_the_base_width(
    one_rank, decision, code, corpus, tmp_path
):
    stage = set_up_rehearsal(tmp_path, decision, corpus, full=False, code_dir=code)
    copy = stage.decision
    assert copy.shape.width == 2 * decision.base_shape.width
    assert copy.model.values == {"expert_scale": 0.5}
    # Each drill runs in this process instead of a process of its own.
    stage = InProcessStage(
        **{field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
    )
    for drill in (resume_drills.compare_loss, fault_drills.inject_nan):
        observation = drill(stage)
        assert observation.passed, observation.sentence


@pytest.mark.slow
def test_two_ranks_under_the_supervisor_train_as_one(spec, code, corpus, proxy_losses, tmp_path):
    decision = make_user_model_decision(spec, code, corpus, data_parallel_shard=2)
    decision = dataclasses.replace(
        decision,
        monitoring=dataclasses.replace(
            decision.monitoring, layers_every_steps=4, replay_every_steps=4
        ),
    )
    path = write_launch(tmp_path / "frozen", decision)
    run_once = functools.partial(
        launch, path, corpus, tmp_path / "run", max_restarts=0, code_dir=code
    )
    outcome = run_once(stop_after=5)
    assert outcome.event == "stopped", outcome.reason
    outcome = run_once()
    assert outcome.event == "finished", outcome.reason
    assert_losses_agree(read_losses(tmp_path / "run"), proxy_losses[0])
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    layers = next(line["layers"] for line in lines if "layers" in line)
    assert set(layers) == {"embed", "layers.0", "layers.1", "norm", "head"}
    assert torch.isfinite(torch.tensor([layer["update_ratio"] for layer in layers.values()])).all()
