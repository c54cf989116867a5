import dataclasses
import hashlib
import sys
from pathlib import Path

import factory_cases as cases
import pytest
import torch
from factory_cases import SMALL, factory_spec
from torch.nn import functional

from proxies.core.programs import FactoryChangedError, FactoryError
from proxies.core.rules import named
from proxies.external.construction import construct
from proxies.external.description import called_blocks, describe
from proxies.external.factory import build_model, load
from proxies.parametrization.parametrization import forward_numbers, parameter_table

WIDE = SMALL.at_width(128)
MODELS = """
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


@pytest.fixture
def folder(tmp_path):
    """A plan's folder with a module in it; what was imported is forgotten afterwards."""
    path, held = list(sys.path), set(sys.modules)
    (tmp_path / "my_models.py").write_text(MODELS)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - held:
        if name.startswith("my_"):
            del sys.modules[name]


def said(problem):
    return str(problem.value)


# ---- the numbers ----


@pytest.mark.parametrize(
    ("name", "family"), [("sp", "llama"), ("umup", "llama"), ("completedp", "gpt2")]
)
def test_our_decoder_as_a_factory_has_the_tables_own_numbers(name, family):
    base = dataclasses.replace(SMALL, family=family, qk_norm=True, num_kv_heads=4)
    spec = factory_spec(base.at_width(64).at_depth(4), base, name)
    if name == "completedp":
        spec = dataclasses.replace(spec, base_num_tokens=spec.num_tokens // 2)
    described, table = describe(cases.ours, spec), parameter_table(spec)
    for mine, theirs in zip(described.numbers, table, strict=True):
        assert mine.name == f"decoder.{theirs.name}"
        assert (mine.size, mine.kind, mine.width_multiplier) == (
            theirs.size,
            theirs.kind,
            theirs.width_multiplier,
        )
        assert (mine.optimizer, mine.settings) == (theirs.optimizer, theirs.settings)
        if theirs.kind in ("hidden", "readout"):  # the law of both is 1 / sqrt(fan-in)
            assert mine.init_std == pytest.approx(theirs.init_std, rel=0.02)
            assert described.factors[mine.name] * theirs.size[-1] ** -0.5 == pytest.approx(
                theirs.init_std, rel=0.02
            )
    assert described.forward == forward_numbers(spec)


def test_tied_matrices_are_one_embedding_with_a_readout_to_hook():
    base = dataclasses.replace(SMALL, tied=True)
    spec = factory_spec(base.at_width(64), base)
    described = describe(cases.ours, spec)
    assert [n.kind for n in described.numbers] == [n.kind for n in parameter_table(spec)]
    assert described.embeddings == ("decoder.tok_embeddings",)
    assert described.readouts == ("decoder.lm_head",)


def test_vectors_and_scalars_of_every_kind():
    kinds = {p.name: p.kind for p in describe(cases.gains, factory_spec()).numbers}
    wanted = {
        "proj.weight": "hidden",
        "proj.bias": "block_bias",
        "scale": "block_gain",
        "shift": "block_bias",
        "temper": "qk_gain",
        "head_gain": "qk_gain",
    }
    assert {name: kinds[f"blocks.1.{name}"] for name in wanted} == wanted
    assert (kinds["norm.weight"], kinds["norm.bias"]) == ("final_gain", "final_bias")
    assert (kinds["embed.weight"], kinds["head.weight"]) == ("embedding", "readout")


# ---- initial values ----


def test_at_the_base_shape_the_model_is_what_the_factory_builds(folder):
    _, factory = load("my_models:build", folder)
    spec = factory_spec(factory=factory, seed=5)
    before = torch.random.get_rng_state()
    built = build_model(spec, folder)
    assert torch.equal(before, torch.random.get_rng_state()), "nothing else is disturbed"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        own = sys.modules["my_models"].Model(SMALL)
    assert all(
        torch.equal(p, q) for p, q in zip(built.module.parameters(), own.parameters(), strict=True)
    )
    assert set(describe(sys.modules["my_models"].build, spec).factors.values()) == {1.0}
    ids = torch.randint(SMALL.vocab_size, (3, SMALL.seq_len))
    assert torch.equal(built(ids), own(ids).flatten(0, 1))
    assert built.module.training


def test_elsewhere_every_tensor_is_multiplied_by_its_factor_and_the_standard_form_by_none(folder):
    build, factory = load("my_models:build", folder)
    own = dict(construct(build, WIDE, seed=3).named_parameters())
    for name in ("mup", "sp"):
        spec = factory_spec(WIDE, parametrization=name, factory=factory, seed=3, dtype="float64")
        built = dict(build_model(spec, folder).module.named_parameters())
        for each, factor in describe(build, spec).factors.items():
            wanted = {"sp": 1.0, "mup": 2.0 if each.endswith("bias") or "head" in each else 1.0}
            assert factor == pytest.approx(wanted[name], rel=0.03), (
                "biases and readout keep the base's std, hidden ones have their law"
            )
            assert torch.equal(built[each], own[each].double() * factor)


@pytest.mark.parametrize(("name", "factor"), [("mup", 0.5), ("completep", 1.0)])
def test_a_factorys_own_depth_law_stays_unless_the_parametrization_has_one(name, factor):
    """Constant in width, 1 / sqrt(2 layers) in depth: at width 128 and 8 layers against 32
    and 2.
    """

    def build(shape, forward):
        return cases.shrinks_with_depth(shape)

    factors = describe(build, factory_spec(WIDE.at_depth(8), SMALL, name)).factors
    assert factors["blocks.7.weight"] == pytest.approx(factor, rel=0.01)


# ---- forward multipliers ----


def test_a_step_with_multipliers_is_the_one_by_hand():
    """SGD on the wrapped model against the same model with the multipliers written into its
    forward.
    """
    spec = factory_spec(
        SMALL.at_width(64), SMALL, embedding_multiplier=3.0, output_multiplier=5.0, dtype="float64"
    )
    model = build_by(cases.mixer, spec)
    own = cases.Mixer(spec.shape).double()
    own.load_state_dict(model.module.state_dict())
    ids, targets = torch.randint(SMALL.vocab_size, (2, 2, SMALL.seq_len))
    by_hand = own.head(own.body(own.embed(ids) * 3.0) * (5.0 / 2)).flatten(0, 1)
    logits = model(ids)
    assert torch.allclose(logits, by_hand, rtol=1e-12)
    for out, parameters in ((logits, model.module), (by_hand, own)):
        functional.cross_entropy(out, targets.flatten()).backward()
        torch.optim.SGD(parameters.parameters(), lr=0.5).step()
    for (name, mine), theirs in zip(model.module.named_parameters(), own.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-15), name
    plain = cases.Mixer(spec.shape).double()
    plain.load_state_dict(own.state_dict())
    assert not torch.allclose(plain(ids).flatten(0, 1), model(ids)), (
        "without them it is another model"
    )


def build_by(build, spec):
    """The model of a factory in factory_cases."""
    folder = Path(cases.__file__).parent
    factory = load(f"factory_cases:{build.__name__}", folder)[1]
    return build_model(dataclasses.replace(spec, factory=factory), folder)


def test_residual_and_attention_go_to_a_factory_that_asks_and_are_never_applied_twice():
    spec = factory_spec(
        SMALL.at_depth(4), SMALL, "completep", embedding_multiplier=2.0, output_multiplier=3.0
    )
    given = []

    def build(shape, forward):
        given.append(forward)
        return cases.ours(shape, forward)

    wanted = forward_numbers(spec)
    construct(build, spec.shape, wanted)
    assert (given[-1].residual, given[-1].attention) == (0.5, wanted.attention)
    assert (given[-1].embedding, given[-1].output) == (1.0, 1.0)
    assert describe(build, spec).forward == wanted
    with pytest.raises(FactoryError) as problem:
        describe(cases.ours_alone, spec)
    assert "multiplies the branches by 0.5 at 4 layers (base 2)" in said(problem)
    assert "build(shape, forward)" in said(problem)


def with_dimensions(*dimensions, shape=WIDE):
    spec = factory_spec(shape)
    return dataclasses.replace(
        spec, factory=dataclasses.replace(spec.factory, dimensions=dimensions)
    )


def test_stacked_experts_and_convolutions_are_matrices():
    """What a width of 4 times the base does to a linear layer, it does to each matrix of a
    stack.
    """
    found = {
        p.name: p
        for p in describe(cases.experts, with_dimensions(("*.shift", "expert out"))).numbers
    }
    ratio = WIDE.width / SMALL.width
    for name in ("up", "down", "taps.weight"):
        assert found[f"blocks.0.{name}"].kind == "hidden", name
        assert found[f"blocks.0.{name}"].learning_rate == pytest.approx(0.01 / ratio), name
    assert found["blocks.0.up"].init_std == pytest.approx(WIDE.width**-0.5, rel=0.02)
    assert found["blocks.0.own_taps.weight"].width_multiplier == 1, "its fan-in is its own kernel"
    assert found["blocks.1.shift"].kind == "block_bias"


def test_blocks_to_shard_are_those_that_are_called_and_share_nothing():
    def shared(shape):
        model = cases.mixer(shape)
        model.blocks[1].weight = model.blocks[0].weight
        return model

    def uncalled(shape):
        model = cases.mixer(shape)
        model.tables = torch.nn.ModuleList([torch.nn.Linear(shape.width, 4)])
        return model

    assert called_blocks(cases.mixer, SMALL) == called_blocks(uncalled, SMALL) == ("blocks.*",)
    assert called_blocks(shared, SMALL) == ()


def test_dimensions_that_cannot_be_told_are_asked_for():
    with pytest.raises(
        FactoryError,
        match=r'blocks.0.shift .* proxy.dimensions = \{ "blocks.0.shift" = "out in" \}',
    ):
        describe(cases.experts, with_dimensions())
    with pytest.raises(
        FactoryError, match=r'blocks.0.up .* = \{ "blocks.0.up" = "expert in out" \}'
    ):
        describe(cases.odd_experts, with_dimensions(("*.shift", "expert out")))
    told = with_dimensions(
        ("*.shift", "expert out"),
        ("*.up", "expert in out"),
        ("*.down", "expert in out"),
    )
    found = {p.name: p.width_multiplier for p in describe(cases.odd_experts, told).numbers}
    assert found["blocks.0.up"] == WIDE.width / SMALL.width
    assert found["blocks.0.down"] == (WIDE.width + 16) / (SMALL.width + 16)


@pytest.mark.parametrize(
    ("dimensions", "words"),
    [
        ([("nowhere", "in out")], "no parameter is named 'nowhere'"),
        ([("*.up", "in out")], "has the dimensions [4, 128, 256]: must be one word for each"),
        (
            [("*.up", "expert in out"), ("blocks.*", "expert in out")],
            "blocks.0.up has two patterns",
        ),
    ],
)
def test_names_of_dimensions_that_do_not_fit_are_refused(dimensions, words):
    with pytest.raises(FactoryError) as problem:
        describe(cases.experts, with_dimensions(*dimensions))
    assert words in said(problem)


# ---- refusals ----

PLANTED = [
    (cases.ignores_width, "no parameter grows"),
    (cases.varies_late, "blocks.0.up.weight: dimension 0 is 80 here and 40 at the base"),
    (cases.extra_when_wide, "extra is not in all"),
    (cases.noisy, "dropout"),
    (cases.looks_ahead, "looks ahead"),
    (cases.unseeded, "head.weight from different values"),
    (cases.tied_by_hand, "the output multiplier 0.25 cannot be applied"),
    (cases.frozen_head, "head.weight is frozen"),
    (cases.unused, "spare.weight, spare.bias: does not affect"),
    (cases.fails, "factory_cases.py, line"),
    (cases.fails, "no recipe for width 128"),
    (lambda shape, size: None, "build(shape, forward)"),
]


@pytest.mark.parametrize(
    ("build", "words"), PLANTED, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_planted_mistake_is_named(build, words):
    with pytest.raises(FactoryError) as problem:
        describe(build, factory_spec(WIDE))
    assert words in said(problem)


def test_a_tied_readout_cannot_absorb_its_multiplier():
    """The family's shape does not say that this model ties its matrices."""
    with pytest.raises(
        FactoryError, match=r'the model has no readout of its own .*: set output = "multiplier"'
    ):
        describe(
            cases.tied_by_hand, factory_spec(WIDE, parametrization=named("mup", output="absorbed"))
        )
    assert describe(
        cases.mixer, factory_spec(WIDE, parametrization=named("mup", output="absorbed"))
    ).numbers


def test_a_model_that_ignores_depth_is_named():
    with pytest.raises(FactoryError, match="the same parameters with 4 layers as with 5"):
        describe(cases.ignores_depth, factory_spec(SMALL.at_depth(4)))


# ---- where it is found ----


def test_loading_names_the_source_and_says_nothing_on_stdout(folder, capsys):
    build, factory = load("my_models:build", folder)
    assert factory.target == "my_models:build"
    assert (
        factory.source_sha256 == hashlib.sha256((folder / "my_models.py").read_bytes()).hexdigest()
    )
    assert load("my_models:build", folder) == (build, factory)
    construct(build, SMALL)
    assert capsys.readouterr().out == "", "stdout is the JSON's"
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
def test_what_cannot_be_loaded_is_said_in_words(folder, target, text, words):
    (folder / "my_text.py").write_text(text)
    (folder / "fractions.py").write_text("def build(shape): ...")
    with pytest.raises(FactoryError) as problem:
        load(target, folder)
    assert words in said(problem)


def test_a_changed_source_is_refused_by_name(folder):
    _, factory = load("my_models:build", folder)
    spec = factory_spec(factory=factory)
    build_model(spec, folder)
    source = folder / "my_models.py"
    # as long as it was, within the same second
    source.write_text(source.read_text().replace("tanh", "sin "))
    with pytest.raises(
        FactoryChangedError, match="my_models:build has changed: its source's sha256 was"
    ):
        build_model(spec, folder)
    changed = dataclasses.replace(spec, factory=load("my_models:build", folder)[1])
    assert changed.id != spec.id
    ids = torch.randint(SMALL.vocab_size, (2, SMALL.seq_len))
    new = build_model(changed, folder)(ids)
    source.write_text(MODELS)
    assert not torch.equal(build_model(spec, folder)(ids), new), "it was the new code that ran"


def test_a_plan_s_own_axes_are_keywords(tmp_path):
    (tmp_path / "gained.py").write_text(
        "from torch import nn\n"
        "def build(shape, *, gain):\n"
        "    module = nn.Linear(2, 2)\n"
        "    module.gain = gain\n"
        "    return module\n"
    )
    build, _ = load("gained:build", tmp_path, {"gain": 0.5})
    assert build(None).gain == 0.5
    # what is known of one model is kept by it
    assert load("gained:build", tmp_path, {"gain": 0.5})[0] is build
    for values, wrong in (({"gain": 0.5, "gian": 0.5}, "'gian'"), ({}, "'gain'")):
        with pytest.raises(FactoryError, match=wrong):
            load("gained:build", tmp_path, values)
    sys.modules.pop("gained", None)
