"""Export to the user's own trainer: its command line, and its values as JSON, YAML, and Hydra
overrides.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path

from forerun._launcher.main_run.exporters.export_checks import ExportError, Expressible
from forerun._launcher.main_run.exporters.export_writer import write_files
from forerun._launcher.main_run.exporters.fidelity import FidelityReport, Judgement, judge_fields
from forerun._launcher.main_run.frozen.frozen import Decision, OwnTrainer
from forerun._launcher.main_run.frozen.launch_file import RUN_FILE
from forerun._proxies.core import canon
from forerun._proxies.core.hyperparameters import RUN_WIDE, USER_TRAINER_HPARAMS
from forerun._proxies.core.programs import PATH_PLACEHOLDERS, find_placeholders
from forerun._proxies.external.command import fill_template

VERSIONS = (importlib.metadata.version("forerun"),)
VALUES_FILE, YAML_FILE, OVERRIDES_FILE = "run.json", "run.yml", "overrides.txt"
EXPRESSIBLE = Expressible(
    optimizers={}, run_wide=tuple(name for name in RUN_WIDE if name in USER_TRAINER_HPARAMS)
)
_PASSED_ON: Judgement = (
    "equivalent",
    "forerun passes the values and does not see what your trainer makes of them",
)
_NOT_PASSED_ON: Judgement = (
    "equivalent",
    "not passed to the command: your trainer decides it, or `forerun watch` uses it",
)
_PASSED_FIELDS = (
    "shape",
    "base_shape",
    "learning_rate",
    "batch_tokens",
    "num_tokens",
    "seed",
    "data",
    "groups",
    "forward",
    *RUN_WIDE,
)
"""Fields of the decision that are values of the command."""


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `run.sh` (`run.sh RUN_DIR [DATA]`), and the values as `run.json`, `run.yml`, and
    Hydra's `overrides.txt`.

    Raises:
        ExportError: The version is not that of this forerun, or forerun's own model trains the
            config.
    """
    own, problems = decision.own, []
    if version not in VERSIONS:
        problems.append(f"version {version!r} is unknown: this is {VERSIONS[-1]}")
    if own is None:
        problems.append(
            "proxy.command is empty: forerun's own model trains this config; use another trainer"
        )
    if problems or own is None:  # The second condition is for the type checker.
        raise ExportError("command", problems)
    values = dict(sorted(own.values.items()))
    files = {
        RUN_FILE: _format_run_script(own, decision.digest),
        VALUES_FILE: canon.to_pretty_json({"digest": decision.digest, "values": values}).decode(),
        YAML_FILE: "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()),
        OVERRIDES_FILE: "".join(f"{name}={json.dumps(value)}\n" for name, value in values.items()),
    }
    write_files(out_dir, files)
    judgements = dict.fromkeys(Decision.__dataclass_fields__, _NOT_PASSED_ON)
    judgements |= {**dict.fromkeys(_PASSED_FIELDS, _PASSED_ON), "own": ("exact", "")}
    entries = judge_fields(decision, judgements, EXPRESSIBLE)
    return FidelityReport(trainer="command", version=version, entries=entries)


def _format_run_script(own: OwnTrainer, digest: str) -> str:
    """Return a script that starts the user's trainer.

    Args:
        own: The user's trainer, with its values.
        digest: Digest of the config.
    """
    template = own.command.template
    needs_data = "data" in find_placeholders(template)
    variables = {"run_dir": "$RUN_DIR", "run_json": f"$HERE/{VALUES_FILE}", "data": "$DATA"}
    # Without `{data}` in the template, the second argument may be absent.
    data_argument = "$2" if needs_data else "${2:-}"
    # The paths differ between machines, so they become shell variables. A NUL byte, which no other
    # value can have, marks them until the words are quoted.
    marked_paths = {name: f"\0{name}\0" for name in PATH_PLACEHOLDERS}
    words = fill_template(template, {**own.values, **marked_paths})
    command = " ".join(_quote(word, variables) for word in words)
    return (
        "#!/bin/sh\n"
        f"# Starts your own trainer with the config {digest}: {RUN_FILE} RUN_DIR"
        f"{' DATA' if needs_data else ''}\n"
        "# Run it where the command of the plan runs (proxy.code_path). RUN_DIR: an empty folder "
        "for this run.\n"
        "set -eu\n"
        'HERE="$(cd "$(dirname "$0")" && pwd)"\n'
        f'RUN_DIR="$1" DATA="{data_argument}"\n'
        f"exec {command}\n"
    )


def _quote(word: str, variables: dict[str, str]) -> str:
    """Quote a word for the shell, with the names between NULs as variables."""
    texts = word.split("\0")
    # Every second part lies between two NULs.
    texts[::2] = [shlex.quote(text) if text else "" for text in texts[::2]]
    texts[1::2] = [f'"{variables[name]}"' for name in texts[1::2]]
    return "".join(texts) or "''"
