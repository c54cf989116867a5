"""A study of a tree in which one more hyperparameter is declared: where it is seen, as JSON on
standard output.

test_registries.py runs it with that tree first on PYTHONPATH: `planted_hyperparameter.py NAME ALIAS
FOLDER`.
"""

import json
import os
import sys
from pathlib import Path

from tiny_study import PLAN, ask, write_corpus

from launcher.verbs.transfer import transfer
from proxies.core.programs import PLACEHOLDERS
from transfer.tables.columns import find_columns

NAME, ALIAS, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def plan():
    """The tiny study's, which searches the new one, and tests it over width alone."""
    text = PLAN.replace("tie_seeds = 0", f"tie_seeds = 0\naxes = {{ {NAME} = [0.5, 2.0] }}")
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
        }
    )
)
