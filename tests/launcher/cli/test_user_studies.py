"""Tests of studies with the user's code: a trainer that runs as a command, and a model by factory.

The planted trainer's loss has its optimum at a learning rate of 2^-6 at every width under muP, and
follows a law in width and steps. The study must recover both.
"""

import json
import math
import sys

import pytest
from tiny_study import COMMAND, run_forerun, run_json, write_corpus, write_plan_with

from forerun._sweeps.store.ledger import Ledger

TRAINER = """
import json, math, os, sys
run = json.load(open(os.path.join(sys.argv[1], "run.json")))["values"]
n, lr, seed = run["num_steps"], math.log2(run["lr"]), run["seed"]
octaves_off = lr + 6 + (0 if run["parametrization"] == "mup" else math.log2(run["width_multiplier"]))
loss = 1 + 8 / run["width"] + 3 / n ** 0.5 + 0.05 * octaves_off ** 2 + 1e-3 * math.sin(1000 * seed + 77 * lr)
with open(os.path.join(sys.argv[1], "metrics.jsonl"), "w") as out:
    for step in range(1, n + 1):
        print(json.dumps({"step": step, "train_loss": loss + 1 / step}), file=out)
    print(json.dumps({"step": n, "val_loss": loss}), file=out)
"""  # noqa: E501
FACTORY = '[proxy]\nfactory = "mine:build"\n'
MODEL = """
from torch import nn
from forerun._proxies.model.decoder import Decoder, Multipliers

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
    return Model(shape, shape.width / 8)  # cancels the muP multiplier of the readout
"""


@pytest.fixture(scope="module")
def trainer_study(tmp_path_factory):
    """Folder and `run` answer of a finished study with the planted trainer."""
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "trainer.py").write_text(TRAINER)
    plan = write_plan_with(folder, COMMAND % sys.executable)
    code, body = run_json("run", plan, "--study", folder / "study")
    assert code == 0, body
    return folder, body


def test_study_recovers_the_planted_optimum_and_law(trainer_study):
    folder, body = trainer_study
    assert body["progress"]["ladder"] == [13, 13], "13 of 13 runs of the ladder are done"
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


def test_losses_in_different_units_are_warned_of_once(tmp_path):
    """The training loss is in nats per token, the validation loss in bits per byte."""
    (tmp_path / "trainer.py").write_text(
        "import json, os, sys\n"
        "last = json.load(open(os.path.join(sys.argv[1], 'run.json')))['values']['num_steps']\n"
        "with open(os.path.join(sys.argv[1], 'metrics.jsonl'), 'w') as out:\n"
        "    print(json.dumps({'step': last, 'train_loss': 5.0, 'val_loss': 3.0}), file=out)\n"
    )
    plan = write_plan_with(tmp_path, COMMAND % sys.executable)
    sweep = ("sweep", plan, "--set", "cluster.max_runs=2", "--study")
    code, _, err = run_forerun(*sweep, tmp_path / "study")
    warning = "warning: a run ended with a training loss of 5 and a validation loss of 3"
    assert code == 4 and err.count(warning) == 1
    unit = (
        "--set",
        'proxy.metrics_validation_loss_unit="bits per byte"',
        "--set",
        "proxy.metrics_bytes_per_token=2.4",
    )
    code, _, err = run_forerun(*sweep, tmp_path / "declared", *unit)
    assert code == 4 and "training loss" not in err
    losses = [run.result.loss_nats for run in Ledger.read(tmp_path / "declared").read_runs()]
    assert losses == [pytest.approx(3.0 * math.log(2) * 2.4)] * 2


def test_finished_runs_of_a_command_are_not_repeated(trainer_study):
    folder, body = trainer_study
    (folder / "trainer.py").unlink()  # a repeated run would fail
    code, second_body = run_json("run", folder / "plan.toml", "--study", folder / "study")
    assert code == 0
    assert second_body["spend"] == body["spend"]
    (folder / "trainer.py").write_text(TRAINER)


def test_check_and_freeze_cannot_tell_for_a_command(trainer_study):
    folder, _ = trainer_study
    code, body = run_json("check", folder / "plan.toml", "--study", folder / "study")
    assert (code, body["error"]) == (4, "UnseenError")
    code, body = run_json("freeze", folder / "study")
    assert code == 4, body
    assert run_json("status", folder / "study")[0] == 0


def test_study_continues_after_its_failing_trainer_is_fixed(tmp_path):
    (tmp_path / "trainer.py").write_text("import sys; sys.exit('out of memory')")
    plan = write_plan_with(tmp_path, COMMAND % sys.executable)
    code, body = run_json(
        "sweep", plan, "--study", tmp_path / "study", "--set", "cluster.max_attempts=1"
    )
    assert (code, body["error"]) == (2, "RunsFail")
    assert "out of memory" in body["message"]
    (tmp_path / "trainer.py").write_text(TRAINER)
    code, body = run_json("sweep", plan, "--study", tmp_path / "study")
    assert code == 0
    assert {trial["status"] for trial in body["trials"]} == {"finished"}


