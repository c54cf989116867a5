"""The main run of a user's own model or trainer: what to start it with, as no frozen config of ours can hold it yet."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher.decide import Choice, main_spec
from launcher.study import Study
from proxies import canon
from proxies.canon import Json
from sweeps.space import Params


class OwnProgramError(ValueError):
    """A frozen config is asked for a model or a trainer that is not ours."""

    def __init__(self, study: Study) -> None:
        whose = "trainer" if study.plan.command is not None else "model"
        super().__init__(
            f"freeze writes configs for forerun's own model families, not for your own {whose}: `forerun report "
            f"{study.study_dir}` shows what to start its main run with, and `report.json` has it as `own_run`"
        )


def is_own(study: Study) -> bool:
    """Whether somebody else's code trains, or builds the model."""
    return study.factory is not None or study.plan.command is not None


def own_run(study: Study, best: Params, learning_rate: float, choice: Choice) -> Json:
    """The main run's command line, or the numbers that a factory's parameters are to be trained with."""
    spec = main_spec(study, best, learning_rate, choice)
    if spec.command is not None:
        from proxies.external.command import filled, placeholder_values

        values = placeholder_values(spec, Path("RUN_DIR"), study.corpus)
        return {"kind": "command", "line": shlex.join(filled(spec.command.template, values))}
    from launcher.frozen import groups_of
    from proxies.external.description import describe
    from proxies.external.factory import load

    found = describe(load(study.plan.proxy.factory, study.code_dir)[0], spec)
    groups = [
        {key: value for key, value in _plain(group).items() if key != "init_std"} for group in groups_of(found.numbers)
    ]
    return {
        "kind": "factory",
        "factory": study.plan.proxy.factory,
        "forward": canon.to_json(found.forward),
        "groups": canon.to_json(groups),
        "init_factors": {scale.name: scale.factor for scale in found.scales},
        "schedule": canon.to_json(spec.schedule),
        "clip_norm": spec.hparams.clip_norm,
        "batch_tokens": spec.batch_tokens,
        "seed": spec.seed,
    }


def _plain(record: object) -> dict[str, Json]:
    value = canon.to_json(record)
    assert isinstance(value, dict)
    return value


def own_model(study: Study) -> dict[str, Json]:
    """A factory's model at the largest width of the check: what is known of it before it trains.

    Raises:
        FactoryError: it cannot be trained under the plan's parametrization.
    """
    from proxies.external.description import describe
    from proxies.external.factory import load, size_note

    spec = study.check_runs(study.plan.parametrization)[-1][0]
    found = describe(load(study.plan.proxy.factory, study.code_dir)[0], spec)
    kinds = {parameter.name: parameter.kind for parameter in found.parameters}
    scales: list[Json] = [
        {"name": s.name, "kind": kinds[s.name], "base_std": s.base_std, "own_std": s.own_std, "factor": s.factor}
        for s in found.scales
    ]
    notes: list[Json] = [*found.notes, *filter(None, [size_note(spec, study.code_dir)])]
    return {"width": spec.shape.width, "parameters": scales, "notes": notes}


def own_text(body: Json) -> str:
    """The main run in words, for the terminal."""
    assert isinstance(body, dict)
    if body["kind"] == "command":
        return f"the main run, your own trainer's (a fresh folder for RUN_DIR):\n  {body['line']}"
    groups = body["groups"]
    assert isinstance(groups, list)
    lines = [
        f"  {group['pattern']}: lr {group['learning_rate']:.4g}, weight decay {group['weight_decay']:.4g}"
        for group in groups
        if isinstance(group, dict)
    ]
    return "\n".join(
        [f"the main run of {body['factory']}, per group of parameters (all of it in report.json):", *lines]
    )
