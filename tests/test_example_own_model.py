"""Tests of examples/own_model: a Hugging Face Llama and a plain torch transformer as factories.

The Llama must get the same parametrization as the built-in decoder of the same shape.
"""

import dataclasses
import sys
import warnings
from pathlib import Path

import pytest
import torch
from factory_cases import make_factory_spec
from proxy_cases import write_corpus

from forerun._launcher.study.plan.file import load_plan
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.external.construction import construct
from forerun._proxies.external.description import describe_model
from forerun._proxies.external.factory import build_model, load_factory
from forerun._proxies.parametrization.parametrization import compute_parameter_table
from forerun._proxies.training.single_trial import SingleTrialEngine

FOLDER = Path(__file__).parents[1] / "examples" / "own_model"
BASE = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=256, seq_len=16
)
BUILT_IN_NAMES = {
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
"""Part of a parameter's name in the built-in decoder, by the part in Hugging Face's Llama."""


@pytest.fixture(scope="module")
def llama():
    """The function that builds the example's Llama, and its `Factory` record.

    transformers is imported once. Changes of the import system are undone afterwards.
    """
    path, modules = list(sys.path), dict(sys.modules)
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        # mup installs torchvision; if it does not fit the build of torch, transformers fails too.
        sys.modules["torchvision"] = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        yield load_factory("models:llama", FOLDER)
    sys.path[:] = path
    if modules.get("torchvision") is None:
        sys.modules.pop("torchvision", None)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Token store of a small corpus."""
    return TokenStore(write_corpus(tmp_path_factory.mktemp("corpus")))


def to_built_in_name(name):
    """Return the built-in decoder's name of a parameter of Hugging Face's Llama."""
    parts = name.removeprefix("model.").split(".")
    return ".".join(BUILT_IN_NAMES.get(part, part) for part in parts)


@pytest.mark.parametrize(("name", "tied"), [("completep", False), ("umup", True)])
def test_every_parameter_of_the_llama_has_the_built_in_settings(llama, name, tied):
    base = dataclasses.replace(BASE, tied=tied)
    spec = make_factory_spec(base.at_width(128).at_depth(4), base, name)
    build_llama, _ = llama
    described = describe_model(build_llama, spec)
    built_in = {row.name: row for row in compute_parameter_table(spec)}
    assert {to_built_in_name(row.name) for row in described.numbers} == built_in.keys()
    for row in described.numbers:
        expected = built_in[to_built_in_name(row.name)]
        for setting in ("size", "kind", "width_multiplier", "optimizer", "settings"):
            assert getattr(row, setting) == getattr(expected, setting), (row.name, setting)
    assert (described.embeddings, described.readouts) == (("model.embed_tokens",), ("lm_head",))


def build_hugging_face_llama(shape, **config):
    """Build Hugging Face's Llama with Hugging Face's initial values."""
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
def test_llama_at_the_base_width_has_the_logits_of_hugging_face(llama, tied):
    base = dataclasses.replace(BASE, tied=tied)
    _, factory = llama
    built = build_model(make_factory_spec(base, base, factory=factory, seed=7), FOLDER)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = build_hugging_face_llama(base, initializer_range=base.width**-0.5).train()
        # Both models draw the same random numbers in the same order.
        if not tied:
            torch.nn.init.normal_(expected.model.embed_tokens.weight)
    ids = torch.randint(base.vocab_size, (3, base.seq_len))
    assert torch.equal(built(ids), expected(ids).logits.flatten(0, 1))


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("tied", [False, True])
def test_initial_stds_are_halved_in_the_blocks_at_four_times_the_width(tied):
    """Hugging Face initializes every matrix from normal(0, 0.02) at every width."""
    base = dataclasses.replace(BASE, tied=tied)
    described = describe_model(
        build_hugging_face_llama, make_factory_spec(base.at_width(128), base)
    )
    module = construct(build_hugging_face_llama, base.at_width(128), seed=3)
    for row in described.numbers:
        factor = described.factors[row.name]
        parameter = module.get_parameter(row.name).detach() * factor
        expected_std = {"hidden": 0.01, "embedding": 0.02, "readout": 0.02}.get(row.kind)
        if expected_std is None:
            assert torch.equal(parameter, torch.ones(128)), row.name
            continue
        assert row.init_std == pytest.approx(expected_std, rel=0.01)
        four_standard_errors = 4 / (2 * parameter.numel()) ** 0.5
        assert parameter.std().item() == pytest.approx(expected_std, rel=four_standard_errors)
        assert factor == pytest.approx(expected_std / 0.02, rel=0.01)


def test_plan_of_the_example_is_valid():
    plan = load_plan(FOLDER / "plan.toml")
    assert plan.proxy.factory == "models:llama"
    assert plan.trains_alone


@pytest.mark.parametrize("target", ["models:llama", "plain:Transformer"])
@pytest.mark.usefixtures("llama")
def test_both_models_train_deterministically(target, store):
    _, factory = load_factory(target, FOLDER)
    spec = dataclasses.replace(
        make_factory_spec(BASE.at_width(64), BASE, factory=factory, seed=0),
        data_id=store.manifest.data_id,
        schedule=Schedule(kind="constant", num_steps=12),
    )
    losses = []
    for _ in range(2):
        engine = SingleTrialEngine(store, build=lambda run: build_model(run, FOLDER), device="cpu")
        engine.admit(0, spec)
        ((_, result, curve),) = engine.advance(12)
        assert result.status == "finished", result.reason
        assert curve.train_loss_nats[-1] < curve.train_loss_nats[0] - 0.5
        losses.append(curve.train_loss_nats)
    assert losses[0] == losses[1]
