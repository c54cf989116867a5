"""Tests of users' models: a factory's model gets correct numbers, and mistakes in it are named.

A factory is a user's function that builds a model of a shape. The numbers of a parameter are its
initial std, learning rate, weight decay, and other settings of the optimizer.
"""

import dataclasses
import hashlib
import sys
from pathlib import Path

import factory_cases as cases
import pytest
import torch
from factory_cases import SMALL, make_factory_spec
from torch.nn import functional

from forerun._proxies.core.programs import FactoryChangedError, FactoryError
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.external.construction import construct
from forerun._proxies.external.description import describe_model, find_called_blocks
from forerun._proxies.external.factory import build_model, load_factory
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
)

WIDE = SMALL.at_width(128)
MY_MODELS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(shape.num_layers))
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def build(shape):
    print("building")
    return Model(shape)
"""  # noqa: E501
"""Source of the user's module `my_models`. Its `build` prints, which must not reach stdout."""


@pytest.fixture
def folder(tmp_path):
    """A plan's folder that contains the module `my_models`; imports are undone afterwards."""
    old_path, old_modules = list(sys.path), set(sys.modules)
    (tmp_path / "my_models.py").write_text(MY_MODELS)
    yield tmp_path
    sys.path[:] = old_path
    for name in set(sys.modules) - old_modules:
        if name.startswith("my_"):
            del sys.modules[name]


# ---- Numbers of the parameters ----


