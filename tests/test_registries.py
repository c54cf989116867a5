"""Tests that hyperparameters and optimizers are declared in one place, their registries.

Other files must not name a hyperparameter or an optimizer. A new hyperparameter or optimizer,
planted in a copy of the packages, must appear everywhere: in the search, reports, frozen records,
and exports.
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

from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE
from forerun._proxies.core.optimizers import OPTIMIZERS
from forerun._proxies.core.rules import CHOICES, POWER_BOUNDS

ROOT = Path(__file__).parents[1]
PACKAGES = ("forerun", "proxies", "sweeps", "transfer", "scaling_fits", "launcher")
FILES_OF_REGISTRIES = (
    "proxies/core/hyperparameters.py",
    "proxies/core/optimizers.py",
    "proxies/core/muon.py",
    "proxies/model/optimizer.py",
    "proxies/model/bank_adamw.py",
    "proxies/model/bank_muon.py",
    "proxies/model/muon.py",
)
"""Files that declare hyperparameters and optimizers, or implement optimizers."""
EXPORTERS = "launcher/main_run/exporters/"
"""Folder whose files write the names that each trainer uses."""
EXCEPTIONS = {
    "forerun/hook.py": (
        "torch's names of an optimizer group's settings; this file imports no module of forerun"
    ),
    "proxies/core/numbers.py": "the record of a group: every optimizer has a rate and a decay",
    "launcher/study/plan/sections.py": "the default optimizer of a plan",
    "proxies/core/rules.py": (
        "the table of powers: how decay and eps of each kind of parameter scale"
    ),
    "proxies/parametrization/parametrization.py": (
        "applies the table of powers to each parameter and to the forward multipliers"
    ),
    "proxies/model/layers.py": "eps of the norms, which is no hyperparameter",
    "launcher/study/plan/sources.py": "the papers behind the table's choices for decay and eps",
    "launcher/report/explanations/parametrizations.py": (
        "columns of a table whose `--json` keys are a contract"
    ),
    "launcher/main_run/frozen/frozen.py": "the frozen record: its keys are a contract",
    "launcher/main_run/supervisor/user_proof.py": "the clip norm that a user's script used",
    "launcher/main_run/trainer/rollback.py": "a rollback may lower the clip norm and records it",
    "launcher/main_run/trainer/training.py": "the clip norm that is used at a step",
}
"""Other files that may name a hyperparameter or an optimizer, with the reason."""
MAX_EXCEPTIONS = 15


def list_registered_names():
    """Return the names and aliases in the registries, except those that any file may use.

    Every file may name the learning rate.
    """
    declared = [entry for entry in HYPERPARAMETERS.values() if entry.name != LEARNING_RATE]
    aliases = {alias for entry in declared for alias in entry.aliases}
    # These are also words for schedules and arrays.
    aliases -= {"warmup", "clip"}
    return {"betas", *aliases, *(entry.name for entry in declared), *OPTIMIZERS}


def find_registered_names(text):
    """Return the hyperparameters and optimizers that a source names.

    A name counts as a variable, attribute, argument, function or string.
    """
    tree = ast.parse(text)
    ignored = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            # A docstring
            ignored.add(id(node.value))
        if isinstance(node, ast.Attribute) and "finfo(" in ast.unparse(node.value):
            # Here `eps` is the rounding error of a float type.
            ignored.add(id(node))
    # Names of a parametrization's choices contain names of hyperparameters.
    choices = re.compile("|".join({*CHOICES, *POWER_BOUNDS} - {*HYPERPARAMETERS}))
    words = set()
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        for field in ("id", "attr", "arg", "name", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                words.add(choices.sub("", word))
    registered = "|".join(sorted(list_registered_names(), key=len, reverse=True))
    pattern = re.compile(rf"(?<![a-z0-9_])_?({registered})(?![a-z0-9])", re.IGNORECASE)
    return {match[1].lower() for word in words for match in pattern.finditer(word)}


def list_sources():
    """Return the Python files of the packages."""
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_only_the_registries_name_hyperparameters_and_optimizers():
    names_by_path = {
        str(path.relative_to(ROOT)): find_registered_names(path.read_text(encoding="utf-8"))
        for path in list_sources()
    }
    allowed = (*FILES_OF_REGISTRIES, EXPORTERS)
    files_with_names = {
        path for path, words in names_by_path.items() if words and not path.startswith(allowed)
    }
    assert files_with_names == set(EXCEPTIONS), (
        "use the registry instead of a name; remove exceptions that are not needed"
    )
    assert len(EXCEPTIONS) <= MAX_EXCEPTIONS


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
def test_planted_name_is_found(line):
    assert find_registered_names(line)


def test_similar_words_are_not_found():
    assert not find_registered_names(
        "batch_warmup_fraction = steps.epsilon + torch.finfo(torch.float64).eps\nlearning_rate = "
        "alphabet"
    )


# Source lines that declare a run-wide setting (z_loss), an optimizer (Lion), and a hyperparameter
# (residual_multiplier)
SETTING_ENTRY = """            Hyperparameter(
                name="z_loss", meaning="Weight of the squared log of the softmax's sum.", default=0.0, least=0,
                set_by="proxy", can_be_off=True, applied_to="loss", aliases=("zloss",),
            ),
