"""A first plan: a preset with the user's data, budget and GPUs in it, and what there is to say of
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from launcher.base.reference import UnknownNameError, gpu
from launcher.calibration.study_cost import Speeds, planned_main_run, stages_of, total_of
from launcher.estimates.layout import layout_problems, microbatches, planned_parallelism
from launcher.estimates.machine import (
    MFU_CONVENTION,
    MachineOptions,
    Span,
    exactly,
    gpu_hours,
    machine_of,
)
from launcher.estimates.main_run import GIGA, RESERVED, memory_per_rank
from launcher.estimates.utilization import paid_share
from launcher.plan.file import PlanError, override
from launcher.plan.plan import Plan
from launcher.plan.presets import NODE_GPUS, PRESETS, layout, preset_for, slurm_options
from launcher.plan.problems import num_law_parameters
from launcher.plan.sections import DEFAULT_OPTIMIZER
from launcher.plan.study import Study
from launcher.plan.vocabulary import (
    MIN_WIDTH_MULTIPLE,
    budget_flops,
    learning_rate_range,
    scale_margin,
)
from launcher.study.gates import data_warning
from launcher.study.study_folder import unnamed
from proxies.core.canon import Json
from proxies.core.checks import Checks, SpecError
from proxies.core.flops import count_params, flops_per_token
from proxies.core.hyperparameters import LEARNING_RATE, hyperparameter_named
from proxies.core.notation import (
    counted,
    format_factor,
    format_flops,
    format_main_run_share,
    format_percent,
    format_usd,
)
from proxies.core.optimizers import RECIPES
from proxies.data.tokens import MANIFEST, Manifest, advise_corpus, read_manifest, shard_problems
from proxies.external.command import CommandError, find_program
from scaling_fits.allocation.shapes import published_layers
from scaling_fits.forecast.conclusive import FARTHEST_REACH
from scaling_fits.laws.forms import MIN_POINTS

# Whether a plan makes sense: what it names and is not there, what could lead to nothing, what would
# be unwise.
#
# Nothing is run, no torch.

MOST_SHARE = 0.3
"""Proxies that take a larger share of the main run's FLOPs get a warning."""


def missing(plan: Plan, here: Path) -> list[str]:
    """What a plan in a folder names and is not there: corpus, program, module."""
    corpus, code_dir, problems = here / plan.data.path, here / plan.proxy.code_path, []
    if plan.data.path and not (corpus / MANIFEST).exists():
        problems.append(f"data.path = {plan.data.path!r}: {advise_corpus(corpus)}")
    with contextlib.suppress(SpecError):  # said already
        if plan.command is not None:
            try:
                find_program(shlex.split(plan.command.template)[0], code_dir)
            except CommandError as error:
                problems.append(f"proxy.command: {error}")
    module = plan.proxy.factory.partition(":")[0].partition(".")[0]
    if (
        module
        and not any((code_dir / name).exists() for name in (module, f"{module}.py"))
        and not find_spec(module)
    ):
        problems.append(f"proxy.factory: no module {module} in {code_dir}, nor installed")
    manifest = manifest_of(plan, here)
    problems += [] if manifest is None else shard_problems(corpus, manifest)
    return problems


def problems(study: Study) -> list[str]:
    """Values that no main run can come of: each key with its value, its limit, and why."""
    plan, shape = study.plan, study.base_shape
    step = flops_per_token(shape) * plan.proxy.batch_tokens
    sentence = (
        f"target.budget_flops = {plan.target.budget_flops:g}: must be at least {step:.2g}, one "
        "step of the model "
        f"of width {shape.width}"
    )
    return [sentence] if plan.target.budget_flops < step else []


def warnings(study: Study, found: Mapping[str, Json]) -> list[str]:
    """What is unwise: another batch than the forecast's, too little data, proxies that cost too
    much, or teach little.

    `found` is what the plan comes to (`first_plan.summary`).
    """
    plan, notes = study.plan, []
    batch = plan.ladder.batch_tokens or plan.proxy.batch_tokens
    if batch != plan.target_batch_tokens:
        notes.append(
            f"target.batch_tokens = {plan.target_batch_tokens}: the ladder's batches have {batch} "
            "tokens, and the "
            "forecast is for those (ladder.batch_tokens)"
        )
    notes += [
        f"{name} is not searched: proxy.command has no {{{hyperparameter_named(name).told_as}}}"
        for name in plan.not_searched
    ]
    tokens, width = cast(float, found["tokens"]), cast(int, found["width"])
    share = cast(float, found["share_of_main_run"])
    notes += filter(None, [data_warning(study, tokens)])
    if share > MOST_SHARE:
        notes.append(
            f"the proxies cost {format_main_run_share(share)}, too much for this run alone; use a "
            "larger "
            "target.budget_flops or a smaller preset"
        )
    notes += _undecidable(study)
    if width < 2 * plan.proxy.base_width:
        notes.append(
            f"the main run's guessed width is {width}, proxy.base_width {plan.proxy.base_width}: "
            "there is hardly "
            "anything to transfer; use a larger target.budget_flops or a smaller preset"
        )
    return notes


