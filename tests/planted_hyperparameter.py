"""A study of a tree in which one more hyperparameter, an optimizer (Lion) and a run-wide setting
(z-loss) are declared.

Where they are seen is printed as JSON. test_registries.py runs it with that tree first on
PYTHONPATH: `planted_hyperparameter.py NAME ALIAS FOLDER`.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from tiny_study import PLAN, ask, write_corpus

from launcher.exporters.fidelity import MODULES, ExportError, exporter
from launcher.exporters.trainers import native
from launcher.frozen.launch_file import read_launch
from launcher.verbs.transfer import transfer
from proxies.core import canon
from proxies.core.optimizers import RECIPES
from proxies.core.programs import PLACEHOLDERS
from proxies.core.spec import Numerics
from proxies.data.tokens import TokenStore
from proxies.training.bank import Bank
from proxies.training.solo import Solo
from sweeps.store.ledger import Ledger
from transfer.tables.columns import find_columns

NAME, ALIAS, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def plan():
    """The tiny study's by Lion, which searches the new ones, and tests one of them over width
    alone.
    """
    text = PLAN.replace(
        "tie_seeds = 0", f"tie_seeds = 0\naxes = {{ {NAME} = [0.5, 2.0], z_loss = [1e-4, 1e-1] }}"
    )
    text = text.replace("[proxy]", '[proxy]\noptimizer = "lion"')
    text = text.replace(
        'hyperparameters = { clip_norm = ["width"] }', f'hyperparameters = {{ {NAME} = ["width"] }}'
    )
    return text.replace("durations = [1.0, 2.0, 3.0]", "durations = []").replace("[16]", "[]")


def asked(*words):
    """A verb's `--json`."""
    code, body = ask(*words)
    assert code in (0, 3, 4, 6), (words, body)
    return body


def completions():
    """What a shell is offered after `forerun transfer --hyperparameter`."""
    (option,) = (one for one in transfer.params if one.name == "hyperparameter")
    return [item.value for item in option.shell_complete(None, "")]


def losses_of(spec, engine):
    """Training losses of a run, step by step."""
    engine.admit(0, spec)
    ((_, _, curve),) = engine.advance(100)
    return list(curve.train_loss_nats)


def train(store, spec):
    """The new optimizer and the run-wide setting at work: losses by engine."""
    lone = dataclasses.replace(spec, numerics=Numerics())
    weighted = dataclasses.replace(lone, hparams=dataclasses.replace(lone.hparams, z_loss=0.1))
    plain = dataclasses.replace(lone, hparams=dataclasses.replace(lone.hparams, z_loss=0.0))
    by_parts = dataclasses.replace(weighted, numerics=Numerics(fused_loss=True))

    def bank(run):
        return Bank(
            run.shape, run.batch_tokens, run.numerics, store, optimizer=run.optimizer, device="cpu"
        )

    return {
        "alone": losses_of(plain, Solo(store, device="cpu")),
        "in a bank": losses_of(plain, bank(plain)),
        "by adamw": losses_of(
            dataclasses.replace(plain, optimizer="adamw"), Solo(store, device="cpu")
        ),
        "with z-loss": losses_of(weighted, Solo(store, device="cpu")),
        "with z-loss in a bank": losses_of(weighted, bank(weighted)),
        "with z-loss by parts": losses_of(by_parts, bank(by_parts)),
    }


def exported(decision, folder):
    """By trainer, the verdicts on what is new, or the refusal."""
    found = {}
    for trainer in MODULES:
        try:
            report = exporter(trainer).export(decision, folder / trainer)
            verdicts = {entry.field: entry.verdict for entry in report.entries}
            found[trainer] = {name: verdicts[name] for name in ("z_loss", "groups")}
        except ExportError as error:
            found[trainer] = str(error)
    return found


write_corpus(FOLDER)
(FOLDER / "plan.toml").write_text(plan())
os.chdir(FOLDER)
asked("validate", "plan.toml")
swept, moved, ran = (
    asked("sweep", "plan.toml"),
    asked("transfer", "plan.toml"),
    asked("run", "plan.toml"),
)
gates = [
    part
    for gate in ran["gates"]
    if gate["outcome"] != "passed"
    for part in ("--accept", gate["name"])
]
asked("freeze", "study", *gates, "--reason", "planted")
(frozen,) = (Path("study") / "frozen").iterdir()
decision = read_launch(frozen)
specs = [run.spec for run in Ledger.read(Path("study")).runs()]
print(
    json.dumps(
        {
            "trials": [[trial[NAME], trial["loss_nats"]] for trial in swept["trials"]],
            "tests": [[test["hyperparameter"], test["axis"]] for test in moved["tests"]],
            "values": [row["hyperparameter"] for row in moved["values"]],
            "report": NAME.replace("_", " ")
            in (FOLDER / "study" / "report.html").read_text(encoding="utf-8"),
            "placeholder": NAME in PLACEHOLDERS,
            "column": find_columns(Path("runs.csv"), [ALIAS, "width", "loss"]).values,
            "completion": completions(),
            "explain": asked("explain", frozen, "forward.residual"),
            "optimizers": sorted({spec.optimizer for spec in specs}),
            "points": swept["trials"],
            "all fields": asked("explain", frozen)["fields"],
            "decision": canon.to_json(decision),
            "without": canon.to_json(dataclasses.replace(decision, z_loss=0.0)),
            "parity": native.parity(decision),
            "moments": RECIPES["lion"].optimizer_for("hidden").num_moments,
            "exports": exported(decision, FOLDER / "exports"),
            "no eps": ask("validate", "plan.toml", "--set", "proxy.eps=1e-6")[1]["message"],
            **train(
                TokenStore(Path("corpus")), next(spec for spec in specs if spec.shape.width == 16)
            ),
        }
    )
)
