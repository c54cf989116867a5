"""Verbs that start a study: demo, init, validate."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.options import AMOUNT, answer, json_option, plan_argument, set_option
from launcher.plan.presets import PRESETS
from proxies.core import canon
from proxies.core.notation import counted, format_count, format_flops, format_main_run_share
from proxies.core.optimizers import RECIPES

if TYPE_CHECKING:
    from launcher.plan.plan import Plan


@click.command(
    epilog="Presets: "
    + "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    + "."
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    help="Preset for a typical situation, listed below.",
)
@click.option(
    "--quick", "preset", flag_value="demo", help="A plan that ends in minutes: --preset demo."
)
@click.option(
    "--optimizer",
    type=click.Choice(list(RECIPES)),
    help="Optimizer. Default: the plan's. Where one has two learning rates, both are searched and "
    "tested.",
)
@click.option(
    "--data",
    "data",
    default="corpus",
    show_default=True,
    help="Corpus folder, relative to the plan.",
)
@click.option(
    "--budget-flops",
    type=AMOUNT,
    help="Training FLOPs of the main run. Default: the preset's, else 1e13.",
)
@click.option(
    "--budget-usd",
    type=AMOUNT,
    help="Budget of the main run in dollars instead of FLOPs; assumptions are printed.",
)
@click.option(
    "--gpu",
    help="Accelerator of the main run, such as H100; without --preset it selects the nearest one.",
)
@click.option("--gpus", "num_gpus", type=click.IntRange(1, 10**5), help="Number of GPUs.")
@click.option(
    "--usd-per-gpu-hour",
    type=AMOUNT,
    help="Price of a GPU-hour, with --budget-usd. Default: a published one, if any.",
)
@click.option(
    "--warm-start",
    metavar="FILE[:STUDY]",
    help="Begin the search with the best trials of an Optuna storage.",
)
@click.option(
    "--from",
    "script",
    type=click.Path(path_type=Path),
    metavar="SCRIPT",
    help="A plan for your own training script: its options become the command; it is not run.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("plan.toml"),
    show_default=True,
    help="Plan to write.",
)
@set_option
@json_option
def init(
    data: str,
    warm_start: str | None,
    script: Path | None,
    out: Path,
    overrides: tuple[str, ...],
    as_json: bool,
    **asked: Any,
) -> None:
    """Write a commented plan, and its JSON Schema beside it. It never overwrites a plan."""
    from launcher.plan.file import load_plan
    from launcher.plan.writing import commented_plan, plan_schema
    from launcher.study.first_plan import (
        Request,
        first_plan,
        fit_vocabulary,
        manifest_of,
        set_values,
        settle_size,
        sketched,
        summary,
    )
    from launcher.study.plan_checks import warnings
    from launcher.study.warm_start import with_warm_start

    _check_places(out, data)
    new, notes = first_plan(request := Request(**asked), data), list[str]()
    if script is not None:
        from launcher.study.script_options import plan_for

        new, notes = plan_for(script, new)
    set_values(new, overrides)

    def write() -> Plan:
        out.parent.mkdir(parents=True, exist_ok=True)
        canon.write_atomic(out, commented_plan(new.values, new.head).encode())
        return load_plan(out, overrides)  # which refuses a key that is none

    lines = [f"to do: {note}" for note in notes]
    try:
        plan = write()
        manifest = manifest_of(plan, out.parent)
        lines += fit_vocabulary(new, sketched(plan, manifest), request, overrides)
        plan = write()
        if warm_start is not None:
            new, sentence = with_warm_start(new, warm_start, plan.space)
            lines.append(sentence)
            plan = write()
        if request.changes_size:
            lines += settle_size(new, sketched(plan, manifest), request, overrides)
            plan = write()
        found = summary(study := sketched(plan, manifest))
    except ValueError:
        out.unlink(missing_ok=True)  # a plan that does not load is of no use to anyone
        raise
    schema = out.with_name("plan.schema.json")
    canon.write_atomic(schema, canon.pretty(plan_schema()))
    warned = warnings(study, found)
    body = {
        "plan": str(out),
        "schema": str(schema),
        "preset": new.name,
        "comes_to": found,
        "warnings": warned,
    }
    lines += [_comes_to(found), *(f"warning: {sentence}" for sentence in warned)]
    lines.append(_next_command(out, plan.data.path, has_corpus=manifest is not None))
    answer(as_json, body, "\n".join([f"wrote {out} and {schema} (preset {new.name})", *lines]))


def _check_places(out: Path, data: str) -> None:
    """Refuse to overwrite a plan, and refuse a corpus folder that holds other files."""
    from proxies.data.tokens import advise_corpus, has_other_files

    if out.exists():
        raise click.BadParameter(f"{out} exists: name another file with --out, or remove it")
    if data and has_other_files(corpus := out.parent / data):
        raise click.BadParameter(f"--data {data}: {advise_corpus(corpus)}")


def _next_command(out: Path, data: str, *, has_corpus: bool) -> str:
    corpus = shlex.quote(str(out.parent / data))
    first = "" if has_corpus or not data else f"forerun tokenize SOURCE... --out {corpus}, then "
    return f"next: {first}forerun validate {shlex.quote(str(out))}"


def _comes_to(found: dict[str, Any]) -> str:
    return (
        f"main run: about {format_count(found['params'])} parameters (width {found['width']}, "
        f"{counted(found['num_layers'], 'layer')}), {format_count(found['tokens'])} tokens of a "
        "vocabulary of "
        f"{found['vocab_size']:,}; proxies: {found['num_runs']} or more runs, "
        f"{format_flops(found['flops'])} FLOPs, "
        f"{format_main_run_share(found['share_of_main_run'])}"
    )


@click.command()
@plan_argument
@set_option
@click.option(
    "--full",
    is_flag=True,
    help="Read the corpus too: compare the content of every shard with its hash.",
)
@json_option
def validate(plan_path: Path, overrides: tuple[str, ...], full: bool, as_json: bool) -> None:
    """Check PLAN and list every problem at once. Of the corpus the sizes are checked, with --full
    the content.
    """
    from launcher.plan.file import PlanError, checked_plan, todo_problems, with_lines
    from launcher.study.first_plan import manifest_of, sketched, summary
    from launcher.study.plan_checks import missing
    from launcher.study.plan_checks import problems as senseless
    from launcher.study.plan_checks import warnings as unwise
    from launcher.study.study_folder import plan_study, verified_corpus

    plan, problems = checked_plan(plan_path, overrides)
    # such a key is at its default in `plan`
    named = {said.partition(" = ")[0] for said in problems}
    gone = [
        said for said in missing(plan, plan_path.parent) if said.partition(" = ")[0] not in named
    ]
    problems += with_lines(plan_path, gone, overrides)
    if not problems:
        study = sketched(plan, manifest_of(plan, plan_path.parent))
        problems = with_lines(plan_path, [*todo_problems(plan), *senseless(study)], overrides)
    if problems:
        raise PlanError(str(plan_path), problems)
    found = plan_study(plan_path, plan_path.parent, overrides, source_sha256="0" * 64)
    checked = "none" if found.corpus is None else "content" if full else "sizes"
    if full:
        verified_corpus(found)
    warnings = unwise(study, summary(study))
    warned = [f"warning: {sentence}" for sentence in warnings]
    after = f"next: forerun estimate {shlex.quote(str(plan_path))}"
    text = "\n".join([f"{plan_path} is valid{_CORPUS_CHECKS[checked]}", *warned, after])
    body = {
        "valid": True,
        "plan": plan.question(),
        "warnings": canon.to_json(warnings),
        "corpus_checked": checked,
    }
    answer(as_json, body, text)


_CORPUS_CHECKS = {
    "none": "",
    "sizes": (
        "; of the corpus, manifest, tokenizer, and sizes are right (--full reads its shards too)"
    ),
    "content": "; the corpus is what its hashes say",
}


@click.command()
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("demo"),
    show_default=True,
    help="Folder for everything it writes.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a value of its plan.",
)
@json_option
def demo(folder: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Run the whole chain, each stage by its own command: corpus, check, sweep, transfer, ladder,
    fit, choice, frozen config, export, first steps of the main run, report. Interrupt it, run it
    again: it resumes.
    """
    from launcher.cli.demo import run_demo

    body, text = run_demo(folder, overrides)
    answer(as_json, body, text)