def _undecidable(study: Study) -> list[str]:
    """Return which gates cannot pass whatever the runs find, as far as the plan alone tells."""
    return [
        *_unpassable_model_gates(study),
        *_unpassable_ladder_gates(study),
        *_refused_layout(study),
    ]


def _unpassable_model_gates(study: Study) -> Iterator[str]:
    """Yield why the gates of the model and its data cannot pass."""
    proxy, accept = study.plan.proxy, "`forerun freeze --accept {} --reason TEXT`"
    if proxy.command:
        yield (
            "gates coordinates and data: forerun sees neither the activations of a command nor its "
            "data, so both gates "
            "will say 'cannot tell'; check them in your trainer, then use "
            f"{accept.format('coordinates --accept data')}"
        )
    elif proxy.parametrization == "sp":
        yield (
            "gate coordinates: proxy.parametrization = 'sp' does not keep the size of activations "
            "over width, so the "
            f"gate will fail; use another parametrization, or {accept.format('coordinates')}"
        )


def _unpassable_ladder_gates(study: Study) -> Iterator[str]:
    """Yield why the gates of the ladder cannot pass: too few rungs, too small ones, or none that is
    checked.
    """
    plan, ladder = study.plan, study.plan.ladder
    shapes = [
        study.shape(width).at_depth(depth)
        for width in ladder.widths
        for depth in plan.ladder_depths(width)
    ]
    tokens = [
        plan.num_tokens(steps, ladder.batch_tokens or plan.proxy.batch_tokens)
        for steps in ladder.num_steps
    ]
    num_rungs = len(shapes) * len(tokens)
    needed = MIN_POINTS if ladder.form in ("auto", "compute") else num_law_parameters(plan) + 1
    if (num_rungs - 1) * ladder.num_seeds < needed:
        yield (
            f"gate fit: with {counted(num_rungs, 'rung')} the largest one cannot be held out, so "
            "the gate will say "
            f"'cannot tell'; at least {needed + 1} rungs are needed (ladder.widths, "
            "ladder.num_steps)"
        )
    reach = plan.target.budget_flops / (6.0 * max(map(study.num_params, shapes)) * max(tokens))
    if reach > FARTHEST_REACH:
        yield (
            f"gate fit: target.budget_flops is {format_factor(reach)} times the largest rung's "
            "FLOPs, and no "
            f"forecast is trusted beyond {FARTHEST_REACH:g} times, so the gate will say 'cannot "
            "tell'; add larger "
            "rungs (ladder.widths, ladder.num_steps)"
        )
    flops = [flops_per_token(shape) * count for shape in shapes for count in tokens]
    if not ladder.check_offsets_octaves:
        yield (
            "gate ladder_tuned: ladder.check_offsets_octaves is empty, so no rung is checked at "
            "other rates and the "
            "gate will say 'cannot tell'"
        )
    elif min(flops) > ladder.check_share * sum(flops):
        yield (
            f"gate ladder_tuned: ladder.check_share = {ladder.check_share:g} pays for no rung (the "
            "cheapest is "
            f"{min(flops) / sum(flops):.2g} of the ladder), so none is checked at other rates and "
            "the gate will say "
            "'cannot tell'; raise ladder.check_share"
        )


def _refused_layout(study: Study) -> Iterator[str]:
    """Yield what `forerun freeze` refuses about the layout of a main run of the guessed size."""
    if study.plan.proxy.command:  # its own trainer lays it out
        return
    run = planned_main_run(study)
    for problem in layout_problems(
        planned_parallelism(study.plan.launch), run.shape, run.batch_tokens
    ):
        yield f"launch: {problem}; `forerun freeze` refuses such a layout"


