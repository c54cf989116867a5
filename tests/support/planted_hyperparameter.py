"""Run a study in which a hyperparameter, an optimizer and a setting of a whole run were added.

`test_registries.py` adds them to a copy of the packages: the hyperparameter NAME, Lion, and the
z-loss. It runs this script as `planted_hyperparameter.py NAME ALIAS FOLDER`, with the copy first on
PYTHONPATH. The script prints as JSON where the added names appear.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from tiny_study import PLAN, run_json, write_corpus

from forerun._launcher.cli.verbs.transfer import transfer
from forerun._launcher.main_run.exporters.export_checks import ExportError
from forerun._launcher.main_run.exporters.registry import EXPORTER_MODULES, load_exporter
from forerun._launcher.main_run.exporters.trainers import native
from forerun._launcher.main_run.frozen.launch_file import read_launch
from forerun._proxies.core import canon
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.programs import PLACEHOLDERS
from forerun._proxies.core.spec import Numerics
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._sweeps.store.ledger import Ledger
from forerun._transfer.tables.columns import find_columns

NAME, ALIAS, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def format_plan():
    """Return the tiny study's plan with Lion.

    It searches the planted hyperparameter and setting, and tests the hyperparameter over width.
    """
    text = PLAN.replace(
        "tie_seeds = 0", f"tie_seeds = 0\naxes = {{ {NAME} = [0.5, 2.0], z_loss = [1e-4, 1e-1] }}"
    )
    text = text.replace("[proxy]", '[proxy]\noptimizer = "lion"')
    text = text.replace(
        'hyperparameters = { clip_norm = ["width"] }', f'hyperparameters = {{ {NAME} = ["width"] }}'
    )
    return text.replace("durations = [1.0, 2.0, 3.0]", "durations = []").replace("[16]", "[]")


def run_verb(*words):
    """Run a verb and return what it prints with `--json`."""
    code, body = run_json(*words)
    # A gate may fail (3) or be unable to tell (4): only the names in the output matter.
    assert code in (0, 3, 4), (words, body)
    return body


def list_completions():
    """Return what a shell offers after `forerun transfer --hyperparameter`."""
    (option,) = (param for param in transfer.params if param.name == "hyperparameter")
    return [item.value for item in option.shell_complete(None, "")]


def train_run(spec, engine):
    """Return the training losses of a run, step by step."""
    engine.admit(0, spec)
    ((_, _, curve),) = engine.advance(100)
    return list(curve.train_loss_nats)


def train_variants(store, spec):
    """Train with the new optimizer and setting; return the losses by engine and variant."""
    single = dataclasses.replace(spec, numerics=Numerics())
    without_z_loss, with_z_loss = (
        dataclasses.replace(single, hparams=dataclasses.replace(single.hparams, z_loss=z_loss))
        for z_loss in (0.0, 0.1)
    )
    fused = dataclasses.replace(with_z_loss, numerics=Numerics(fused_loss=True))

    def make_bank(run):
        return Bank(
            run.shape, run.batch_tokens, run.numerics, store, optimizer=run.optimizer, device="cpu"
        )

    return {
        "alone": train_run(without_z_loss, SingleTrialEngine(store, device="cpu")),
        "in a bank": train_run(without_z_loss, make_bank(without_z_loss)),
        "by adamw": train_run(
            dataclasses.replace(without_z_loss, optimizer="adamw"),
            SingleTrialEngine(store, device="cpu"),
        ),
        "with z-loss": train_run(with_z_loss, SingleTrialEngine(store, device="cpu")),
        "with z-loss in a bank": train_run(with_z_loss, make_bank(with_z_loss)),
        "with z-loss by parts": train_run(fused, make_bank(fused)),
    }


def export_to_all(decision, folder):
    """Return, for each trainer, the verdicts on the planted fields or the refusal."""
    outcomes = {}
    for trainer in EXPORTER_MODULES:
        try:
            report = load_exporter(trainer).export(decision, folder / trainer)
            verdicts = {entry.field: entry.verdict for entry in report.entries}
            outcomes[trainer] = {name: verdicts[name] for name in ("z_loss", "groups")}
        except ExportError as error:
            outcomes[trainer] = str(error)
    return outcomes


# Run the verbs on the study, up to the frozen config.
write_corpus(FOLDER)
(FOLDER / "plan.toml").write_text(format_plan())
os.chdir(FOLDER)
run_verb("validate", "plan.toml")
sweep_report = run_verb("sweep", "plan.toml")
transfer_report = run_verb("transfer", "plan.toml")
run_report = run_verb("run", "plan.toml")
accept_options = []
for gate in run_report["gates"]:
    if gate["outcome"] != "passed":
        accept_options += ["--accept", gate["name"]]
run_verb("freeze", "study", *accept_options, "--reason", "planted")
(frozen,) = (Path("study") / "frozen").iterdir()
decision = read_launch(frozen)
specs = [run.spec for run in Ledger.read(Path("study")).read_runs()]
# Keys are what the tests in test_registries.py ask for.
print(
    json.dumps(
        {
            "trials": [[trial[NAME], trial["loss_nats"]] for trial in sweep_report["trials"]],
            "tests": [[test["hyperparameter"], test["axis"]] for test in transfer_report["tests"]],
            "values": [row["hyperparameter"] for row in transfer_report["values"]],
            "report": NAME.replace("_", " ")
            in (FOLDER / "study" / "report.html").read_text(encoding="utf-8"),
            "placeholder": NAME in PLACEHOLDERS,
            "column": find_columns(Path("runs.csv"), [ALIAS, "width", "loss"]).values,
            "completion": list_completions(),
            "explain": run_verb("explain", frozen, "forward.residual"),
            "optimizers": sorted({spec.optimizer for spec in specs}),
            "points": sweep_report["trials"],
            "all fields": run_verb("explain", frozen)["fields"],
            "decision": canon.to_json(decision),
            "without": canon.to_json(dataclasses.replace(decision, z_loss=0.0)),
            "parity": native.find_mismatches(decision),
            "moments": RECIPES["lion"].get_optimizer("hidden").num_moments,
            "exports": export_to_all(decision, FOLDER / "exports"),
            "no eps": run_json("validate", "plan.toml", "--set", "proxy.eps=1e-6")[1]["message"],
            **train_variants(
                TokenStore(Path("corpus")), next(spec for spec in specs if spec.shape.width == 16)
            ),
        }
    )
)
