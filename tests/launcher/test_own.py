"""Studies of somebody else's code, through every stage: a planted trainer as a command, a planted
model by factory.
"""

import json
import math
import sys

import pytest
from tiny_study import COMMAND, ask, forerun, plan_with, write_corpus

from sweeps.store.ledger import Ledger

# Its valley lies at 2^-6 at every width, its losses follow a law: the study must find both.
TRAINER = """
import json, math, os, sys
run = json.load(open(os.path.join(sys.argv[1], "run.json")))["values"]
n, lr, seed = run["num_steps"], math.log2(run["lr"]), run["seed"]
moved = lr + 6 + (0 if run["parametrization"] == "mup" else math.log2(run["width_multiplier"]))
loss = 1 + 8 / run["width"] + 3 / n ** 0.5 + 0.05 * moved * moved + 1e-3 * math.sin(1000 * seed + 77 * lr)
with open(os.path.join(sys.argv[1], "metrics.jsonl"), "w") as out:
    for step in range(1, n + 1):
        print(json.dumps({"step": step, "train_loss": loss + 1 / step}), file=out)
    print(json.dumps({"step": n, "val_loss": loss}), file=out)
"""  # noqa: E501
FACTORY = '[proxy]\nfactory = "mine:build"\n'
MODEL = """
from torch import nn
from proxies.model.decoder import Decoder, Multipliers

class Model(nn.Module):
    def __init__(self, shape, scale):
        super().__init__()
        self.shape, self.decoder = shape, Decoder(shape)
        self.multipliers = Multipliers(attention=shape.head_dim**-0.5, output=scale)
        for name, p in self.named_parameters():
            nn.init.ones_(p) if "norm" in name else nn.init.normal_(p, std=p.shape[-1] ** -0.5)

    def forward(self, ids):
        return self.decoder(ids, self.multipliers).view(*ids.shape, -1)

def build(shape):
    return Model(shape, 1.0)

def unscaled(shape):
    return Model(shape, shape.width / 8)  # undoes what the wrapper does to the readout
"""


@pytest.fixture(scope="module")
def commanded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commanded")
    (folder / "trainer.py").write_text(TRAINER)
    plan = plan_with(folder, COMMAND % sys.executable)
    code, body = ask("run", plan, "--study", folder / "study")
    assert code == 0, body
    return folder, body


def test_a_planted_trainer_is_swept_transferred_and_fitted(commanded):
    folder, body = commanded
    assert body["progress"]["ladder"] == [13, 13]
    assert 2**-7 < body["transfer"]["learning_rate"] < 2**-5
    verdict = body["transfer"]["tests"][0]["verdict"]
    assert all(abs(optimum["log2_value"] + 6) < 0.3 for optimum in verdict["optima"])
    control = verdict["control"]
    assert control["drift_octaves_per_doubling"]["value"] == pytest.approx(-1, abs=0.3)
    assert {gate["name"]: gate["outcome"] for gate in body["gates"]}["coordinates"] == "cannot_tell"
    line = body["own_run"]["line"]
    assert f"--width {body['choice']['shape']['width']}" in line
    assert f"--num-steps {body['choice']['num_steps']}" in line
    assert "the main run with your own trainer" in (folder / "study" / "report.html").read_text()


def test_losses_that_can_hardly_be_in_one_unit_are_warned_of_once(tmp_path):
    """A validation loss in bits per byte beside a training loss in nats per token."""
    (tmp_path / "trainer.py").write_text(
        "import json, os, sys\n"
        "last = json.load(open(os.path.join(sys.argv[1], 'run.json')))['values']['num_steps']\n"
        "with open(os.path.join(sys.argv[1], 'metrics.jsonl'), 'w') as out:\n"
        "    print(json.dumps({'step': last, 'train_loss': 5.0, 'val_loss': 3.0}), file=out)\n"
    )
    plan = plan_with(tmp_path, COMMAND % sys.executable)
    sweep = ("sweep", plan, "--set", "cluster.max_runs=2", "--study")
    code, _, err = forerun(*sweep, tmp_path / "study")
    assert (
        code == 4
        and err.count("warning: a run ended with a training loss of 5 and a validation loss of 3")
        == 1
    )
    unit = (
        "--set",
        'proxy.metrics_validation_loss_unit="bits per byte"',
        "--set",
        "proxy.metrics_bytes_per_token=2.4",
    )
    code, _, err = forerun(*sweep, tmp_path / "declared", *unit)
    assert code == 4 and "training loss" not in err
    losses = [run.result.loss_nats for run in Ledger.read(tmp_path / "declared").runs()]
    assert losses == [pytest.approx(3.0 * math.log(2) * 2.4)] * 2