"""  # noqa: E501
SETTING_FIELD = """    z_loss: float = dataclasses.field(
        default=HYPERPARAMETERS["z_loss"].default, metadata=canon.UNLESS_DEFAULT
    )
"""
SETTING_LOSS_TERM = """LOSS_TERMS["z_loss"] = LossTerm(
    value=lambda logits, targets: logits.logsumexp(dim=-1) ** 2,
    gradient=lambda logits, targets: 2 * logits.logsumexp(dim=-1, keepdim=True) * logits.softmax(dim=-1),
)
"""  # noqa: E501
OPTIMIZER_SPEC = """            OptimizerSpec(
                name="lion",
                label="Lion",
                source="arXiv 2302.06675",
                settings=(LEARNING_RATE, WEIGHT_DECAY, "beta1", "beta2"),
                num_moments=1,
                step_copies=1,
            ),
"""
OPTIMIZER_RECIPE = """            Recipe(name="lion", label="Lion", default="lion"),
"""
OPTIMIZER_IMPLEMENTATION = """    "lion": Implementation(
        kind=Lion,
        bank=BankLion,
        name_of=lambda group: "lion",
    ),
"""
HYPERPARAMETER_ENTRY = """            Hyperparameter(
                name="residual_multiplier", meaning="Of each branch.", default=1.0, above=0, multiplies="residual",
                aliases=("branch",),
            ),
"""  # noqa: E501
HYPERPARAMETER_FIELD = (
    '    residual_multiplier: float = HYPERPARAMETERS["residual_multiplier"].default\n'
)
CHANGES = {
    "proxies/core/hyperparameters.py": [
        (
            '            Hyperparameter(\n                name="output_multiplier"',
            HYPERPARAMETER_ENTRY,
            0,
        ),
        ("    output_multiplier: float", HYPERPARAMETER_FIELD, 0),
        (
            '            Hyperparameter(\n                name="embedding_multiplier"',
            SETTING_ENTRY,
            0,
        ),
        ("    embedding_multiplier: float", SETTING_FIELD, 0),
    ],
    "proxies/model/loss.py": [("def get_loss_weights(", SETTING_LOSS_TERM, 0)],
    "proxies/core/optimizers.py": [
        ('            OptimizerSpec(\n                name="muon"', OPTIMIZER_SPEC, 0),
        ('            Recipe(\n                name="muon"', OPTIMIZER_RECIPE, 0),
    ],
    "proxies/model/optimizer.py": [
        ('    "muon": Implementation(', OPTIMIZER_IMPLEMENTATION, 0),
        (
            "from forerun._proxies.model.muon import",
            "from forerun._proxies.model.lion import BankLion, Lion\n",
            0,
        ),
    ],
    "proxies/parametrization/parametrization.py": [
        ('residual=rule["residual"].evaluate(ratios)', " * hparams.residual_multiplier", 1),
    ],
}
"""Additions that declare one more hyperparameter, optimizer and run-wide setting.

