"""The decision for the user's own trainer: its command line, and the same values as JSON, YAML and
Hydra overrides.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import cast

from launcher.exporters.export_writer import write_files
from launcher.exporters.fidelity import (
    ExportError,
    Expressible,
    FidelityReport,
    Judgement,
    judge_fields,
)
from launcher.frozen.frozen import Decision
from launcher.frozen.launch_file import RUN_FILE
from proxies.core import canon
from proxies.core.hyperparameters import RUN_WIDE, USER_TRAINER_HPARAMS
from proxies.core.programs import PLACES, placeholders_in
from proxies.external.command import filled

VERSIONS = (importlib.metadata.version("forerun"),)
VALUES_FILE, YAML_FILE, OVERRIDES_FILE = "run.json", "run.yml", "overrides.txt"
EXPRESSIBLE = Expressible(
    optimizers={}, run_wide=tuple(name for name in RUN_WIDE if name in USER_TRAINER_HPARAMS)
)
_UNSEEN: Judgement = (
    "equivalent",
    "forerun passes the values and does not see what your trainer makes of them",
)
_AROUND: Judgement = (
    "equivalent",
    "no value of the command: your trainer's own, or `forerun watch`'s",
)
_JUDGEMENTS: dict[str, Judgement] = {
    "own": ("exact", ""),
    "shape": _UNSEEN,
    "base_shape": _UNSEEN,
    "learning_rate": _UNSEEN,
    "batch_tokens": _UNSEEN,
    "num_tokens": _UNSEEN,
    "seed": _UNSEEN,
    "data": _UNSEEN,
    "groups": _UNSEEN,
    "forward": _UNSEEN,
    **dict.fromkeys(RUN_WIDE, _UNSEEN),
}


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `run.sh` (`run.sh RUN_DIR [DATA]`) and the values as `run.json`, `run.yml` and Hydra's
    `overrides.txt`.

    Raises:
        ExportError: another version than this one, or a config of forerun's own model.
    """
    own = decision.own
    problems = (
        [] if version in VERSIONS else [f"version {version!r} is unknown: this is {VERSIONS[-1]}"]
    )
    problems += (
        []
        if own
        else ["proxy.command is empty: forerun's own model trains this config; use another trainer"]
    )
    if problems or own is None:
        raise ExportError("command", problems)
    named = placeholders_in(own.command.template)
    places = {"run_dir": "$RUN_DIR", "run_json": f"$HERE/{VALUES_FILE}", "data": "$DATA"}
    given = cast(dict[str, canon.Json], own.values)
    words = filled(own.command.template, {**given, **{name: f"\0{name}\0" for name in PLACES}})
    line = " ".join(_shell(word, places) for word in words)
    needs = f"{RUN_FILE} RUN_DIR" + (" DATA" if "data" in named else "")
    script = (
        "#!/bin/sh\n"
        f"# Starts your own trainer with the config {decision.digest}: {needs}\n"
        "# Run it where the command of the plan runs (proxy.code_path). RUN_DIR: an empty folder "
        "for this run.\n"
        "set -eu\n"
        'HERE="$(cd "$(dirname "$0")" && pwd)"\n'
        f'RUN_DIR="$1" DATA="${{2{"" if "data" in named else ":-"}}}"\n'
        f"exec {line}\n"
    )
    values = {name: own.values[name] for name in sorted(own.values)}
    files = {
        RUN_FILE: script,
        VALUES_FILE: canon.pretty({"digest": decision.digest, "values": values}).decode(),
        YAML_FILE: "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()),
        OVERRIDES_FILE: "".join(f"{name}={_hydra(value)}\n" for name, value in values.items()),
    }
    write_files(out_dir, files)
    judgements = (
        dict.fromkeys((field for field in Decision.__dataclass_fields__), _AROUND) | _JUDGEMENTS
    )
    entries = judge_fields(decision, judgements, EXPRESSIBLE)
    return FidelityReport(trainer="command", version=version, entries=entries)


def _shell(word: str, places: dict[str, str]) -> str:
    """A word for the shell, with the places of the machine as variables."""
    parts = word.split("\0")
    quoted = [
        f'"{places[part]}"' if i % 2 else shlex.quote(part) if part else ""
        for i, part in enumerate(parts)
    ]
    return "".join(quoted) or "''"


def _hydra(value: object) -> str:
    """A value as Hydra reads one: null, a number, or a word in quotes."""
    return "null" if value is None else json.dumps(value)
