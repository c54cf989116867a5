"""A user's own code in words: the command of its main run, and what is known of its model before it
trains.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher.experiments.transferred_values import Transferred
from launcher.plan.study import Study
from launcher.study.decide import Choice, main_spec
from proxies.core.canon import Json
from proxies.external.command import filled, placeholder_values


def own_run(study: Study, found: Transferred, choice: Choice) -> Json:
    """The main run's command line; None where forerun's trainer trains."""
    spec = main_spec(study, found, choice)
    if spec.command is None:
        return None
    values = placeholder_values(spec, Path("RUN_DIR"), study.corpus)
    return {"kind": "command", "line": shlex.join(filled(spec.command.template, values))}


def own_model(study: Study) -> dict[str, Json]:
    """A factory's model at the largest width of the check: what is known of it before it trains.

    Raises:
        FactoryError: it cannot be trained under the plan's parametrization.
    """
    from proxies.external.description import describe
    from proxies.external.factory import load

    spec = study.check_runs(study.plan.parametrization)[-1][0]
    found = describe(load(study.plan.proxy.factory, study.code_dir, spec.own_values)[0], spec)
    parameters: list[Json] = [
        {"name": each.name, "kind": each.kind, "factor": found.factors[each.name]}
        for each in found.numbers
    ]
    return {"width": spec.shape.width, "parameters": parameters}


def own_text(body: Json) -> str:
    """The main run in words, for the terminal."""
    assert isinstance(body, dict)
    return f"the main run with your own trainer (use a fresh folder as RUN_DIR):\n  {body['line']}"