By file, each has a place, the text, and whether the text goes before (0) or after (1) the place.
"""


@pytest.fixture(scope="module")
def planted_study(tmp_path_factory):
    """Output of `planted_hyperparameter.py`, which lists where the planted declarations appear.

    A run-wide setting (z_loss) is a hyperparameter that groups of parameters do not have.
    """
    tree = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            tree / package,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for path, changes in CHANGES.items():
        text = (tree / path).read_text(encoding="utf-8")
        for place, addition, is_after in changes:
            assert text.count(place) == 1, place
            text = text.replace(place, place + addition if is_after else addition + place)
        (tree / path).write_text(text, encoding="utf-8")
    shutil.copy(
        ROOT / "tests" / "support" / "planted_lion.py", tree / "proxies" / "model" / "lion.py"
    )
    script = ROOT / "tests" / "support" / "planted_hyperparameter.py"
    folder = tmp_path_factory.mktemp("study") / "study"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT / "tests" / "support" / "launcher")]),
    }
    command = [sys.executable, script, "residual_multiplier", "branch", folder]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_new_hyperparameter_is_searched_and_its_transfer_is_tested(planted_study):
    values, losses = zip(*planted_study["trials"], strict=True)
    assert len(set(values)) == len(values) and 0.5 <= min(values) < max(values) <= 2.0
    assert len(set(losses)) == len(losses), "the hyperparameter must change the training"
    assert ["residual_multiplier", "width"] in planted_study["tests"]
    assert "residual_multiplier" in planted_study["values"]


def test_new_hyperparameter_appears_in_reports_placeholders_and_completions(planted_study):
    assert planted_study["report"] and planted_study["placeholder"]
    assert planted_study["column"] == {"residual_multiplier": "branch"}
    assert "residual_multiplier" in planted_study["completion"]
    (field,) = planted_study["explain"]["fields"]
    assert field["source"]["kind"] == "search"
    assert [key["key"] for key in field["source"]["plan_keys"]] == [
        "search.axes.residual_multiplier"
    ]


def test_new_optimizer_trains_alone_and_in_a_bank_and_is_frozen(planted_study):
    assert planted_study["optimizers"] == ["lion"]
    assert planted_study["alone"] == pytest.approx(planted_study["in a bank"], abs=1e-5)
    assert planted_study["alone"] != pytest.approx(planted_study["by adamw"], abs=1e-3)
    for group in planted_study["decision"]["groups"]:
        assert group["optimizer"] == "lion"
        assert group["settings"].keys() == {"learning_rate", "weight_decay", "beta1", "beta2"}
    assert planted_study["decision"]["optimizer"] == "lion"
    assert planted_study["parity"] == [] and planted_study["moments"] == 1
    assert "proxy.eps" in planted_study["no eps"] and "adamw" in planted_study["no eps"]


def test_new_run_wide_setting_is_searched_applied_and_frozen(planted_study):
    assert len({trial["z_loss"] for trial in planted_study["points"]}) == len(
        planted_study["points"]
    )
    losses, z_losses = planted_study["alone"], planted_study["with z-loss"]
    assert len(losses) == len(z_losses)
    assert losses[0] == z_losses[0], "the reported loss excludes the z-loss"
    assert losses[-1] != pytest.approx(z_losses[-1], abs=1e-6), "the gradient includes the z-loss"
    assert planted_study["with z-loss"] == pytest.approx(
        planted_study["with z-loss in a bank"], abs=1e-5
    )
    assert planted_study["with z-loss"] == pytest.approx(
        planted_study["with z-loss by parts"], abs=1e-5
    )
    assert planted_study["decision"]["z_loss"] > 0
    assert "z_loss" not in planted_study["without"]


def test_explain_names_the_source_of_a_new_optimizer_and_setting(planted_study):
    fields = {field["field"]: field for field in planted_study["all fields"]}
    assert fields["z_loss"]["source"]["kind"] == "search"
    assert [key["key"] for key in fields["z_loss"]["source"]["plan_keys"]] == ["search.axes.z_loss"]
    assert fields["groups.embedding.optimizer"]["value"] == "lion"
    assert "groups.embedding.eps" not in fields
    assert any("arXiv 2302.06675" in rule for rule in fields["optimizer"]["source"]["rules"])


def test_exporters_support_the_new_optimizer_and_setting_or_refuse_them_by_name(planted_study):
    exports = planted_study["exports"]
    assert exports.pop("native") == {"z_loss": "exact", "groups": "exact"}
    assert "proxy.command is empty" in exports.pop("command")
    for trainer, message in exports.items():
        assert "optimizer = 'lion'" in message and "z_loss = " in message, trainer