def test_nothing_of_a_command_runs_twice(commanded):
    folder, body = commanded
    (folder / "trainer.py").unlink()  # what would run again, would fail
    code, again = ask("run", folder / "plan.toml", "--study", folder / "study")
    assert code == 0
    assert again["spend"] == body["spend"]
    (folder / "trainer.py").write_text(TRAINER)


def test_what_a_command_cannot_have_is_said(commanded):
    folder, _ = commanded
    code, body = ask("check", folder / "plan.toml", "--study", folder / "study")
    assert (code, body["error"]) == (4, "UnseenError")
    code, body = ask("freeze", folder / "study")
    assert code == 4, body
    assert ask("status", folder / "study")[0] == 0


def test_a_trainer_that_never_works_spoils_nothing(tmp_path):
    (tmp_path / "trainer.py").write_text("import sys; sys.exit('out of memory')")
    plan = plan_with(tmp_path, COMMAND % sys.executable)
    code, body = ask(
        "sweep", plan, "--study", tmp_path / "study", "--set", "cluster.max_attempts=1"
    )
    assert (code, body["error"]) == (2, "RunsFail")
    assert "out of memory" in body["message"]
    (tmp_path / "trainer.py").write_text(TRAINER)
    code, body = ask("sweep", plan, "--study", tmp_path / "study")
    assert code == 0
    assert {trial["status"] for trial in body["trials"]} == {"finished"}


def test_a_broken_command_runs_twice_and_its_fix_is_accepted(tmp_path):
    """One run first, alone; the same failure twice ends the study; then another command is no other
    plan.
    """
    broken = (
        "import os, sys; print(os.getpid(), file=open('starts', 'a')); sys.exit('AssertionError')"
    )
    (tmp_path / "broken.py").write_text(broken)
    (tmp_path / "trainer.py").write_text(TRAINER)
    plan = plan_with(tmp_path, COMMAND % sys.executable)
    text = plan.read_text()
    plan.write_text(text.replace("trainer.py", "broken.py"))
    arguments = (plan, "--study", tmp_path / "study", "--set", "cluster.max_attempts=9")
    code, out, err = forerun("sweep", *arguments, "--json")
    body = json.loads(out)
    assert (code, body["error"]) == (2, "RunsFail") and "AssertionError" in body["message"]
    assert len((tmp_path / "starts").read_text().split()) == 2
    shown = err + body["message"]
    assert shown.count("it ended with exit code 1") == shown.count("  | AssertionError") == 1, shown
    plan.write_text(text)
    changed = ("--set", "model.num_layers=3")
    code, body = ask("sweep", *arguments, *changed)
    assert (code, body["error"]) == (2, "PlanChanged"), "only the command may change"
    code, body = ask("sweep", *arguments)
    assert code == 0, body
    assert ask("status", tmp_path / "study")[0] == 0
    plan.write_text(text.replace("trainer.py", "broken.py"))
    code, body = ask("sweep", *arguments)
    assert (code, body["error"]) == (2, "PlanChanged"), "runs are recorded"


