"""`forerun explain`: the numbers it shows are those that are trained with, and every answer has its
source.
"""

import re
from typing import get_args

import pytest
from tiny_study import ask, forerun

from launcher.plan import sources
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import CHOICES, NAMES, named
from proxies.core.schedule import Schedule
from proxies.core.shape import Family, Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.parametrization.parametrization import forward_numbers, parameter_table

SHAPE = "layers=24,width=2048,heads=16,kv_heads=16,ffn=5504,vocab=50304,seq_len=2048"
BIG = Shape(
    num_layers=24,
    width=2048,
    num_heads=16,
    num_kv_heads=16,
    ffn_width=5504,
    vocab_size=50304,
    seq_len=2048,
)
SMALL = (
    "--shape",
    "layers=4,width=64,heads=8,kv_heads=4,ffn=96,vocab=50,seq_len=16",
    "--base",
    "width=16,layers=2",
)


def test_all_parametrizations_are_listed():
    for arguments in (("explain",), ("explain", "--parametrization")):
        code, out, _ = forerun(*arguments)
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()] == list(NAMES)
    assert ask("explain")[1] == {"parametrizations": sources.PRESETS}


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_a_run(name):
    """Against the table of a run of that shape, parameter by parameter."""
    batch, duration = (4, 8) if name == "completedp" else (1, 1)
    ratios = ("--batch-ratio", batch, "--duration-ratio", duration)
    code, body = ask(
        "explain",
        "--parametrization",
        name,
        "--shape",
        SHAPE,
        "--base",
        "width=256,layers=4",
        *ratios,
    )
    assert code == 0
    rules = named(name)
    steps = 16
    tokens = {"base_batch_tokens": 2048, "base_num_tokens": 2048 * batch * steps // duration}
    spec = RunSpec(
        optimizer="adamw",
        shape=BIG,
        base_shape=BIG.at_width(256).at_depth(4),
        parametrization=rules,
        batch_tokens=2048 * batch,
        seed=0,
        hparams=Hparams(learning_rate=0.01, weight_decay=0.1),
        schedule=Schedule(kind="cosine", num_steps=steps),
        data_id="none",
        numerics=Numerics(),
        **(tokens if rules.needs_tokens else {}),
    )
    assert body["forward"] == pytest.approx(
        {
            part: getattr(forward_numbers(spec), part)
            for part in ("embedding", "attention", "residual", "output")
        }
    )
    table = parameter_table(spec)
    claims = {
        row.name: [g for g in body["groups"] if re.fullmatch(g["pattern"], row.name)]
        for row in table
    }
    for row in table:
        (group,) = claims[row.name]
        for number in (
            "kind",
            "width_multiplier",
            "init_std",
            "learning_rate",
            "weight_decay",
            "eps",
        ):
            wanted = row.settings[number] if number in row.settings else getattr(row, number)
            assert group[number] == pytest.approx(wanted), (row.name, number)
        assert group["weight_decay_share"] == pytest.approx(row.learning_rate * row.weight_decay)
    assert body["betas"] == pytest.approx([table[0].settings["beta1"], table[0].settings["beta2"]])


def test_laws_without_a_shape():
    code, out, _ = forerun("explain", "--parametrization", "completedp")
    assert code == 0
    rows = {
        line.split()[0]: " ".join(line.split()[1:])
        for line in out.splitlines()
        if line and line[0] != " "
    }
    assert rows["readout"] == "m_N^-1 m_N^-1 m_N 1 1"
    assert rows["hidden"] == "m_N^-1/2 m_N^-1 m_N 1 m_N^-1 m_L^-1"
    assert (
        "weight decay times m_B^1/2 m_D^-1/2; eps times m_B^-1/2 m_D^1/2; 1 - beta times m_B m_D^-1"
        in out
    )
    assert (
        ask("explain", "--parametrization", "sp")[1]["laws"]["hidden"]["init_std"]
        == "1/sqrt(fan_in)"
    )


@pytest.mark.parametrize("family", get_args(Family))
def test_families_and_choices(family):
    options = (
        "--family",
        family,
        "--qk-norm",
        "--tied",
        "--set",
        "depth_alpha=0.5",
        "--set",
        "decayed=all",
    )
    code, body = ask("explain", "--parametrization", "completep", *SMALL, *options)
    assert code == 0
    assert body["parametrization"] == "completep(depth_alpha=0.5, decayed=all)"
    assert {group["kind"] for group in body["groups"]} >= {
        "embedding",
        "hidden",
        "block_gain",
        "qk_gain",
        "final_gain",
    }
    assert body["choices"]["depth_alpha"]["value"] == 0.5
    assert "u-muP" in body["choices"]["depth_alpha"]["source"]
    code, out, _ = forerun(
        "explain", "--parametrization", "completep", *SMALL, "--set", "depth_alpha=none"
    )
    assert "depth_alpha = None (changed): no depth rule" in out
    assert code == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--parametrization", "mup", "--base", "width=4"), ["--base"]),
        (
            ("--parametrization", "mup", "--shape", "widht=8,layers=x,a=1"),
            ["widht=8", "layers=x", "a=1"],
        ),
        (("--parametrization", "mup", *SMALL[:3], "width=20"), ["width = 20", "head dim 8"]),
        (
            ("--parametrization", "mup", *SMALL, "--set", "depth_alfa=1"),
            ["depth_alfa", "depth_alpha"],
        ),
        (
            ("--parametrization", "sp", *SMALL, "--set", "output=absorbed"),
            ["output = 'absorbed'", "sp"],
        ),
        (
            ("--parametrization", "completedp", *SMALL, "--tied", "--batch-ratio", "40"),
            ["tied = True", "beta1"],
        ),
        (("launch.json", "shape", "width"), ["width"]),
    ],
)
def test_bad_input_is_refused_by_name(options, named):
    code, _, err = forerun("explain", *options)
    assert code == 2 and "Traceback" not in err
    assert all(name in err for name in named), err


def test_every_choice_and_answer_has_its_source():
    assert tuple(sources.PRESETS) == NAMES
    rules = named("mup")
    fields = [name for name in type(rules).__dataclass_fields__ if name != "name"]
    assert list(sources.CHOICES) == fields
    for choice, words in CHOICES.items():
        if choice != "name":
            assert tuple(sources.CHOICES[choice]) == words
    for name in NAMES:  # what the presets answer is somebody's
        for choice in fields:
            assert sources.answer_in_words(choice, getattr(named(name), choice)) != "own choice"
    assert sources.answer_in_words("rate_duration_power", -0.4) == "own choice"