@pytest.mark.parametrize(
    ("name", "family"), [("sp", "llama"), ("umup", "llama"), ("completedp", "gpt2")]
)
def test_decoder_as_a_factory_gets_the_numbers_of_the_parameter_table(name, family):
    base = dataclasses.replace(SMALL, family=family, qk_norm=True, num_kv_heads=4)
    spec = make_factory_spec(base.at_width(64).at_depth(4), base, name)
    # completedp scales with the duration too, so let the base run be half as long.
    if name == "completedp":
        spec = dataclasses.replace(spec, base_num_tokens=spec.num_tokens // 2)
    description, table = describe_model(cases.build_decoder, spec), compute_parameter_table(spec)
    for numbers, row in zip(description.numbers, table, strict=True):
        assert numbers.name == f"decoder.{row.name}"
        assert (numbers.size, numbers.kind, numbers.width_multiplier) == (
            row.size,
            row.kind,
            row.width_multiplier,
        )
        assert (numbers.optimizer, numbers.settings) == (row.optimizer, row.settings)
        if row.kind in ("hidden", "readout"):  # both models draw them with 1 / sqrt(fan-in)
            assert numbers.init_std == pytest.approx(row.init_std, rel=0.02)
            scaled_std = description.factors[numbers.name] * row.size[-1] ** -0.5
            assert scaled_std == pytest.approx(row.init_std, rel=0.02)
    assert description.forward == compute_forward_numbers(spec)


def test_tied_matrices_are_one_embedding_and_their_readout_is_found():
    base = dataclasses.replace(SMALL, tied=True)
    spec = make_factory_spec(base.at_width(64), base)
    description = describe_model(cases.build_decoder, spec)
    kinds = [row.kind for row in compute_parameter_table(spec)]
    assert [numbers.kind for numbers in description.numbers] == kinds
    assert description.embeddings == ("decoder.tok_embeddings",)
    assert description.readouts == ("decoder.lm_head",)


def test_vectors_and_scalars_get_their_kinds():
    description = describe_model(cases.build_with_gains, make_factory_spec())
    kinds = {numbers.name: numbers.kind for numbers in description.numbers}
    expected = {
        "proj.weight": "hidden",
        "proj.bias": "block_bias",
        "scale": "block_gain",
        "shift": "block_bias",
        "temperature": "qk_gain",
        "head_gain": "qk_gain",
    }
    assert {name: kinds[f"blocks.1.{name}"] for name in expected} == expected
    assert (kinds["norm.weight"], kinds["norm.bias"]) == ("final_gain", "final_bias")
    assert (kinds["embed.weight"], kinds["head.weight"]) == ("embedding", "readout")


# ---- Initial values ----


def test_model_at_the_base_shape_is_what_the_factory_builds(folder):
    _, factory = load_factory("my_models:build", folder)
    spec = make_factory_spec(factory=factory, seed=5)
    before = torch.random.get_rng_state()
    built = build_model(spec, folder)
    assert torch.equal(before, torch.random.get_rng_state()), "torch's generator is unchanged"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        user_model = sys.modules["my_models"].Model(SMALL)
    for parameter, user_parameter in zip(
        built.module.parameters(), user_model.parameters(), strict=True
    ):
        assert torch.equal(parameter, user_parameter)
    assert set(describe_model(sys.modules["my_models"].build, spec).factors.values()) == {1.0}
    ids = torch.randint(SMALL.vocab_size, (3, SMALL.seq_len))
    assert torch.equal(built(ids), user_model(ids).flatten(0, 1))
    assert built.module.training


def test_tensors_at_another_shape_are_multiplied_by_their_factors(folder):
    """Under mup, biases and readout keep the std of the base.

    Torch draws them with 1 / sqrt(fan-in), so they need a factor of 2 at 4 times the width. Hidden
    matrices follow 1 / sqrt(fan-in) under mup too, and sp multiplies nothing.
    """
    build, factory = load_factory("my_models:build", folder)
    user_parameters = dict(construct(build, WIDE, seed=3).named_parameters())
    for name in ("mup", "sp"):
        spec = make_factory_spec(
            WIDE, parametrization=name, factory=factory, seed=3, dtype="float64"
        )
        parameters = dict(build_model(spec, folder).module.named_parameters())
        for parameter_name, factor in describe_model(build, spec).factors.items():
            keeps_std = parameter_name.endswith("bias") or "head" in parameter_name
            expected = 2.0 if name == "mup" and keeps_std else 1.0
            assert factor == pytest.approx(expected, rel=0.03), parameter_name
            scaled = user_parameters[parameter_name].double() * factor
            assert torch.equal(parameters[parameter_name], scaled)


@pytest.mark.parametrize(("name", "factor"), [("mup", 0.5), ("completep", 1.0)])
def test_depth_scaling_of_a_factory_stays_unless_the_parametrization_has_one(name, factor):
    """The model has 8 layers and width 128, its base 2 layers and width 32.

    The factory's initial std is constant in width and scales with 1 / sqrt(2 layers).
    """

    def build(shape, forward):
        return cases.build_with_depth_scaled_init(shape)

    factors = describe_model(build, make_factory_spec(WIDE.at_depth(8), SMALL, name)).factors
    assert factors["blocks.7.weight"] == pytest.approx(factor, rel=0.01)


# ---- Forward multipliers ----


def build_from_factory(build, spec):
    """Build the model of a factory in factory_cases."""
    folder = Path(cases.__file__).parent
    factory = load_factory(f"factory_cases:{build.__name__}", folder)[1]
    return build_model(dataclasses.replace(spec, factory=factory), folder)


def test_sgd_step_with_multipliers_matches_a_model_that_contains_them():
    spec = make_factory_spec(
        SMALL.at_width(64), SMALL, embedding_multiplier=3.0, output_multiplier=5.0, dtype="float64"
    )
    model = build_from_factory(cases.build_mixer, spec)
    reference = cases.Mixer(spec.shape).double()
    reference.load_state_dict(model.module.state_dict())
    ids, targets = torch.randint(SMALL.vocab_size, (2, 2, SMALL.seq_len))

    # The same logits; mup divides the output multiplier by the width ratio 2.
    body_output = reference.run_body(reference.embed(ids) * 3.0)
    reference_logits = reference.head(body_output * (5.0 / 2)).flatten(0, 1)
    logits = model(ids)
    assert torch.allclose(logits, reference_logits, rtol=1e-12)

    # The same parameters after a step
    for output, module in ((logits, model.module), (reference_logits, reference)):
        functional.cross_entropy(output, targets.flatten()).backward()
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    for (name, parameter), reference_parameter in zip(
        model.module.named_parameters(), reference.parameters(), strict=True
    ):
        assert torch.allclose(parameter, reference_parameter, rtol=1e-12, atol=1e-15), name

    # Other logits without the multipliers
    without_multipliers = cases.Mixer(spec.shape).double()
    without_multipliers.load_state_dict(reference.state_dict())
    assert not torch.allclose(without_multipliers(ids).flatten(0, 1), model(ids))


def test_factory_applies_residual_and_attention_multipliers_itself():
    """A factory with the parameter `forward` receives these multipliers.

    forerun applies the multipliers of the embedding and of the output itself.
    """
    spec = make_factory_spec(
        SMALL.at_depth(4), SMALL, "completep", embedding_multiplier=2.0, output_multiplier=3.0
    )
    received = []

    def build(shape, forward):
        received.append(forward)
        return cases.build_decoder(shape, forward)

    expected = compute_forward_numbers(spec)
    construct(build, spec.shape, expected)
    assert (received[-1].residual, received[-1].attention) == (0.5, expected.attention)
    assert (received[-1].embedding, received[-1].output) == (1.0, 1.0)
    assert describe_model(build, spec).forward == expected
    with pytest.raises(FactoryError) as caught:
        describe_model(cases.build_decoder_without_multipliers, spec)
    assert "multiplies the branches by 0.5 at 4 layers (base 2)" in str(caught.value)
    assert "build(shape, forward)" in str(caught.value)


# ---- Dimensions of stacked matrices ----


def make_spec_with_dimensions(*dimensions, shape=WIDE):
    """Return the spec of a run whose plan names the dimensions of some parameters.

    Args:
        dimensions: Pairs of a pattern of parameter names and one word for each dimension.
    """
    spec = make_factory_spec(shape)
    return dataclasses.replace(
        spec, factory=dataclasses.replace(spec.factory, dimensions=dimensions)
    )


def test_stacked_experts_and_convolutions_are_matrices():
    """Each matrix of a stack gets the numbers of a linear layer at 4 times the base width."""
    spec = make_spec_with_dimensions(("*.shift", "expert out"))
    numbers = {row.name: row for row in describe_model(cases.build_experts, spec).numbers}
    ratio = WIDE.width / SMALL.width
    for name in ("up", "down", "taps.weight"):
        assert numbers[f"blocks.0.{name}"].kind == "hidden", name
        assert numbers[f"blocks.0.{name}"].learning_rate == pytest.approx(0.01 / ratio), name
    assert numbers["blocks.0.up"].init_std == pytest.approx(WIDE.width**-0.5, rel=0.02)
    # The fan-in of a depthwise convolution is its kernel size, which does not grow.
    assert numbers["blocks.0.depthwise_taps.weight"].width_multiplier == 1
    assert numbers["blocks.1.shift"].kind == "block_bias"


def test_only_called_blocks_without_shared_parameters_are_found():
    """A trainer may shard the blocks that are found, each as one unit."""

    def build_with_shared_weight(shape):
        model = cases.build_mixer(shape)
        model.blocks[1].weight = model.blocks[0].weight
        return model

    def build_with_uncalled_block(shape):
        model = cases.build_mixer(shape)
        model.tables = torch.nn.ModuleList([torch.nn.Linear(shape.width, 4)])
        return model

    assert find_called_blocks(cases.build_mixer, SMALL) == ("blocks.*",)
    assert find_called_blocks(build_with_uncalled_block, SMALL) == ("blocks.*",)
    assert find_called_blocks(build_with_shared_weight, SMALL) == ()


def test_ambiguous_dimensions_are_asked_for():
    with pytest.raises(
        FactoryError,
        match=r'blocks.0.shift .* proxy.dimensions = \{ "blocks.0.shift" = "out in" \}',
    ):
        describe_model(cases.build_experts, make_spec_with_dimensions())
    with pytest.raises(
        FactoryError, match=r'blocks.0.up .* = \{ "blocks.0.up" = "expert in out" \}'
    ):
        describe_model(
            cases.build_experts_with_odd_ffn,
            make_spec_with_dimensions(("*.shift", "expert out")),
        )
    spec = make_spec_with_dimensions(
        ("*.shift", "expert out"),
        ("*.up", "expert in out"),
        ("*.down", "expert in out"),
    )
    description = describe_model(cases.build_experts_with_odd_ffn, spec)
    multipliers = {numbers.name: numbers.width_multiplier for numbers in description.numbers}
    assert multipliers["blocks.0.up"] == WIDE.width / SMALL.width
    assert multipliers["blocks.0.down"] == (WIDE.width + 16) / (SMALL.width + 16)


@pytest.mark.parametrize(
    ("dimensions", "words"),
    [
        ([("nowhere", "in out")], "no parameter is named 'nowhere'"),
        (
            [("*.up", "in out")],
            f"has the dimensions [{cases.NUM_EXPERTS}, 128, 256]: must be one word for each",
        ),
        (
            [("*.up", "expert in out"), ("blocks.*", "expert in out")],
            "blocks.0.up has two patterns",
        ),
    ],
)
def test_dimensions_that_do_not_match_the_model_are_refused(dimensions, words):
    with pytest.raises(FactoryError) as caught:
        describe_model(cases.build_experts, make_spec_with_dimensions(*dimensions))
    assert words in str(caught.value)


# ---- Models with a mistake ----

PLANTED = [
    (cases.build_ignoring_width, "no parameter grows"),
    (
        cases.build_with_late_ffn_growth,
        "blocks.0.up.weight: dimension 0 is 80 here and 40 at the base",
    ),
    (cases.build_with_extra_when_wide, "extra is not in all"),
    (cases.build_noisy, "dropout"),
    (cases.build_without_mask, "looks ahead"),
    (cases.build_unseeded, "head.weight from different values"),
    (cases.build_tied_by_hand, "the output multiplier 0.25 cannot be applied"),
    (cases.build_with_frozen_head, "head.weight is frozen"),
    (cases.build_with_unused_layer, "spare.weight, spare.bias: does not affect"),
    (cases.fail_to_build_when_wide, "factory_cases.py, line"),
    (cases.fail_to_build_when_wide, "no recipe for width 128"),
    (lambda shape, size: None, "build(shape, forward)"),
]
"""Factories with a mistake, and a part of the message that names it."""


@pytest.mark.parametrize(
    ("build", "words"), PLANTED, ids=lambda value: getattr(value, "__name__", None)
)
def test_planted_mistake_is_named(build, words):
    with pytest.raises(FactoryError) as caught:
        describe_model(build, make_factory_spec(WIDE))
    assert words in str(caught.value)


def test_tied_readout_cannot_absorb_its_multiplier():
    """The spec's shape does not say that this model ties its matrices."""
    absorbed = get_parametrization("mup", output="absorbed")
    spec = make_factory_spec(WIDE, parametrization=absorbed)
    with pytest.raises(
        FactoryError, match=r'the model has no readout of its own .*: set output = "multiplier"'
    ):
        describe_model(cases.build_tied_by_hand, spec)
    assert describe_model(cases.build_mixer, spec).numbers


def test_model_that_ignores_depth_is_named():
    with pytest.raises(FactoryError, match="the same parameters with 4 layers as with 5"):
        describe_model(cases.build_ignoring_depth, make_factory_spec(SMALL.at_depth(4)))


# ---- Loading of factories ----


def test_loading_hashes_the_source_and_keeps_stdout_clean(folder, capsys):
    build, factory = load_factory("my_models:build", folder)
    assert factory.target == "my_models:build"
    assert (
        factory.source_sha256 == hashlib.sha256((folder / "my_models.py").read_bytes()).hexdigest()
    )
    assert load_factory("my_models:build", folder) == (build, factory)
    construct(build, SMALL)
    assert capsys.readouterr().out == "", "stdout is reserved for JSON"
    assert not (folder / "__pycache__").exists()


@pytest.mark.parametrize(
    ("target", "text", "words"),
    [
        ("my_modles:build", "", "my_modles cannot be imported"),
        ("my_models:biuld", "", "has no function biuld"),
        ("my_text:build", "x = 1\ny = x / 0", "my_text.py, line 2: `y = x / 0`: ZeroDivisionError"),
        ("my_text:build", "def build(:", "my_text.py, line 1: `def build(:`: SyntaxError"),
        ("my_text:build", "import sys\nsys.exit(3)", "SystemExit: 3"),
        ("my_text:build", "def build(a, b): ...", "'b'"),
        ("my_text:build", "build = 3", "has no function build"),
        ("fractions:build", "", "has the name of"),
    ],
)
def test_factory_that_cannot_be_loaded_is_explained(folder, target, text, words):
    (folder / "my_text.py").write_text(text)
    # A module of this name is already imported from the standard library.
    (folder / "fractions.py").write_text("def build(shape): ...")
    with pytest.raises(FactoryError) as caught:
        load_factory(target, folder)
    assert words in str(caught.value)


def test_changed_source_is_refused(folder):
    _, factory = load_factory("my_models:build", folder)
    spec = make_factory_spec(factory=factory)
    build_model(spec, folder)
    source = folder / "my_models.py"
    # The new text has the same length, and possibly the same modification time: a check of these
    # two would miss the change.
    source.write_text(source.read_text().replace("tanh", "sin "))
    with pytest.raises(
        FactoryChangedError, match="my_models:build has changed: its source's sha256 was"
    ):
        build_model(spec, folder)
    changed = dataclasses.replace(spec, factory=load_factory("my_models:build", folder)[1])
    assert changed.id != spec.id
    ids = torch.randint(SMALL.vocab_size, (2, SMALL.seq_len))
    changed_logits = build_model(changed, folder)(ids)
    source.write_text(MY_MODELS)
    assert not torch.equal(build_model(spec, folder)(ids), changed_logits)


def test_user_hyperparameters_are_keywords_of_the_factory(tmp_path):
    (tmp_path / "gained.py").write_text(
        "from torch import nn\n"
        "def build(shape, *, gain):\n"
        "    module = nn.Linear(2, 2)\n"
        "    module.gain = gain\n"
        "    return module\n"
    )
    build, _ = load_factory("gained:build", tmp_path, {"gain": 0.5})
    assert build(None).gain == 0.5
    # The same values give the same object, so that results cached by factory are found again.
    assert load_factory("gained:build", tmp_path, {"gain": 0.5})[0] is build
    for values, name in (({"gain": 0.5, "gian": 0.5}, "'gian'"), ({}, "'gain'")):
        with pytest.raises(FactoryError, match=name):
            load_factory("gained:build", tmp_path, values)
    sys.modules.pop("gained", None)
