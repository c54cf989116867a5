"""Hyperparameters and optimizers are declared in one place: nobody else names one, and a new one is
seen everywhere.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE
from proxies.core.optimizers import OPTIMIZERS
from proxies.core.rules import CHOICES, POWERS

ROOT = Path(__file__).parents[1]
PACKAGES = ("forerun", "proxies", "sweeps", "transfer", "scaling_fits", "launcher")
DECLARED = (
    "proxies/core/hyperparameters.py",
    "proxies/core/optimizers.py",
    "proxies/core/muon.py",
    "proxies/model/optimizer.py",
    "proxies/model/bank_adamw.py",
    "proxies/model/bank_muon.py",
    "proxies/model/muon.py",
)
EXPORTERS = "launcher/exporters/"
EXCEPTIONS = {
    "forerun/hook.py": "torch's names of an optimizer group's numbers; it imports nothing of ours",
    "proxies/core/numbers.py": "the record of a group: every optimizer has a rate and a decay",
    "launcher/plan/sections.py": "the optimizer of a plan that names none",
    "proxies/core/rules.py": (
        "the table of powers: how decay and eps of each kind of parameter scale"
    ),
    "proxies/parametrization/parametrization.py": (
        "where the table meets a parameter and the forward multipliers"
    ),
    "proxies/model/decoder.py": "eps of the norms, which is another number",
    "launcher/plan/sources.py": "what sources say of the table's choices for decay and eps",
    "launcher/explanations/parametrizations.py": (
        "columns of a table whose `--json` keys are a contract"
    ),
    "launcher/frozen/frozen.py": "the frozen record: its keys are a contract",
    "launcher/supervisor/own_proof.py": "the clip that a user's script was seen to use",
    "launcher/trainer/callbacks.py": "a rollback may lower the clip: the order for it",
    "launcher/trainer/rollback.py": "a rollback may lower the clip: the record of it",
    "launcher/trainer/spikes.py": "a rollback may lower the clip: the policy",
    "launcher/trainer/training.py": "the clip in force at a step",
}
"""Files that name one all the same, and why; fifteen at most."""


def names():
    """Of the registries, with their other names; the learning rate is what the whole tool is
    about.
    """
    others = [one for one in HYPERPARAMETERS.values() if one.name != LEARNING_RATE]
    # words of schedules, of arrays
    aliases = {alias for one in others for alias in one.aliases} - {"warmup", "clip"}
    return {"betas", *aliases, *(one.name for one in others), *OPTIMIZERS}


def named(text):
    """Hyperparameters and optimizers that a source names: as a variable, attribute, argument,
    function or string.
    """
    tree = ast.parse(text)
    docstrings = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    ]
    said = {id(node) for node in docstrings}
    # The rounding error of a float type is no hyperparameter.
    said |= {
        id(n)
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and "finfo(" in ast.unparse(n.value)
    }
    words = set()
    for node in ast.walk(tree):
        if id(node) in said:
            continue
        for field in ("id", "attr", "arg", "name", "value"):
            word = getattr(node, field, None)
            # What a parametrization's choice is called is no name of a hyperparameter.
            words |= (
                {re.sub("|".join({*CHOICES, *POWERS} - {*HYPERPARAMETERS}), "", word)}
                if isinstance(word, str)
                else set()
            )
    pattern = re.compile(
        rf"(?<![a-z0-9_])_?({'|'.join(sorted(names(), key=len, reverse=True))})(?![a-z0-9])", re.I
    )
    return {found[1].lower() for word in words for found in pattern.finditer(word)}


def sources():
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_no_file_but_the_registries_names_a_hyperparameter_or_an_optimizer():
    found = {
        str(path.relative_to(ROOT)): named(path.read_text(encoding="utf-8")) for path in sources()
    }
    free = (*DECLARED, EXPORTERS)
    naming = {path for path, words in found.items() if words and not path.startswith(free)}
    assert naming == set(EXCEPTIONS), (
        "read the registry in place of naming one; what needs no exception is none"
    )
    assert len(EXCEPTIONS) <= 15


@pytest.mark.parametrize(
    "line",
    [
        "beta2 = 0.95",
        "group['betas'][1]",
        "run.hparams.clip_norm",
        "f(weight_decay=0.1)",
        "torch.optim.AdamW(p)",
        "names = ('eps', 'lr')",
        "def _clip_norm(): ...",
        "x = 'the beta1 of Adam'",
        "point['warmup_fraction']",
        "wd = 1",
    ],
)
def test_a_planted_name_is_seen(line):
    assert named(line)


def test_other_words_are_not():
    assert not named(
        "batch_warmup_fraction = steps.epsilon + torch.finfo(torch.float64).eps\nlearning_rate = "
        "alphabet"
    )


OTHER_ENTRY = """            Hyperparameter(
                name="z_loss", meaning="Weight of the squared log of the softmax's sum.", default=0.0, least=0,
                set_by="proxy", can_be_off=True, applied_to="loss", aliases=("zloss",),
            ),