@pytest.fixture
def modelled(tmp_path, monkeypatch):
    # the code's folder goes first there, and must not stay
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_corpus(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    yield plan_with(tmp_path, FACTORY)
    sys.modules.pop("mine", None)


@pytest.mark.slow
def test_a_model_of_ones_own_goes_through_every_stage(modelled, tmp_path):
    widths = "transfer.check_widths=[8, 16, 32]"
    code, body = ask("run", modelled, "--study", tmp_path / "study", "--set", widths)
    assert code == 0, body
    assert body["own_run"] is None and body["digest"]
    study = tmp_path / "study"
    gates = {gate["name"]: gate["outcome"] for gate in body["gates"]}
    accept = [
        word
        for name, outcome in gates.items()
        if outcome != "passed"
        for word in ("--accept", name)
    ]
    code, frozen = ask("freeze", study, *accept, "--reason", "a toy")
    assert code == 0 and frozen["digest"] == body["digest"], frozen
    config = study / "frozen" / body["digest"]
    decision = json.loads((config / "launch.json").read_text())["decision"]
    assert decision["model"]["factory"]["target"] == "mine:build"
    rates = {group["kind"]: group["settings"]["learning_rate"] for group in decision["groups"]}
    assert rates["hidden"] == pytest.approx(rates["readout"] * 8 / body["choice"]["shape"]["width"])
    assert ask("verify", config)[0] == 0
    code, rehearsed = ask("rehearse", config, "--only", "loss", "--only", "resume")
    assert code == 0, rehearsed
    code, ended = ask("launch", config)
    assert (code, ended["event"]) == (0, "finished"), ended
    assert ask("watch", config, "--conclude")[0] == 0
    assert "mine:build" in (study / "report.html").read_text()

    (tmp_path / "mine.py").write_text(MODEL + "\n# another model, for all one knows\n")
    sys.modules.pop("mine", None)
    code, body = ask("verify", config)
    assert code == 2 and "mine:build has changed" in body["message"]
    code, body = ask("run", modelled, "--study", tmp_path / "study", "--set", widths)
    assert (code, body["error"]) == (2, "PlanChanged") and "factory" in body["message"]
    (tmp_path / "mine.py").unlink()
    assert ask("status", tmp_path / "study")[0] == 0  # what is recorded stands without the code


def test_a_model_that_fails_its_check_is_not_swept(modelled, tmp_path):
    changes = [
        "--set",
        "proxy.factory='mine:unscaled'",
        "--set",
        "transfer.check_widths=[8, 16, 32]",
        "--set",
        "transfer.check_num_steps=4",
        "--set",
        "transfer.check_num_seeds=2",
    ]
    code, body = ask("sweep", modelled, "--study", tmp_path / "study", *changes)
    assert (code, body["error"]) == (3, "GateError")
    assert "readout" in body["message"]
    code, out, _ = forerun("check", modelled, "--study", tmp_path / "study", *changes, "--json")
    assert code == 3
    assert [p["kind"] for p in json.loads(out)["own_model"]["parameters"]].count("readout") == 1
    # No run is recorded: the fixed factory is accepted, and what was recorded of the broken one no
    # longer counts.
    (tmp_path / "mine.py").write_text(MODEL.replace("shape.width / 8", "1.0"))
    code, body = ask("check", modelled, "--study", tmp_path / "study", *changes)
    assert code != 3 and body["coordinates"]["mup"]["outcome"] in ("passed", "cannot_tell"), body
    counted = [record.key for record in Ledger.read(tmp_path / "study").records("counted")]
    assert counted == ["1", "1/1"], "its parameters are counted anew"
    code, body = ask(
        "check", modelled, "--study", tmp_path / "study", *changes, "--set", "model.num_layers=3"
    )
    assert (code, body["error"]) == (2, "PlanChanged"), "only the user's code may change"


def test_depth_is_checked_where_there_is_a_rule(modelled, tmp_path):
    """By our own model: a factory that takes no `forward` cannot scale its branches, and is refused
    by name.
    """
    rule = [
        "--set",
        "proxy.parametrization='completep'",
        "--set",
        "transfer.check_depths=[1, 2, 4]",
    ]
    code, body = ask("check", modelled, "--study", tmp_path / "own", *rule)
    assert code == 2 and "residual" in body["message"]
    code, body = ask(
        "check", modelled, "--study", tmp_path / "study", *rule, "--set", "proxy.factory=''"
    )
    assert set(body["coordinates"]) == {"completep", "sp", "depth"}
    assert body["coordinates"]["depth"]["depths"] == [1, 2, 4]