ASSUMED_VOCAB_SIZE, BYTES = 50_304, 256
"""Until a corpus is there to say: on GPUs GPT-2's, rounded up to a multiple of 64; else bytes, as
`tokenize` makes."""
_ROUNDS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked of `forerun init`; None: not said. Bad values are refused all at once."""

    preset: str | None = None
    budget_flops: float | None = None
    budget_usd: float | None = None
    gpu: str | None = None
    num_gpus: int | None = None
    usd_per_gpu_hour: float | None = None
    optimizer: str | None = None

    @property
    def changes_size(self) -> bool:
        """Whether a main run of another size, or on other GPUs, than the preset's is asked for."""
        return any(
            value is not None
            for value in (self.budget_flops, self.budget_usd, self.gpu, self.num_gpus)
        )

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.budget_usd is not None:
            checks.number("budget_usd", least=0.01, most=1e12)
            checks.that(self.budget_flops is None, "budget_flops and budget_usd: give one of them")
        elif self.usd_per_gpu_hour is not None:
            checks.problems.append("usd_per_gpu_hour: needs budget_usd, which it turns into FLOPs")
        if self.num_gpus is not None:
            checks.whole("num_gpus")
            whole = self.num_gpus <= NODE_GPUS or self.num_gpus % NODE_GPUS == 0
            checks.that(
                whole,
                f"gpus = {self.num_gpus}: must be at most {NODE_GPUS}, or whole nodes of "
                f"{NODE_GPUS}",
            )
        if self.usd_per_gpu_hour is not None:
            checks.number("usd_per_gpu_hour", least=1e-4, most=1e6)
        if self.gpu is not None:
            try:
                gpu(self.gpu)
            except UnknownNameError as error:
                checks.problems.append(str(error))
        checks.done("forerun init")


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPlan:
    """What a new plan is written from."""

    name: str
    values: dict[str, dict[str, object]]
    head: tuple[str, ...] = ()


def first_plan(request: Request, data: str) -> FirstPlan:
    """The preset that was named, or that is nearest to the GPUs named, with data, budget and GPUs
    as given.

    A budget in dollars is not FLOPs yet: `priced` makes it so.
    """
    on_gpus = (
        request.gpu is not None or request.num_gpus is not None or request.budget_usd is not None
    )
    name = request.preset
    if name is None and on_gpus:
        name = preset_for(gpu(request.gpu or "H100")[1].memory_gb, request.num_gpus or 1)
    name = name or "cpu"
    preset = PRESETS[name]
    values = {section: dict(keys) for section, keys in preset.values.items()}
    budget = preset.budget_flops if request.budget_flops is None else request.budget_flops
    values["data"] = {"path": data}
    values["target"] = values.get("target", {}) | {"budget_flops": budget}
    if request.optimizer is not None:
        values.setdefault("proxy", {})["optimizer"] = request.optimizer
        # Two rates: both are searched, and tested over width.
        for beside, setting in RECIPES[request.optimizer].renamed_hyperparameters.items():
            if setting != LEARNING_RATE:
                continue
            ranges = Plan().search.learning_rate
            values.setdefault("search", {})["axes"] = {
                beside: values["search"].get(LEARNING_RATE, ranges)
            }
            values.setdefault("transfer", {}).setdefault(
                "hyperparameters", Plan().transfer.hyperparameters
            )
            tested = cast(dict[str, tuple[str, ...]], values["transfer"]["hyperparameters"])
            values["transfer"]["hyperparameters"] = {**tested, beside: ("width",)}
    if request.gpu is not None:
        values["launch"]["gpu"] = gpu(request.gpu)[0]
    if request.usd_per_gpu_hour is not None:
        values["launch"]["usd_per_gpu_hour"] = request.usd_per_gpu_hour
    if request.num_gpus is not None:
        values["launch"] |= layout(request.num_gpus)
        if preset.gpu:
            values["cluster"]["num_workers"] = request.num_gpus
        if "slurm_options" in values.get("cluster", {}):
            values["cluster"]["slurm_options"] = slurm_options(request.num_gpus)
    given = request.budget_flops is not None or request.budget_usd is not None
    changed = given or request.gpu is not None or request.num_gpus is not None
    head = (
        f"Preset {name}: {preset.about}.",
        *(["Budget or GPUs differ from the preset's."] if changed else []),
        *preset.head[1:],
    )
    return FirstPlan(name=name, values=values, head=head if preset.gpu else ())


def set_values(new: FirstPlan, overrides: Sequence[str]) -> None:
    """Set what `--set` gives; under `wsd` proxies share stable phases, unless it says otherwise or
    a value follows the duration.

    Raises:
        PlanError: a value is none.
    """
    if problems := [problem for given in overrides if (problem := override(new.values, given))]:
        raise PlanError("forerun init", problems)
    proxy = new.values.get("proxy", {})
    by_duration = proxy.get("command") or proxy.get("batch_warmup_fraction") or proxy.get("rules")
    plain = proxy.get("parametrization", "mup") in ("mup", "sp", "completep")
    if proxy.get("schedule") == "wsd" and plain and not by_duration:
        proxy.setdefault("decay_branches", True)


