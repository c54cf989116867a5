"""Verbs that begin: demo, init, validate."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from launcher.verbs.options import answer, json_option, plan_argument, set_option
from proxies import canon

NEW_PLANS: dict[str, dict[str, object]] = {
    "proxy": {"num_slots": "auto", "compiled": "auto"},
    "search": {"max_extensions": 2, "num_replays": 2},
    "ladder": {"num_slots": "auto"},
    "launch": {"validate_every_steps": 100, "layers_every_steps": 20, "spike_rollbacks": 2},
}
"""What a plan that `init` writes asks for. One without these keys is older, and asks what it asked: the defaults."""


@click.command()
@click.option("--data", "data", default="corpus", show_default=True, help="Corpus folder, relative to the plan.")
@click.option("--budget-flops", type=float, default=1e13, show_default=True, help="Training FLOPs of the main run.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("plan.toml"), show_default=True,
              help="Plan to write.")  # fmt: skip
@set_option
@json_option
def init(data: str, budget_flops: float, out: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Write a commented plan, and its JSON Schema beside it. An existing plan is left alone."""
    from launcher.plan_file import PlanError, commented_plan, load_plan, override, plan_schema

    if out.exists():
        raise click.BadParameter(f"{out} exists: name another file with --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    values: dict[str, dict[str, object]] = {name: dict(keys) for name, keys in NEW_PLANS.items()}
    values |= {"data": {"path": data}, "target": {"budget_flops": budget_flops}}
    if problems := [problem for given in overrides if (problem := override(values, given))]:
        raise PlanError("forerun init", problems)
    text = commented_plan(values)
    canon.write_atomic(out, text.encode())
    try:
        load_plan(out, overrides)  # which refuses a key that is none
    except ValueError:
        out.unlink()  # a plan that does not load is of no use to anyone
        raise
    schema = out.with_name("plan.schema.json")
    canon.write_atomic(schema, canon.pretty(plan_schema()))
    answer(
        as_json,
        {"plan": str(out), "schema": str(schema)},
        f"wrote {out} and {schema}\nnext: forerun validate {out}",
    )


@click.command()
@plan_argument
@set_option
@json_option
def validate(plan_path: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check PLAN: every problem at once. The corpus is looked for, not read."""
    from launcher.opening import plan_study
    from launcher.own import module_problems
    from launcher.plan_cluster import rank_needs
    from launcher.plan_file import PlanError, load_plan
    from launcher.plan_ladder import ladder_warnings
    from launcher.warm_starts import warm_problems
    from proxies.data.tokens import MANIFEST
    from sweeps.cores import num_cores

    plan = load_plan(plan_path, overrides)
    corpus, problems = plan_path.parent / plan.data.path, []
    if plan.data.path and not (corpus / MANIFEST).is_file():
        problems.append(
            f"data.path = {plan.data.path!r}: no corpus there; `forerun tokenize SOURCE... --out {corpus}` makes it"
        )
    if plan.command is not None:
        from proxies.external.command import CommandError, find_program

        try:
            find_program(shlex.split(plan.command.template)[0], plan_path.parent / plan.proxy.code_path)
        except CommandError as error:
            problems.append(f"proxy.command: {error}")
    problems += module_problems(plan.proxy.factory, plan_path.parent / plan.proxy.code_path)
    problems += warm_problems(plan, plan_path.parent)
    if problems:
        raise PlanError(str(plan_path), problems)
    plan_study(plan_path, plan_path.parent, overrides, source_sha256="0" * 64)
    warnings = ladder_warnings(plan)
    needs, warned = rank_needs(plan, num_cores()), [f"warning: {said}" for said in warnings]
    text = "\n".join([f"{plan_path} is valid", *needs, *warned, f"next: forerun run {plan_path}"])
    answer(as_json, {"valid": True, "plan": plan.question(), "warnings": canon.to_json(warnings)}, text)


@click.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("demo"), show_default=True,
              help="Where everything goes.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a value of its plan.")
@json_option
def demo(folder: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """The whole chain, each stage through its own command: corpus, check, sweep, transfer, ladder, fit, choice, frozen
    config, export, first steps of the main run, report. Interrupt it, run it again: it continues.
    """
    from launcher.demo import run_demo

    body, text = run_demo(folder, overrides)
    answer(as_json, body, text)
