"""Verbs that start a study: demo, init, validate."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun._launcher.cli.options import (
    AMOUNT,
    json_option,
    plan_argument,
    print_result,
    set_option,
)
from forerun._launcher.study.plan.presets import PRESETS
from forerun._proxies.core import canon
from forerun._proxies.core.notation import (
    format_count,
    format_counted,
    format_flops,
    format_main_run_share,
)
from forerun._proxies.core.optimizers import RECIPES

if TYPE_CHECKING:
    from forerun._launcher.study.plan.study import Study
    from forerun._launcher.study.stages.first_plan import FirstPlan, PlanRequest


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
    **request: Any,
) -> None:
    """Write a commented plan, and its JSON Schema in the same folder.

    The plan fits the corpus of --data if that exists already; the budget sets its size. A plan that
    exists is not overwritten.
    """
    from forerun._launcher.study.plan.writing import build_plan_schema
    from forerun._launcher.study.stages.first_plan import (
        PlanRequest,
        build_first_plan,
        set_values,
        summarize_plan,
    )
    from forerun._launcher.study.stages.plan_checks import find_warnings
    from forerun._launcher.study.stages.script_options import use_script

    _check_places(out, data)
    size = PlanRequest(**request)
    first, notes = build_first_plan(size, data), list[str]()
    if script is not None:
        notes = use_script(first, script)
    set_values(first, overrides)
    try:
        study, lines = _write_plan(out, first, size, overrides, warm_start)
        sizes = summarize_plan(study)
    except ValueError:
        out.unlink(missing_ok=True)  # a plan that does not load is of no use to anyone
        raise
    schema = out.with_name("plan.schema.json")
    canon.write_atomic(schema, canon.to_pretty_json(build_plan_schema()))
    plan_warnings = find_warnings(study, sizes)
    body = {
        "plan": str(out),
        "schema": str(schema),
        "preset": first.name,
        "comes_to": sizes,
        "warnings": plan_warnings,
    }
    text = "\n".join(
        [
            f"wrote {out} and {schema} (preset {first.name})",
            *(f"to do: {note}" for note in notes),
            *lines,
            _describe_sizes(sizes),
            *(f"warning: {warning}" for warning in plan_warnings),
            _suggest_next(out, study),
        ]
    )
    print_result(as_json, body, text)


def _write_plan(
    out: Path,
    first: FirstPlan,
    request: PlanRequest,
    overrides: tuple[str, ...],
    warm_start: str | None,
) -> tuple[Study, list[str]]:
    """Write the plan, and write it again after each part that depends on the parts before it: the
    vocabulary, the warm start, and the size. `first` gets the values of these parts.

    Returns:
        The study, and sentences about what was decided.
    """
    from forerun._launcher.study.plan.file import load_plan
    from forerun._launcher.study.plan.writing import format_plan
    from forerun._launcher.study.stages.first_plan import (
        find_manifest,
        fit_vocabulary,
        settle_size,
        sketch_study,
    )
    from forerun._launcher.study.stages.warm_start import use_warm_start

    def write() -> Study:
        out.parent.mkdir(parents=True, exist_ok=True)
        canon.write_atomic(out, format_plan(first.values, first.head).encode())
        plan = load_plan(out, overrides)  # refuses unknown keys
        return sketch_study(plan, find_manifest(plan, out.parent))

    lines = fit_vocabulary(first, write(), request, overrides)
    if warm_start is not None:
        lines.append(use_warm_start(first, warm_start, write().plan.space))
    if request.changes_size:
        lines += settle_size(first, write(), request, overrides)
    return write(), lines


def _check_places(out: Path, data: str) -> None:
    """Refuse to overwrite a plan, and refuse a corpus folder that holds other files."""
    from forerun._proxies.data.tokens import describe_missing_corpus, has_other_files

    if out.exists():
        raise click.BadParameter(f"{out} exists: name another file with --out, or remove it")
    if data and has_other_files(corpus := out.parent / data):
        raise click.BadParameter(f"--data {data}: {describe_missing_corpus(corpus)}")


def _suggest_next(out: Path, study: Study) -> str:
    """Return the line with the next command: to make the corpus if it does not exist."""
    from forerun._launcher.study.stages.first_plan import find_manifest

    data, validate_plan = study.plan.data.path, f"forerun validate {shlex.quote(str(out))}"
    if not data or find_manifest(study.plan, out.parent) is not None:
        return f"next: {validate_plan}"
    corpus = shlex.quote(str(out.parent / data))
    return f"next: forerun tokenize SOURCE... --out {corpus}, then {validate_plan}"


def _describe_sizes(sizes: dict[str, Any]) -> str:
    return (
        f"main run: about {format_count(sizes['params'])} parameters (width {sizes['width']}, "
        f"{format_counted(sizes['num_layers'], 'layer')}), {format_count(sizes['tokens'])} "
        f"tokens of a vocabulary of {sizes['vocab_size']:,}; proxies: {sizes['num_runs']} or more "
        f"runs, {format_flops(sizes['flops'])} FLOPs, "
        f"{format_main_run_share(sizes['share_of_main_run'])}"
    )


_CORPUS_CHECKS = {
    "none": "",
    "sizes": (
        "; of the corpus, manifest, tokenizer, and sizes are right (--full reads its shards too)"
    ),
    "content": "; the corpus is what its hashes say",
}
"""End of the answer of `validate`, by what was checked of the corpus."""


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
    """Check PLAN, and list every problem at once.

    The plan's sizes are compared with those of its corpus; --full also reads the corpus. Nothing is
    written.
    """
    from forerun._launcher.study.plan.file import (
        PlanError,
        add_line_numbers,
        check_plan,
        find_todos,
    )
    from forerun._launcher.study.stages.first_plan import (
        find_manifest,
        sketch_study,
        summarize_plan,
    )
    from forerun._launcher.study.stages.plan_checks import (
        find_missing_files,
        find_problems,
        find_warnings,
    )
    from forerun._launcher.study.stages.study_folder import read_study, verify_corpus

    folder = plan_path.parent
    plan, problems = check_plan(plan_path, overrides)
    # A key with a problem has its default in `plan`.
    bad_keys = {problem.partition(" = ")[0] for problem in problems}
    absent = [
        problem
        for problem in find_missing_files(plan, folder)
        if problem.partition(" = ")[0] not in bad_keys
    ]
    problems += add_line_numbers(plan_path, absent, overrides)
    if not problems:
        sketch = sketch_study(plan, find_manifest(plan, folder))
        problems = add_line_numbers(
            plan_path, [*find_todos(plan), *find_problems(sketch)], overrides
        )
    if problems:
        raise PlanError(str(plan_path), problems)
    study = read_study(plan_path, folder, overrides, source_sha256="0" * 64)
    if full:
        verify_corpus(study)
    checked = "none" if study.corpus is None else "content" if full else "sizes"
    plan_warnings = find_warnings(sketch, summarize_plan(sketch))
    lines = [
        f"{plan_path} is valid{_CORPUS_CHECKS[checked]}",
        *(f"warning: {warning}" for warning in plan_warnings),
        f"next: forerun estimate {shlex.quote(str(plan_path))}",
    ]
    body = {
        "valid": True,
        "plan": plan.to_question(),
        "warnings": canon.to_json(plan_warnings),
        "corpus_checked": checked,
    }
    print_result(as_json, body, "\n".join(lines))


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
    """Run the whole chain on a small corpus, each stage by its own command: corpus, check, sweep,
    transfer, ladder, fit, choice, frozen config, export, first steps of the main run, report.

    It needs minutes of CPU, no GPU and no account. Everything is written to --dir. If it was
    interrupted, the same command resumes.
    """
    from forerun._launcher.cli.demo import run_demo

    body, text = run_demo(folder, overrides)
    print_result(as_json, body, text)
