"""Tests of `forerun explain --parametrization`: its numbers are those of a run, with sources."""

import re
from typing import get_args

import pytest
from tiny_study import run_forerun, run_json

from forerun._launcher.study.plan import sources
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import NAMES, get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Family, Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
)

BIG = Shape(
    num_layers=24,
    width=2048,
    num_heads=16,
    num_kv_heads=16,
    ffn_width=5504,
    vocab_size=50304,
    seq_len=2048,
)
BIG_SIZES = {
    "layers": BIG.num_layers,
    "width": BIG.width,
    "heads": BIG.num_heads,
    "kv_heads": BIG.num_kv_heads,
    "ffn": BIG.ffn_width,
    "vocab": BIG.vocab_size,
    "seq_len": BIG.seq_len,
}
BIG_SHAPE = ("--shape", ",".join(f"{key}={size}" for key, size in BIG_SIZES.items()))
SMALL_SHAPE = ("--shape", "layers=4,width=64,heads=8,kv_heads=4,ffn=96,vocab=50,seq_len=16")
SMALL = (*SMALL_SHAPE, "--base", "width=16,layers=2")
"""Options of a small shape, and of its base shape."""


def test_all_parametrizations_are_listed():
    for arguments in (("explain",), ("explain", "--parametrization")):
        code, out, _ = run_forerun(*arguments)
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()] == list(NAMES)
    assert run_json("explain")[1] == {"parametrizations": sources.PRESETS}


@pytest.mark.parametrize("name", NAMES)
def test_explained_numbers_are_those_of_a_run(name):
    """Compare the explained groups with the parameter table of a run of the same shape."""
    batch, duration = (4, 8) if name == "completedp" else (1, 1)
    ratios = ("--batch-ratio", batch, "--duration-ratio", duration)
    sizes = (*BIG_SHAPE, "--base", "width=256,layers=4")
    code, body = run_json("explain", "--parametrization", name, *sizes, *ratios)
    assert code == 0

    # A run of that shape, batch, and duration.
    rules = get_parametrization(name)
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
            part: getattr(compute_forward_numbers(spec), part)
            for part in ("embedding", "attention", "residual", "output")
        }
    )
    table = compute_parameter_table(spec)
    settings = ("kind", "width_multiplier", "init_std", "learning_rate", "weight_decay", "eps")
    for row in table:
        (group,) = [group for group in body["groups"] if re.fullmatch(group["pattern"], row.name)]
        for setting in settings:
            in_settings = setting in row.settings
            expected = row.settings[setting] if in_settings else getattr(row, setting)
            assert group[setting] == pytest.approx(expected), (row.name, setting)
        assert group["weight_decay_share"] == pytest.approx(row.learning_rate * row.weight_decay)
    assert body["betas"] == pytest.approx([table[0].settings["beta1"], table[0].settings["beta2"]])


def read_laws(out):
    """Return the laws of each kind of parameter by the head of their column."""
    table = out.split("\n\n")[1].splitlines()
    head, *rows = (re.split(r"\s{2,}", line.strip()) for line in table if "  " in line)
    return {kind: dict(zip(head, laws, strict=True)) for kind, *laws in rows}


def test_scaling_laws_are_shown_without_a_shape():
    """m_N, m_L, m_B, and m_D are the ratios of width, depth, batch, and duration to the base's."""
    code, out, _ = run_forerun("explain", "--parametrization", "completedp")
    assert code == 0
    laws = read_laws(out)
    assert laws["readout"] == {
        "init std": "m_N^-1",
        "learning rate": "m_N^-1",
        "weight decay": "m_N",
        "lr*wd": "1",
        "eps": "1",
    }
    assert laws["hidden"] == {
        "init std": "m_N^-1/2",
        "learning rate": "m_N^-1",
        "weight decay": "m_N",
        "lr*wd": "1",
        "eps": "m_N^-1 m_L^-1",
    }
    assert (
        "weight decay times m_B^1/2 m_D^-1/2; eps times m_B^-1/2 m_D^1/2; 1 - beta times m_B m_D^-1"
        in out
    )
    laws = run_json("explain", "--parametrization", "sp")[1]["laws"]
    assert laws["hidden"]["init_std"] == "1/sqrt(fan_in)"


@pytest.mark.parametrize("family", get_args(Family))
def test_every_family_and_choice_is_explained(family):
    choices = ("--set", "depth_alpha=0.5", "--set", "decayed=all")
    options = ("--family", family, "--qk-norm", "--tied", *choices)
    code, body = run_json("explain", "--parametrization", "completep", *SMALL, *options)
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
    code, out, _ = run_forerun(
        "explain", "--parametrization", "completep", *SMALL, "--set", "depth_alpha=none"
    )
    assert "depth_alpha = None (changed): no depth rule" in out
    assert code == 0


@pytest.mark.parametrize(
    ("options", "phrases"),
    [
        (("--parametrization", "mup", "--base", "width=4"), ["--base"]),
        (
            ("--parametrization", "mup", "--shape", "widht=8,layers=x,a=1"),
            ["widht=8", "layers=x", "a=1"],
        ),
        (
            ("--parametrization", "mup", *SMALL_SHAPE, "--base", "width=20"),
            ["width = 20", "head dim 8"],
        ),
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
        # Options that would have no effect
        (("plan", *SMALL), ["--shape, --base: only with --parametrization"]),
        (("plan", "num_trials", "--full"), ["--full: only with FROZEN"]),
        (("--full",), ["--full: only with FROZEN"]),
        (("--parametrization", "mup", "--lr", "0.1"), ["--lr: only with --shape"]),
        (("--tied",), ["--tied: only with --shape"]),
        (("launch.json", "seed", "--tied"), ["--tied: only with --parametrization"]),
    ],
)
def test_bad_input_is_refused_by_name(options, phrases):
    code, _, err = run_forerun("explain", *options)
    assert code == 2 and "Traceback" not in err
    assert all(phrase in err for phrase in phrases), err
