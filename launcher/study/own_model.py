"""The main run of a user's own model or trainer: what to start it with, as no frozen config of ours can hold it yet."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher.experiments.transferred_values import Transferred
from launcher.frozen.frozen import groups_of
from launcher.plan.study import Study
from launcher.study.decide import Choice, main_spec
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.optimizers import GROUP_NUMBERS
from proxies.external.command import filled, placeholder_values


class OwnProgramError(ValueError):
    """A frozen config is asked for a model that is not ours."""

    def __init__(self, study: Study) -> None:
        super().__init__(
            "freeze writes configs for forerun's own model families and for your own trainer, not for your own model: "
            "`forerun report "
            f"{study.study_dir}` shows how to start its main run, and `report.json` has it as `own_run`"
        )


def is_own(study: Study) -> bool:
    """Whether somebody else's code trains, or builds the model."""
    return study.factory is not None or study.plan.command is not None


def own_run(study: Study, found: Transferred, choice: Choice) -> Json:
    """The main run's command line, or the numbers that a factory's parameters are to be trained with."""
    spec = main_spec(study, found, choice)
    if spec.command is not None:
        values = placeholder_values(spec, Path("RUN_DIR"), study.corpus)
        return {"kind": "command", "line": shlex.join(filled(spec.command.template, values))}
    from proxies.external.construction import FactoryError
    from proxies.external.description import trained_with
    from proxies.external.factory import load
    from proxies.parametrization.parametrization import forward_numbers

    try:
        numbers = trained_with(load(study.plan.proxy.factory, study.code_dir, spec.own_values)[0], spec)
    except FactoryError as error:  # the study stands without its code
        return {"kind": "factory", "factory": study.plan.proxy.factory, "groups": [], "problem": str(error)}
    names = ("pattern", "kind", *GROUP_NUMBERS)
    groups = [{name: getattr(group, name) for name in names} for group in groups_of(numbers)]
    return {
        "kind": "factory",
        "factory": study.plan.proxy.factory,
        "forward": canon.to_json(forward_numbers(spec)),
        "groups": canon.to_json(groups),
        "schedule": canon.to_json(spec.schedule),
        **spec.hparams.run_wide,
        "batch_tokens": spec.batch_tokens,
        "seed": spec.seed,
    }


def own_model(study: Study) -> dict[str, Json]:
    """A factory's model at the largest width of the check: what is known of it before it trains.

    Raises:
        FactoryError: it cannot be trained under the plan's parametrization.
    """
    from proxies.external.description import describe
    from proxies.external.factory import load, size_note

    spec = study.check_runs(study.plan.parametrization)[-1][0]
    found = describe(load(study.plan.proxy.factory, study.code_dir, spec.own_values)[0], spec)
    parameters: list[Json] = [
        {"name": each.name, "kind": each.kind, "factor": found.factors[each.name]} for each in found.numbers
    ]
    return {"width": spec.shape.width, "parameters": parameters, "note": size_note(spec, study.code_dir)}


def own_text(body: Json) -> str:
    """The main run in words, for the terminal."""
    assert isinstance(body, dict)
    if body["kind"] == "command":
        return f"the main run with your own trainer (use a fresh folder as RUN_DIR):\n  {body['line']}"
    if "problem" in body:
        return f"the main run's numbers need the code of {body['factory']}: {body['problem']}"
    groups = body["groups"]
    assert isinstance(groups, list)
    lines = [
        f"  {group['pattern']}: "
        + ", ".join(f"{HYPERPARAMETERS[name].label} {group[name]:.4g}" for name in GROUP_NUMBERS)
        for group in groups
        if isinstance(group, dict)
    ]
    return "\n".join(
        [f"the main run of {body['factory']}, per group of parameters (all of it in report.json):", *lines]
    )
