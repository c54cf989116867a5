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
    ],
    "proxies/parametrization/parametrization.py": [
        ('residual=rule["residual"].at(ratios)', " * hparams.residual_multiplier", 1),
    ],
}
"""One more hyperparameter: by file, what text is put before (0) or after (1) which."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Where a new swept hyperparameter is seen, of two files' declarations
    (`planted_hyperparameter.py`).
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