def fit_vocabulary(
    new: FirstPlan, study: Study, request: Request, overrides: Sequence[str]
) -> list[str]:
    """Set what a CPU preset has for bytes and the corpus's vocabulary changes; keep what was given.

    Returns:
        One sentence that names the changed values; none if nothing changed.
    """
    plan, vocab_size = study.plan, study.manifest.vocab_size
    if PRESETS[new.name].gpu or plan.proxy.command:
        return []
    given = _given_keys(overrides)
    wanted: dict[tuple[str, str], object] = {}
    if "transfer.margin_nats" not in given:
        wanted["transfer", "margin_nats"] = scale_margin(plan.transfer.margin_nats, vocab_size)
    # The rates and the size of another model, and the rates of Muon, were not measured.
    is_measured = not plan.proxy.factory and plan.proxy.optimizer == DEFAULT_OPTIMIZER
    if is_measured and "search.learning_rate" not in given:
        wanted["search", LEARNING_RATE] = learning_rate_range(plan.search.learning_rate, vocab_size)
    has_budget = request.budget_flops is not None or request.budget_usd is not None
    if is_measured and not has_budget and "target.budget_flops" not in given:
        least = study.num_params(study.shape(MIN_WIDTH_MULTIPLE * plan.proxy.base_width))
        wanted["target", "budget_flops"] = budget_flops(plan.target.budget_flops, least)
    changed = {
        key: value
        for key, value in wanted.items()
        if value != getattr(getattr(plan, key[0]), key[1])
    }
    for (section, key), value in changed.items():
        new.values.setdefault(section, {})[key] = value
    named = ", ".join(
        f"{section}.{key} = {_shown(value)}" for (section, key), value in changed.items()
    )
    return [f"for a vocabulary of {vocab_size:,}: {named}"] if changed else []


def _shown(value: object) -> str:
    return (
        f"[{', '.join(f'{each:g}' for each in value)}]"
        if isinstance(value, tuple)
        else f"{value:g}"
    )


def _given_keys(overrides: Sequence[str]) -> set[str]:
    """Return the plan keys that `--set` gives."""
    return {override.partition("=")[0].strip() for override in overrides}


_DEPTH_STEP = 4
"""Depths of deep models are multiples of this, so that pipelines of two and four stages divide
them."""


def settle_size(
    new: FirstPlan, study: Study, request: Request, overrides: Sequence[str]
) -> list[str]:
    """Turn a budget in dollars into FLOPs, and have depth and layout follow the budget; returns
    what was assumed.

    Raises:
        SpecError: no price is known.
    """
    notes = []
    if request.budget_usd is not None:
        budget, sentence = priced(study, request)
        notes.append(sentence)
        new.values["target"]["budget_flops"] = budget
        target = study.plan.target.model_copy(update={"budget_flops": budget})
        study = dataclasses.replace(study, plan=study.plan.model_copy(update={"target": target}))
    _follow_published_shapes(new, study, overrides)
    return notes


def _follow_published_shapes(new: FirstPlan, study: Study, overrides: Sequence[str]) -> None:
    """Give a plan for GPUs the depth that published models of its budget's size have, and a layout
    that fits.

    The layout recomputes as little, and shards over as few GPUs, as leaves room in memory. What
    `--set` gives stays.
    """
    plan, given = study.plan, _given_keys(overrides)
    if not PRESETS[new.name].gpu or plan.proxy.factory or plan.proxy.command:
        return
    layers = published_layers(study.target_params_guess)
    if "model.num_layers" not in given:
        step = _DEPTH_STEP if layers > 2 * _DEPTH_STEP else 1
        new.values["model"]["num_layers"] = depth = max(1, step * round(layers / step))
        study = dataclasses.replace(
            study,
            plan=plan.model_copy(
                update={"model": plan.model.model_copy(update={"num_layers": depth})}
            ),
        )
    if {f"launch.{name}" for name in ("data_parallel_shard", "activation_checkpointing")} & given:
        return
    new.values["launch"] |= _roomy_layout(study)