"""  # noqa: E501
OTHER_FIELD = """    z_loss: float = dataclasses.field(
        default=HYPERPARAMETERS["z_loss"].default, metadata=canon.UNLESS_DEFAULT
    )
"""
TERM = """LOSS_TERMS["z_loss"] = LossTerm(
    value=lambda logits, targets: logits.logsumexp(dim=-1) ** 2,
    gradient=lambda logits, targets: 2 * logits.logsumexp(dim=-1, keepdim=True) * logits.softmax(dim=-1),
)
"""  # noqa: E501
SPEC = """            OptimizerSpec(
                name="lion",
                label="Lion",
                source="arXiv 2302.06675",
                settings=(LEARNING_RATE, WEIGHT_DECAY, "beta1", "beta2"),
                num_moments=1,
                step_copies=1,
            ),
"""
RECIPE = """            Recipe(name="lion", label="Lion", default="lion"),
"""
IMPLEMENTATION = """    "lion": Implementation(
        build=Lion,
        kind=Lion,
        bank=BankLion,
        name_of=lambda group: "lion",
    ),
"""
ENTRY = """            Hyperparameter(
                name="residual_multiplier", meaning="Of each branch.", default=1.0, above=0, multiplies="residual",
                aliases=("branch",),
            ),
"""  # noqa: E501
FIELD = '    residual_multiplier: float = HYPERPARAMETERS["residual_multiplier"].default\n'
CHANGES = {
    "proxies/core/hyperparameters.py": [
        ('            Hyperparameter(\n                name="output_multiplier"', ENTRY, 0),
        ("    output_multiplier: float", FIELD, 0),
        (
            '            Hyperparameter(\n                name="embedding_multiplier"',
            OTHER_ENTRY,
            0,
        ),
        ("    embedding_multiplier: float", OTHER_FIELD, 0),
    ],
    "proxies/model/loss.py": [("def loss_weights(", TERM, 0)],
    "proxies/core/optimizers.py": [
        ('            OptimizerSpec(\n                name="muon"', SPEC, 0),
        ('            Recipe(\n                name="muon"', RECIPE, 0),
    ],
    "proxies/model/optimizer.py": [
        ('    "muon": Implementation(', IMPLEMENTATION, 0),
        ("from proxies.model.muon import", "from proxies.model.lion import BankLion, Lion\n", 0),
    ],
    "proxies/parametrization/parametrization.py": [
        ('residual=rule["residual"].at(ratios)', " * hparams.residual_multiplier", 1),
    ],
}
"""One more hyperparameter, optimizer, and run-wide setting: by file, what text is put before (0) or
after (1) which."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Where a new hyperparameter, optimizer, and run-wide setting are seen
    (`planted_hyperparameter.py`).

    The optimizer is declared in three files: two entries, its updates, and the line that registers
    them; the run-wide setting in two.
    """
    tree = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path, changes in CHANGES.items():
        text = (tree / path).read_text(encoding="utf-8")
        for at, put, after in changes:
            assert text.count(at) == 1, at
            text = text.replace(at, at + put if after else put + at)
        (tree / path).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "tests" / "planted_lion.py", tree / "proxies" / "model" / "lion.py")
    script, folder = (
        ROOT / "tests" / "planted_hyperparameter.py",
        tmp_path_factory.mktemp("study") / "study",
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT / "tests" / "launcher")]),
    }
    command = [sys.executable, script, "residual_multiplier", "branch", folder]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_new_hyperparameter_is_searched_and_its_transfer_tested(seen):
    values, losses = zip(*seen["trials"], strict=True)
    assert len(set(values)) == len(values) and 0.5 <= min(values) < max(values) <= 2.0
    assert len(set(losses)) == len(losses), "it changes what is trained"
    assert ["residual_multiplier", "width"] in seen["tests"]
    assert "residual_multiplier" in seen["values"]


def test_people_and_trainers_are_told_of_a_new_hyperparameter(seen):
    assert seen["report"] and seen["placeholder"]
    assert seen["column"] == {"residual_multiplier": "branch"}
    assert "residual_multiplier" in seen["completion"]
    (field,) = seen["explain"]["fields"]
    assert field["source"]["kind"] == "search"
    assert [key["key"] for key in field["source"]["plan_keys"]] == [
        "search.axes.residual_multiplier"
    ]


def test_a_new_optimizer_trains_alone_and_in_a_bank_and_is_frozen_by_group(seen):
    assert seen["optimizers"] == ["lion"]
    assert seen["alone"] == pytest.approx(seen["in a bank"], abs=1e-5)
    assert seen["alone"] != pytest.approx(seen["by adamw"], abs=1e-3)
    for group in seen["decision"]["groups"]:
        assert group["optimizer"] == "lion"
        assert group["settings"].keys() == {"learning_rate", "weight_decay", "beta1", "beta2"}
    assert seen["decision"]["optimizer"] == "lion"
    assert seen["parity"] == [] and seen["moments"] == 1
    assert "proxy.eps" in seen["no eps"] and "adamw" in seen["no eps"]


def test_a_new_run_wide_setting_is_searched_applied_and_frozen(seen):
    assert len({trial["z_loss"] for trial in seen["points"]}) == len(seen["points"])
    first, *_, last = zip(seen["alone"], seen["with z-loss"], strict=True)
    assert first[0] == first[1], "the reported loss is without it"
    assert last[0] != pytest.approx(last[1], abs=1e-6), "the gradient is with it"
    assert seen["with z-loss"] == pytest.approx(seen["with z-loss in a bank"], abs=1e-5)
    assert seen["with z-loss"] == pytest.approx(seen["with z-loss by parts"], abs=1e-5)
    assert seen["decision"]["z_loss"] > 0
    assert "z_loss" not in seen["without"]


def test_explain_knows_where_a_new_optimizer_and_a_run_wide_setting_come_from(seen):
    told = {field["field"]: field for field in seen["all fields"]}
    assert told["z_loss"]["source"]["kind"] == "search"
    assert [key["key"] for key in told["z_loss"]["source"]["plan_keys"]] == ["search.axes.z_loss"]
    assert told["groups.embedding.optimizer"]["value"] == "lion"
    assert "groups.embedding.eps" not in told
    assert any("arXiv 2302.06675" in rule for rule in told["optimizer"]["source"]["rules"])


def test_every_exporter_refuses_both_by_name_or_has_them(seen):
    exports = seen["exports"]
    assert exports.pop("native") == {"z_loss": "exact", "groups": "exact"}
    assert "proxy.command is empty" in exports.pop("command")
    for trainer, said in exports.items():
        assert "optimizer = 'lion'" in said and "z_loss = " in said, trainer