def test_broken_command_runs_twice_and_its_fix_is_accepted(tmp_path):
    """The first run starts alone, and the same failure twice ends the study.

    While no run is recorded, the command may change without a new study.
    """
    broken = (
        "import os, sys; print(os.getpid(), file=open('starts', 'a')); sys.exit('AssertionError')"
    )
    (tmp_path / "broken.py").write_text(broken)
    (tmp_path / "trainer.py").write_text(TRAINER)
    plan = write_plan_with(tmp_path, COMMAND % sys.executable)
    text = plan.read_text()
    plan.write_text(text.replace("trainer.py", "broken.py"))
    arguments = (plan, "--study", tmp_path / "study", "--set", "cluster.max_attempts=9")
    code, out, err = run_forerun("sweep", *arguments, "--json")
    body = json.loads(out)
    assert (code, body["error"]) == (2, "RunsFail") and "AssertionError" in body["message"]
    assert len((tmp_path / "starts").read_text().split()) == 2
    shown = err + body["message"]
    assert shown.count("it ended with exit code 1") == shown.count("  | AssertionError") == 1, shown
    plan.write_text(text)
    changed = ("--set", "model.num_layers=3")
    code, body = run_json("sweep", *arguments, *changed)
    assert (code, body["error"]) == (2, "PlanChanged"), "only the command may change"
    code, body = run_json("sweep", *arguments)
    assert code == 0, body
    assert run_json("status", tmp_path / "study")[0] == 0
    plan.write_text(text.replace("trainer.py", "broken.py"))
    code, body = run_json("sweep", *arguments)
    assert (code, body["error"]) == (2, "PlanChanged"), "runs are recorded"


@pytest.fixture
def model_plan(tmp_path, monkeypatch):
    """A plan whose model is built by the factory `mine:build`."""
    # Loading the factory prepends its folder to sys.path, which must not outlive the test.
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_corpus(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    yield write_plan_with(tmp_path, FACTORY)
    sys.modules.pop("mine", None)


@pytest.mark.slow
def test_user_model_passes_every_stage(model_plan, tmp_path):
    widths = "transfer.check_widths=[8, 16, 32]"
    code, body = run_json("run", model_plan, "--study", tmp_path / "study", "--set", widths)
    assert code == 0, body
    assert body["own_run"] is None and body["digest"]
    study = tmp_path / "study"
    gates = {gate["name"]: gate["outcome"] for gate in body["gates"]}
    closed = [name for name, outcome in gates.items() if outcome != "passed"]
    accept = [word for name in closed for word in ("--accept", name)]
    code, frozen = run_json("freeze", study, *accept, "--reason", "a toy")
    assert code == 0 and frozen["digest"] == body["digest"], frozen
    config = study / "frozen" / body["digest"]
    decision = json.loads((config / "launch.json").read_text())["decision"]
    assert decision["model"]["factory"]["target"] == "mine:build"
    rates = {group["kind"]: group["settings"]["learning_rate"] for group in decision["groups"]}
    assert rates["hidden"] == pytest.approx(rates["readout"] * 8 / body["choice"]["shape"]["width"])
    assert run_json("verify", config)[0] == 0
    code, rehearsed = run_json("rehearse", config, "--only", "loss", "--only", "resume")
    assert code == 0, rehearsed
    code, launched = run_json("launch", config)
    assert (code, launched["event"]) == (0, "finished"), launched
    assert run_json("watch", config, "--conclude")[0] == 0
    assert "mine:build" in (study / "report.html").read_text()

    # Changed source may be another model: verify and run refuse it.
    (tmp_path / "mine.py").write_text(MODEL + "\n# changed\n")
    sys.modules.pop("mine", None)
    code, body = run_json("verify", config)
    assert code == 2 and "mine:build has changed" in body["message"]
    code, body = run_json("run", model_plan, "--study", tmp_path / "study", "--set", widths)
    assert (code, body["error"]) == (2, "PlanChanged") and "factory" in body["message"]
    (tmp_path / "mine.py").unlink()
    assert run_json("status", tmp_path / "study")[0] == 0, "status needs the records only"


def test_model_that_fails_the_coordinate_check_is_not_swept(model_plan, tmp_path):
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
    code, body = run_json("sweep", model_plan, "--study", tmp_path / "study", *changes)
    assert (code, body["error"]) == (3, "GateError")
    assert "readout" in body["message"]
    code, out, _ = run_forerun(
        "check", model_plan, "--study", tmp_path / "study", *changes, "--json"
    )
    assert code == 3
    parameters = json.loads(out)["own_model"]["parameters"]
    assert [parameter["kind"] for parameter in parameters].count("readout") == 1

    # No run is recorded, so a fixed factory is accepted and the records of the broken one are void.
    (tmp_path / "mine.py").write_text(MODEL.replace("shape.width / 8", "1.0"))
    code, body = run_json("check", model_plan, "--study", tmp_path / "study", *changes)
    assert code != 3 and body["coordinates"]["mup"]["outcome"] in ("passed", "cannot_tell"), body
    counted = [record.key for record in Ledger.read(tmp_path / "study").read_records("counted")]
    assert counted == ["1", "1/1"], "the parameters are counted again"
    code, body = run_json(
        "check", model_plan, "--study", tmp_path / "study", *changes, "--set", "model.num_layers=3"
    )
    assert (code, body["error"]) == (2, "PlanChanged"), "only the user's code may change"


def test_depth_is_checked_for_the_built_in_model_only(model_plan, tmp_path):
    """A factory without a `forward` argument cannot scale its residual branches: it is refused."""
    rule = [
        "--set",
        "proxy.parametrization='completep'",
        "--set",
        "transfer.check_depths=[1, 2, 4]",
    ]
    code, body = run_json("check", model_plan, "--study", tmp_path / "own", *rule)
    assert code == 2 and "residual" in body["message"]
    code, body = run_json(
        "check", model_plan, "--study", tmp_path / "study", *rule, "--set", "proxy.factory=''"
    )
    assert set(body["coordinates"]) == {"completep", "sp", "depth"}
    assert body["coordinates"]["depth"]["depths"] == [1, 2, 4]
