"""The first plan of a study: a preset with the user's data, budget, and GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
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
from launcher.plan.sections import DEFAULT_OPTIMIZER
from launcher.plan.study import Study
from launcher.plan.vocabulary import (
    MIN_WIDTH_MULTIPLE,
    budget_flops,
    learning_rate_range,
    scale_margin,
)
from launcher.study.study_folder import unnamed
from proxies.core.canon import Json
from proxies.core.checks import Checks, SpecError
from proxies.core.flops import count_params, flops_per_token
from proxies.core.hyperparameters import LEARNING_RATE
from proxies.core.notation import (
    format_flops,
    format_percent,
    format_usd,
)
from proxies.core.optimizers import RECIPES
from proxies.data.tokens import MANIFEST, Manifest, read_manifest
from scaling_fits.allocation.shapes import published_layers

ASSUMED_VOCAB_SIZE, BYTES = 50_304, 256
"""Vocabulary size that is assumed while there is no corpus: on GPUs GPT-2's, rounded up to a
multiple of 64; otherwise 256 bytes, as `tokenize` makes.
"""
_ROUNDS = 12
"""Number of iterations in which a budget in dollars is turned into FLOPs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Options of `forerun init`; None for an option that was not given. All bad values are refused
    at once.
    """

    preset: str | None = None
    budget_flops: float | None = None
    budget_usd: float | None = None
    gpu: str | None = None
    num_gpus: int | None = None
    usd_per_gpu_hour: float | None = None
    optimizer: str | None = None

    @property
    def changes_size(self) -> bool:
        """Whether the main run differs from the preset's in size or GPUs."""
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
            is_whole = self.num_gpus <= NODE_GPUS or self.num_gpus % NODE_GPUS == 0
            checks.that(
                is_whole,
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
    """The preset, values, and head comment from which a new plan file is written."""

    name: str
    values: dict[str, dict[str, object]]
    head: tuple[str, ...] = ()


def first_plan(request: Request, data: str) -> FirstPlan:
    """Return the named preset, or the one nearest to the named GPUs, with the user's data, budget,
    and GPUs.

    A budget in dollars is not turned into FLOPs here; `priced` does that.
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
        # Search both rates and test them over width.
        for second_rate, setting in RECIPES[request.optimizer].renamed_hyperparameters.items():
            if setting != LEARNING_RATE:
                continue
            ranges = Plan().search.learning_rate
            values.setdefault("search", {})["axes"] = {
                second_rate: values["search"].get(LEARNING_RATE, ranges)
            }
            values.setdefault("transfer", {}).setdefault(
                "hyperparameters", Plan().transfer.hyperparameters
            )
            tested = cast(dict[str, tuple[str, ...]], values["transfer"]["hyperparameters"])
            values["transfer"]["hyperparameters"] = {**tested, second_rate: ("width",)}
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
    has_budget = request.budget_flops is not None or request.budget_usd is not None
    differs = has_budget or request.gpu is not None or request.num_gpus is not None
    head = (
        f"Preset {name}: {preset.about}.",
        *(["Budget or GPUs differ from the preset's."] if differs else []),
        *preset.head[1:],
    )
    return FirstPlan(name=name, values=values, head=head if preset.gpu else ())


def set_values(new: FirstPlan, overrides: Sequence[str]) -> None:
    """Set the values of `--set`.

    Under `wsd` proxies share stable phases, unless the options say otherwise or a value depends on
    the duration.

    Raises:
        PlanError: An option is not SECTION.KEY=VALUE.
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
    """Set the values of a CPU preset that depend on the vocabulary to those of the corpus's
    vocabulary. Values that the user gave are kept.

    Returns:
        One sentence that names the changed values; none if nothing changed.
    """
    plan, vocab_size = study.plan, study.manifest.vocab_size
    if PRESETS[new.name].gpu or plan.proxy.command:
        return []
    given = _given_keys(overrides)
    defaults: dict[tuple[str, str], object] = {}
    if "transfer.margin_nats" not in given:
        defaults["transfer", "margin_nats"] = scale_margin(plan.transfer.margin_nats, vocab_size)
    # The presets' rates and sizes were not measured for a user's model, nor the rates for Muon.
    is_measured = not plan.proxy.factory and plan.proxy.optimizer == DEFAULT_OPTIMIZER
    if is_measured and "search.learning_rate" not in given:
        defaults["search", LEARNING_RATE] = learning_rate_range(
            plan.search.learning_rate, vocab_size
        )
    has_budget = request.budget_flops is not None or request.budget_usd is not None
    if is_measured and not has_budget and "target.budget_flops" not in given:
        min_params = study.num_params(study.shape(MIN_WIDTH_MULTIPLE * plan.proxy.base_width))
        defaults["target", "budget_flops"] = budget_flops(plan.target.budget_flops, min_params)
    changed = {
        key: value
        for key, value in defaults.items()
        if value != getattr(getattr(plan, key[0]), key[1])
    }
    for (section, key), value in changed.items():
        new.values.setdefault(section, {})[key] = value
    assignments = ", ".join(
        f"{section}.{key} = {_format_value(value)}" for (section, key), value in changed.items()
    )
    return [f"for a vocabulary of {vocab_size:,}: {assignments}"] if changed else []


def _format_value(value: object) -> str:
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
    """Turn a budget in dollars into FLOPs, and adapt depth and layout to the budget.

    Returns:
        One sentence per assumption.

    Raises:
        SpecError: No price is known.
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
    """Give a plan for GPUs the depth of published models of its budget's size, and a layout that
    fits.

    The layout recomputes as little, and shards over as few GPUs, as leaves room in memory. Values
    of `--set` are kept.
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
    new.values["launch"] |= _find_fitting_layout(study)


def _find_fitting_layout(study: Study) -> dict[str, object]:
    """Return the sharding and recomputation of the first layout whose fullest rank fits the GPU;
    empty if none fits, which keeps the plan's layout.
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
            batches = microbatches(layout, run.shape, run.batch_tokens)
            memory = memory_per_rank(
                run.shape, layout, run.precision, *batches, optimizer=run.optimizer
            )
            if memory.total_bytes <= room:
                return changes
    return {}


def manifest_of(plan: Plan, folder: Path) -> Manifest | None:
    """Return the manifest of the corpus that a plan in `folder` names; None if there is no corpus
    yet.

    Raises:
        DataError: The folder is not a valid corpus.
    """
    corpus = folder / plan.data.path
    return read_manifest(corpus) if plan.data.path and (corpus / MANIFEST).exists() else None


def sketched(plan: Plan, manifest: Manifest | None) -> Study:
    """Return the study of a plan for counting, not for running: without a corpus, and with an
    assumed vocabulary if need be.
    """
    assumed = plan.data.vocab_size or (ASSUMED_VOCAB_SIZE if plan.launch.gpu else BYTES)
    manifest = manifest or unnamed("unnamed", assumed)
    return Study(
        plan=plan, study_dir=Path(), corpus=None, manifest=manifest, code_dir=Path(), factory=None
    )


def priced(study: Study, request: Request) -> tuple[float, str]:
    """Return the FLOPs of the main run that costs `request.budget_usd`, and a sentence about the
    assumptions.

    Raises:
        SpecError: No price is known.
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
    for _ in range(
        _ROUNDS
    ):  # dollars are only nearly proportional to FLOPs, because widths go in steps
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
    assert price is not None  # the loop above refuses a machine without a price
    sentence = (
        f"{format_usd(request.budget_usd)} pay for {format_flops(budget)} FLOPs on {ranks} "
        f"{machine.name}, at {format_usd(price.value)} an hour ({_name_source(price)}) and "
        f"{format_percent(share.value)} [{format_percent(share.low)}, "
        f"{format_percent(share.high)}] of the peak ({_name_source(share)})"
    )
    return float(f"{budget:.4g}"), sentence


def _name_source(span: Span) -> str:
    return span.source.partition(";")[0].removeprefix("default: ")


def summary(study: Study) -> dict[str, Json]:
    """Return the size and cost of a plan's main run and proxies."""
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
