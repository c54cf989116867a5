"""The example with models of one's own: a Hugging Face Llama and a transformer in plain torch, through the factory."""

import dataclasses
import sys
import warnings
from pathlib import Path

import pytest
import torch
from factory_cases import factory_spec
from proxy_cases import write_corpus
from torch.nn import functional

from launcher.plan.file import load_plan
from proxies.coordinates.coordinates import check_coordinates
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.data.tokens import TokenStore
from proxies.external.construction import construct
from proxies.external.description import describe
from proxies.external.factory import build_model, load, size_note
from proxies.parametrization.parametrization import forward_numbers, parameter_table
from proxies.training.solo import Solo

FOLDER = Path(__file__).parents[1] / "examples" / "own_model"
BASE = Shape(num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=256, seq_len=16)
OURS = {
    "embed_tokens": "tok_embeddings", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn": "attention", "mlp": "feed_forward",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    """The example's function and what names it; importing transformers takes seconds."""
    path, modules = list(sys.path), dict(sys.modules)
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # mup installs it; beside another build of torch it breaks transformers
        sys.modules["torchvision"] = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        yield load("models:llama", FOLDER)
    sys.path[:] = path
    if modules.get("torchvision") is None:
        sys.modules.pop("torchvision", None)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return TokenStore(write_corpus(tmp_path_factory.mktemp("corpus")))


def family_name(name):
    """A parameter of Hugging Face's by our decoder's name for it."""
    return ".".join(OURS.get(part, part) for part in name.removeprefix("model.").split("."))


@pytest.mark.parametrize(("name", "tied"), [("completep", False), ("umup", True)])
def test_every_parameter_of_a_hugging_face_llama_is_what_ours_is(llama, name, tied):
    base = dataclasses.replace(BASE, tied=tied)
    spec = factory_spec(base.at_width(128).at_depth(4), base, name)
    described = describe(llama[0], spec)
    ours = {numbers.name: numbers for numbers in parameter_table(spec)}
    assert {family_name(numbers.name) for numbers in described.numbers} == ours.keys()
    for numbers in described.numbers:
        theirs = ours[family_name(numbers.name)]
        same = ("size", "kind", "width_multiplier", "learning_rate", "weight_decay", "eps")
        assert [getattr(numbers, n) for n in same] == [getattr(theirs, n) for n in same], numbers.name
    assert (described.embeddings, described.readouts) == (("model.embed_tokens",), ("lm_head",))


def bare(shape, **config):
    """Hugging Face's own, with its own initial values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.width,
            intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            vocab_size=shape.vocab_size,
            max_position_embeddings=shape.seq_len,
            tie_word_embeddings=shape.tied,
            **config,
        )
    )


@pytest.mark.parametrize("tied", [False, True])
def test_at_the_base_its_logits_are_hugging_faces_own(llama, tied):
    base = dataclasses.replace(BASE, tied=tied)
    built = build_model(factory_spec(base, base, factory=llama[1], seed=7), FOLDER)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        own = bare(base, initializer_range=32**-0.5).train()
        if not tied:
            torch.nn.init.normal_(own.model.embed_tokens.weight)
    ids = torch.randint(256, (3, 16))
    assert torch.equal(built(ids), own(ids).logits.flatten(0, 1))


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("tied", [False, True])
def test_at_four_times_the_width_hugging_faces_stds_are_halved_in_the_blocks_and_kept_elsewhere(tied):
    """It starts every matrix from normal(0, 0.02), whatever its width."""
    base = dataclasses.replace(BASE, tied=tied)
    described = describe(bare, factory_spec(base.at_width(128), base))
    module = construct(bare, base.at_width(128), seed=3)
    for numbers in described.numbers:
        factor = described.factors[numbers.name]
        parameter = module.get_parameter(numbers.name).detach() * factor
        wanted = {"hidden": 0.01, "embedding": 0.02, "readout": 0.02}.get(numbers.kind)
        if wanted is None:
            assert torch.equal(parameter, torch.ones(128)), numbers.name
            continue
        assert numbers.init_std == pytest.approx(wanted, rel=0.01)
        assert parameter.std().item() == pytest.approx(wanted, rel=4 / (2 * parameter.numel()) ** 0.5)
        assert factor == pytest.approx(wanted / 0.02, rel=0.01)


def test_its_multipliers_reach_attention_branches_and_readout(llama):
    """Heads twice as wide, twice the blocks: against Hugging Face's own with the numbers written into it."""
    wide = dataclasses.replace(BASE, width=64, ffn_width=128).at_depth(4)
    spec = factory_spec(wide, BASE, "completep", factory=llama[1], output_multiplier=3.0, dtype="float64")
    built, forward = build_model(spec, FOLDER), forward_numbers(spec)
    assert forward.attention == pytest.approx(8**0.5 / 16)
    assert (forward.residual, forward.output) == (0.5, 1.5)
    plain = dataclasses.replace(forward, residual=1.0, output=1.0)
    own = llama[0](wide, plain).double()
    own.load_state_dict(built.module.state_dict())
    for block in own.model.layers:
        block.self_attn.o_proj.weight.data.mul_(0.5)
        block.mlp.down_proj.weight.data.mul_(0.5)
    own.lm_head.weight.data.mul_(1.5)
    ids = torch.randint(256, (2, 16))
    assert torch.allclose(built(ids), own(ids).logits.flatten(0, 1), rtol=1e-9, atol=1e-12)
    loss = functional.cross_entropy(built(ids), ids.flatten())
    loss.backward()
    assert all(parameter.grad is not None for parameter in built.module.parameters())


def test_dropout_in_a_hugging_face_model_is_refused(llama):
    def build(shape, forward):
        model = llama[0](shape, forward)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        return model

    with pytest.raises(ValueError, match="other logits at every call, as dropout does"):
        describe(build, factory_spec(BASE, BASE))


def test_the_plain_model_is_described_and_said_to_be_of_another_size():
    build, factory = load("plain:Transformer", FOLDER)
    spec = factory_spec(BASE.at_width(128), BASE, factory=factory)
    described = describe(build, spec)
    kinds = {numbers.name: numbers.kind for numbers in described.numbers}
    assert kinds["positions.weight"] == kinds["tokens.weight"] == "embedding"
    assert kinds["blocks.0.qkv.weight"] == "hidden"
    assert (described.embeddings, described.readouts) == (("tokens", "positions"), ("readout",))
    assert "plain:Transformer has 331,776 parameters at width 128" in size_note(spec, FOLDER)


def test_the_plan_is_a_plan():
    plan = load_plan(FOLDER / "plan.toml")
    assert plan.proxy.factory == "models:llama"
    assert plan.alone


def spec_on(store, factory, width, *, seed=0, num_steps=12, name="mup"):
    spec = factory_spec(BASE.at_width(width), BASE, name, factory=factory, seed=seed)
    return dataclasses.replace(
        spec, data_id=store.manifest.data_id, schedule=Schedule(kind="constant", num_steps=num_steps)
    )


@pytest.mark.parametrize("target", ["models:llama", "plain:Transformer"])
@pytest.mark.usefixtures("llama")
def test_both_train(target, store):
    spec = spec_on(store, load(target, FOLDER)[1], 64)
    losses = []
    for _ in range(2):
        solo = Solo(store, build=lambda run: build_model(run, FOLDER), device="cpu")
        solo.admit(0, spec)
        ((_, result, curve),) = solo.advance(12)
        assert result.status == "finished", result.reason
        assert curve.train_loss_nats[-1] < curve.train_loss_nats[0] - 0.5
        losses.append(curve.train_loss_nats)
    assert losses[0] == losses[1], "a run repeats bit by bit"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "outcome"), [("mup", "passes"), ("sp", "blows_up")])
def test_the_coordinate_check_sees_what_a_llamas_widths_do(llama, store, name, outcome):
    specs = [
        [spec_on(store, llama[1], width, seed=seed, num_steps=6, name=name) for seed in range(3)]
        for width in (32, 64, 128, 256)
    ]
    found = check_coordinates(specs, store, build=lambda run: build_model(run, FOLDER))
    assert found.outcome == outcome, [(layer.layer, layer.outcome, layer.slope) for layer in found.layers]
