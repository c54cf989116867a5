"""The published JSON Schema of `launch.json`, and its digest as other programs compute it."""

import copy
import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
from test_hook import own_decision

from launcher.frozen.frozen import SCHEMA_VERSION
from proxies.core import canon

ROOT = Path(__file__).parents[2]
GOLDENS = [ROOT / "tests" / "launcher" / "goldens" / f"launch-{SCHEMA_VERSION}.json"]
SCHEMA = json.loads((ROOT / "docs" / "reference" / "launch.schema.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)


def own_config():
    decision = own_decision()
    return json.loads(canon.pretty({"decision": decision, "digest": decision.digest}))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.name)
def test_it_takes_every_golden(golden):
    CHECK.validate(json.loads(golden.read_text()))


def test_it_takes_a_command_of_ones_own():
    CHECK.validate(own_config())


def _set(path, value):
    def change(config):
        *way, last = path
        for key in way:
            config = config[key]
        config[last] = value

    return change


@pytest.mark.parametrize(
    "fault",
    [
        _set(["decision", "seed"], "7"),
        _set(["decision", "more"], 1),
        _set(["digest"], "short"),
        _set(["decision", "schema_version"], 4),
        _set(["decision", "predicted", "loss_nats"], "NaN"),
        _set(["decision", "optimizer"], "sgd"),
        _set(["decision", "shape", "width"], 1.5),
        lambda config: config["decision"].pop("clip_norm"),
        lambda config: config["decision"]["groups"][0]["settings"].pop("eps"),
        _set(["decision", "groups", 0, "settings", "momentum"], 0.9),
        _set(["decision", "groups", 0, "optimizer"], "muon"),
    ],
)
def test_it_refuses_a_planted_fault(fault):
    config = json.loads(GOLDENS[-1].read_text())
    changed = copy.deepcopy(config)
    fault(changed)
    assert CHECK.is_valid(config) and not CHECK.is_valid(changed)


def programs():
    """Those that docs/launch-config.md shows, by the interpreter that runs them."""
    text = (ROOT / "docs" / "launch-config.md").read_text()
    return {"node": ["-e", text.partition("```js\n")[2].partition("```")[0]]}


@pytest.mark.parametrize("interpreter", programs())
@pytest.mark.parametrize("name", ["golden", "own"])
def test_another_language_computes_the_digest(interpreter, name, tmp_path):
    if shutil.which(interpreter) is None:
        pytest.skip(f"there is no {interpreter}")
    config = json.loads(GOLDENS[-1].read_text()) if name == "golden" else own_config()
    (tmp_path / "launch.json").write_bytes(canon.pretty(config))
    words = [interpreter, *programs()[interpreter]]
    said = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.strip() == config["digest"] == canon.content_id(config["decision"])
