"""Tests of the published JSON Schema of `launch.json`, and of the documented computation of its
digest by another program.
"""

import copy
import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
from user_trainer_case import make_user_decision

from forerun._launcher.main_run.frozen.frozen import SCHEMA_VERSION
from forerun._proxies.core import canon

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "launcher" / "goldens" / f"launch-{SCHEMA_VERSION}.json"
SCHEMA = json.loads((ROOT / "docs" / "reference" / "launch.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def read_golden():
    """Return the golden launch file of this schema version, as JSON."""
    return json.loads(GOLDEN.read_text())


def make_user_config():
    """Return the launch file of a decision for a user's own trainer, as JSON."""
    decision = make_user_decision()
    return json.loads(canon.to_pretty_json({"decision": decision, "digest": decision.digest}))


EACH_CONFIG = pytest.mark.parametrize(
    "get_config", [read_golden, make_user_config], ids=["golden file", "a user's own trainer"]
)


@EACH_CONFIG
def test_schema_accepts_a_launch_file(get_config):
    VALIDATOR.validate(get_config())


def make_edit(path, value):
    """Return a function that sets the field at `path` of a config."""

    def edit(config):
        *keys, last = path
        for key in keys:
            config = config[key]
        config[last] = value

    return edit


@pytest.mark.parametrize(
    "fault",
    [
        make_edit(["decision", "seed"], "7"),
        make_edit(["decision", "more"], 1),
        make_edit(["digest"], "short"),
        make_edit(["decision", "schema_version"], 4),
        make_edit(["decision", "predicted", "loss_nats"], "NaN"),
        make_edit(["decision", "optimizer"], "sgd"),
        make_edit(["decision", "shape", "width"], 1.5),
        lambda config: config["decision"].pop("clip_norm"),
        lambda config: config["decision"]["groups"][0]["settings"].pop("eps"),
        make_edit(["decision", "groups", 0, "settings", "momentum"], 0.9),
        make_edit(["decision", "groups", 0, "optimizer"], "muon"),
    ],
)
def test_schema_rejects_a_planted_fault(fault):
    config = read_golden()
    changed = copy.deepcopy(config)
    fault(changed)
    assert VALIDATOR.is_valid(config) and not VALIDATOR.is_valid(changed)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@EACH_CONFIG
def test_documented_javascript_computes_the_digest(get_config, tmp_path):
    page = (ROOT / "docs" / "launch-config.md").read_text()
    program = page.partition("```js\n")[2].partition("```")[0]
    config = get_config()
    (tmp_path / "launch.json").write_bytes(canon.to_pretty_json(config))
    process = subprocess.run(
        ["node", "-e", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (
        process.stdout.strip() == config["digest"] == canon.compute_content_id(config["decision"])
    )