def _roomy_layout(study: Study) -> dict[str, object]:
    """Return the sharding and recomputation of the first layout whose fullest rank fits the GPU;
    else the plan's.
    """
    launch, run = study.plan.launch, planned_main_run(study)
    ranks = launch.data_parallel_shard * launch.data_parallel_replicate
    room = gpu(launch.gpu)[1].memory_gb * GIGA * (1 - RESERVED)
    shards = [count for count in range(launch.data_parallel_shard, ranks + 1) if ranks % count == 0]
    for checkpointing in ("selective", "full"):
        for shard in (count for count in shards if count % launch.data_parallel_shard == 0):
            changes: dict[str, object] = {
                "data_parallel_shard": shard,
                "data_parallel_replicate": ranks // shard,
                "activation_checkpointing": checkpointing,
            }
            layout = planned_parallelism(launch.model_copy(update=changes))
            if layout_problems(layout, run.shape, run.batch_tokens):
                continue
            passes = microbatches(layout, run.shape, run.batch_tokens)
            held = memory_per_rank(
                run.shape, layout, run.precision, *passes, optimizer=run.optimizer
            )
            if held.total_bytes <= room:
                return changes
    return {}


def manifest_of(plan: Plan, folder: Path) -> Manifest | None:
    """The corpus that a plan in `folder` names, if it is there.

    Raises:
        DataError: it is there, and no corpus.
    """
    corpus = folder / plan.data.path
    return read_manifest(corpus) if plan.data.path and (corpus / MANIFEST).exists() else None


def sketched(plan: Plan, manifest: Manifest | None) -> Study:
    """The study a plan asks for, to be counted and not run: without a corpus, on an assumed
    vocabulary.
    """
    assumed = plan.data.vocab_size or (ASSUMED_VOCAB_SIZE if plan.launch.gpu else BYTES)
    manifest = manifest or unnamed("unnamed", assumed)
    return Study(
        plan=plan, study_dir=Path(), corpus=None, manifest=manifest, code_dir=Path(), factory=None
    )


def priced(study: Study, request: Request) -> tuple[float, str]:
    """FLOPs of the main run that costs `request.budget_usd`, and what was assumed for it.

    Raises:
        SpecError: no price is known.
    """
    plan = study.plan
    assert request.budget_usd is not None
    ranks = plan.launch.data_parallel_shard * plan.launch.data_parallel_replicate
    given = MachineOptions(
        gpu=plan.launch.gpu or "H100",
        num_gpus=ranks,
        price_usd=plan.launch.usd_per_gpu_hour or None,
    )
    budget = plan.target.budget_flops
    for _ in range(_ROUNDS):  # dollars are nearly in proportion to FLOPs: widths go in steps
        changed = plan.model_copy(
            update={"target": plan.target.model_copy(update={"budget_flops": budget})}
        )
        run = planned_main_run(dataclasses.replace(study, plan=changed))
        machine = machine_of(given, flops_per_token(run.shape, MFU_CONVENTION))
        if machine.price_usd is None:
            raise SpecError(
                "forerun init",
                [f"gpu = {machine.name}: has no published price: give usd_per_gpu_hour"],
            )
        share = paid_share(machine, count_params(run.shape).total)
        hours = gpu_hours(
            exactly(run.flops[MFU_CONVENTION] + run.optimizer_flops), machine.peak_flops, share
        )
        usd = hours.times(machine.price_usd).value
        budget = min(1e30, max(1.0, budget * request.budget_usd / usd))
    price = machine.price_usd
    assert price is not None  # or the loop above had refused it
    sentence = (
        f"{format_usd(request.budget_usd)} pay for {format_flops(budget)} FLOPs on {ranks} "
        f"{machine.name}, at "
        f"{format_usd(price.value)} an hour ({_whence(price)}) and {format_percent(share.value)} "
        f"[{format_percent(share.low)}, {format_percent(share.high)}] of the peak "
        f"({_whence(share)})"
    )
    return float(f"{budget:.4g}"), sentence


def _whence(span: Span) -> str:
    return span.source.partition(";")[0].removeprefix("default: ")


def summary(study: Study) -> dict[str, Json]:
    """What a plan comes to: its main run and its proxies."""
    run, stages = planned_main_run(study), stages_of(study, Speeds())
    flops = sum(stage.flops.value for stage in stages)
    return {
        "params": count_params(run.shape).total,
        "width": run.shape.width,
        "num_layers": run.shape.num_layers,
        "tokens": run.num_tokens,
        "num_runs": total_of(stages).num_runs[0],
        "flops": flops,
        "share_of_main_run": flops / run.flops["causal"],
        "vocab_size": study.manifest.vocab_size,
    }
