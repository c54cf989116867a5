"""The example with models of one's own: a Hugging Face Llama and a transformer in plain torch,
through the factory.
"""

import dataclasses
import sys
import warnings
from pathlib import Path

import pytest
import torch
from factory_cases import factory_spec
from proxy_cases import write_corpus

from launcher.plan.file import load_plan
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.data.tokens import TokenStore
from proxies.external.construction import construct
from proxies.external.description import describe
from proxies.external.factory import build_model, load
from proxies.parametrization.parametrization import parameter_table
from proxies.training.solo import Solo

FOLDER = Path(__file__).parents[1] / "examples" / "own_model"
BASE = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=256, seq_len=16
)
OURS = {
    "embed_tokens": "tok_embeddings",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "mlp": "feed_forward",
}


@pytest.fixture(scope="module")
def llama():
    """The example's function and what names it; importing transformers takes seconds."""
    path, modules = list(sys.path), dict(sys.modules)
    try:
        import torchvision  # noqa: F401
    except (
        ImportError,
        RuntimeError,
    ):  # mup installs it; beside another build of torch it breaks transformers
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
        same = ("size", "kind", "width_multiplier", "optimizer", "settings")
        assert [getattr(numbers, n) for n in same] == [getattr(theirs, n) for n in same], (
            numbers.name
        )
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
def test_at_four_times_the_width_hugging_faces_stds_are_halved_in_the_blocks_and_kept_elsewhere(
    tied,
):
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
        assert parameter.std().item() == pytest.approx(
            wanted, rel=4 / (2 * parameter.numel()) ** 0.5
        )
        assert factor == pytest.approx(wanted / 0.02, rel=0.01)


def test_the_plan_is_a_plan():
    plan = load_plan(FOLDER / "plan.toml")
    assert plan.proxy.factory == "models:llama"
    assert plan.alone


def spec_on(store, factory, width, *, seed=0, num_steps=12, name="mup"):
    spec = factory_spec(BASE.at_width(width), BASE, name, factory=factory, seed=seed)
    return dataclasses.replace(
        spec,
        data_id=store.manifest.data_id,
        schedule=Schedule(kind="constant", num_steps=num_steps),
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
