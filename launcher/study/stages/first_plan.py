"""The first plan of a study: a preset with the user's data, budget, and GPUs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from forerun._launcher.main_run.estimates.layout import (
    count_microbatches,
    find_layout_problems,
    read_parallelism,
)
from forerun._launcher.main_run.estimates.machine import (
    MFU_CONVENTION,
    MachineOptions,
    Span,
    build_machine,
    compute_gpu_hours,
    make_exact,
)
from forerun._launcher.main_run.estimates.main_run import GIGA, RESERVED, estimate_memory
from forerun._launcher.main_run.estimates.reference_tables import UnknownNameError, look_up_gpu
from forerun._launcher.main_run.estimates.utilization import estimate_paid_share
from forerun._launcher.study.calibration.study_cost import (
    Speeds,
    compute_stage_costs,
    plan_main_run,
    sum_stage_costs,
)
from forerun._launcher.study.plan.file import PlanError, set_override
from forerun._launcher.study.plan.plan import Plan
from forerun._launcher.study.plan.presets import (
    NODE_GPUS,
    PRESETS,
    build_layout,
    build_slurm_options,
    choose_preset,
)
from forerun._launcher.study.plan.sections import DEFAULT_OPTIMIZER
from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.plan.vocabulary import (
    MIN_WIDTH_MULTIPLE,
    choose_budget,
    scale_margin,
    shift_learning_rate_range,
)
from forerun._launcher.study.stages.study_folder import build_unnamed_manifest
from forerun._proxies.core.canon import Json
from forerun._proxies.core.checks import Checks, SpecError
from forerun._proxies.core.flops import compute_flops_per_token, count_params
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._proxies.core.notation import format_flops, format_percent, format_usd
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.data.tokens import MANIFEST, Manifest, read_manifest
from forerun._scaling_fits.allocation.shapes import compute_published_layers

ASSUMED_VOCAB_SIZE, BYTE_VOCAB_SIZE = 50_304, 256
"""Vocabulary sizes that are assumed while there is no corpus. For a plan with GPUs it is GPT-2's,
rounded up to a multiple of 64; for others it is that of bytes, the default of `tokenize`.
"""
_ROUNDS = 12
"""Number of fixed-point iterations that turn a budget in dollars into FLOPs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
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
    def has_budget(self) -> bool:
        """Whether a budget was given, in FLOPs or dollars."""
        return self.budget_flops is not None or self.budget_usd is not None

    @property
    def changes_size(self) -> bool:
        """Whether the main run differs from the preset's in size or GPUs."""
        return self.has_budget or self.gpu is not None or self.num_gpus is not None

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.budget_usd is not None:
            checks.require_number("budget_usd", least=0.01, most=1e12)
            checks.require(
                self.budget_flops is None, "budget_flops and budget_usd: give one of them"
            )
        elif self.usd_per_gpu_hour is not None:
            checks.problems.append("usd_per_gpu_hour: needs budget_usd, which it turns into FLOPs")
        if self.num_gpus is not None:
            checks.require_whole("num_gpus")
            checks.require(
                self.num_gpus <= NODE_GPUS or self.num_gpus % NODE_GPUS == 0,
                f"gpus = {self.num_gpus}: must be at most {NODE_GPUS}, or whole nodes of "
                f"{NODE_GPUS}",
            )
        if self.usd_per_gpu_hour is not None:
            checks.require_number("usd_per_gpu_hour", least=1e-4, most=1e6)
        if self.gpu is not None:
            try:
                look_up_gpu(self.gpu)
            except UnknownNameError as error:
                checks.problems.append(str(error))
        checks.raise_problems("forerun init")


@dataclass(kw_only=True, slots=True)
class FirstPlan:
    """A new plan in the making. Functions change it in turn, and a plan file is written from it."""

    name: str
    """Name of the preset."""
    values: dict[str, dict[str, object]]
    """Values that differ from the defaults of a plan, by section and key."""
    head: tuple[str, ...] = ()
    """Lines of comment at the beginning of the file."""

    def set(self, section: str, **values: object) -> None:
        """Set values of a section by key."""
        self.values.setdefault(section, {}).update(values)


def build_first_plan(request: PlanRequest, data: str) -> FirstPlan:
    """Return the named preset, or the one nearest to the named GPUs, with the user's data, budget,
    and GPUs.

    A budget in dollars is not turned into FLOPs here; `convert_dollars_to_flops` does that.
    """
    name = request.preset or "cpu"
    is_for_gpus = (request.gpu, request.num_gpus, request.budget_usd) != (None, None, None)
    if request.preset is None and is_for_gpus:
        name = choose_preset(look_up_gpu(request.gpu or "H100")[1].memory_gb, request.num_gpus or 1)
    preset = PRESETS[name]
    head = [f"Preset {name}: {preset.about}."]
    head += ["Budget or GPUs differ from the preset's."] if request.changes_size else []
    new = FirstPlan(
        name=name,
        values={section: dict(keys) for section, keys in preset.values.items()},
        head=(*head, *preset.head[1:]) if preset.gpu else (),
    )
    new.set("data", path=data)
    budget = preset.budget_flops if request.budget_flops is None else request.budget_flops
    new.set("target", budget_flops=budget)
    if request.optimizer is not None:
        _set_optimizer(new, request.optimizer)
    if request.gpu is not None:
        new.set("launch", gpu=look_up_gpu(request.gpu)[0])
    if request.usd_per_gpu_hour is not None:
        new.set("launch", usd_per_gpu_hour=request.usd_per_gpu_hour)
    if request.num_gpus is not None:
        new.set("launch", **build_layout(request.num_gpus))
        if preset.gpu:
            new.set("cluster", num_workers=request.num_gpus)
        if "slurm_options" in new.values.get("cluster", {}):
            new.set("cluster", slurm_options=build_slurm_options(request.num_gpus))
    return new


def _set_optimizer(new: FirstPlan, optimizer: str) -> None:
    """Set the optimizer. If it has a second learning rate, search it and test it over width."""
    new.set("proxy", optimizer=optimizer)
    defaults = Plan()
    for rate, renamed in RECIPES[optimizer].renamed_hyperparameters.items():
        if renamed == LEARNING_RATE:
            search, transfer = new.values.get("search", {}), new.values.get("transfer", {})
            range_ = search.get(LEARNING_RATE, defaults.search.learning_rate)
            tested = transfer.get("hyperparameters", defaults.transfer.hyperparameters)
            new.set("search", axes={rate: range_})
            new.set("transfer", hyperparameters={**cast(Any, tested), rate: ("width",)})


def set_values(new: FirstPlan, overrides: Sequence[str]) -> None:
    """Set the values of `--set`.

    With the schedule `wsd`, decay branches are turned on, so that proxies share their stable
    phases, unless the options say otherwise or a value depends on the duration.

    Raises:
        PlanError: An option is not SECTION.KEY=VALUE.
    """
    if problems := [problem for given in overrides if (problem := set_override(new.values, given))]:
        raise PlanError("forerun init", problems)
    proxy = new.values.get("proxy", {})
    # The user's own trainer cannot branch off, and these values may depend on the duration.
    cannot_share = proxy.get("command") or proxy.get("batch_warmup_fraction") or proxy.get("rules")
    ignores_duration = proxy.get("parametrization", "mup") in ("mup", "sp", "completep")
    if proxy.get("schedule") == "wsd" and ignores_duration and not cannot_share:
        proxy.setdefault("decay_branches", True)


def fit_vocabulary(
    new: FirstPlan, study: Study, request: PlanRequest, overrides: Sequence[str]
) -> list[str]:
    """Set the values of a CPU preset that depend on the vocabulary to those of the corpus's
    vocabulary. Values that the user gave are kept.

    Returns:
        One sentence that names the changed values; none if nothing changed.
    """
    plan, vocab_size = study.plan, study.manifest.vocab_size
    if PRESETS[new.name].gpu or plan.proxy.command:
        return []
    values: dict[str, Any] = {
        "transfer.margin_nats": scale_margin(plan.transfer.margin_nats, vocab_size)
    }
    # The presets' rates and sizes were not measured for a user's model, nor the rates for Muon.
    if not plan.proxy.factory and plan.proxy.optimizer == DEFAULT_OPTIMIZER:
        rates = shift_learning_rate_range(plan.search.learning_rate, vocab_size)
        values["search.learning_rate"] = rates
        if not request.has_budget:
            min_params = study.count_params(
                study.build_shape(MIN_WIDTH_MULTIPLE * plan.proxy.base_width)
            )
            budget = choose_budget(plan.target.budget_flops, min_params)
            values["target.budget_flops"] = budget
    assignments = []
    for name, value in values.items():
        section, _, key = name.partition(".")
        if name in _list_given_keys(overrides) or value == getattr(getattr(plan, section), key):
            continue
        new.set(section, **{key: value})
        numbers = [f"{number:g}" for number in (value if isinstance(value, tuple) else (value,))]
        text = f"[{', '.join(numbers)}]" if isinstance(value, tuple) else numbers[0]
        assignments.append(f"{name} = {text}")
    return [f"for a vocabulary of {vocab_size:,}: {', '.join(assignments)}"] if assignments else []


def _list_given_keys(overrides: Sequence[str]) -> set[str]:
    """Return the plan keys that `--set` gives."""
    return {override.partition("=")[0].strip() for override in overrides}


def _with_values(study: Study, section: str, **values: object) -> Study:
    """Return the study with other values in a section of its plan."""
    changed = getattr(study.plan, section).model_copy(update=values)
    return dataclasses.replace(study, plan=study.plan.model_copy(update={section: changed}))


_DEPTH_STEP = 4
"""Depths of deep models are multiples of this, so that pipelines of two and four stages divide
them."""


def settle_size(
    new: FirstPlan, study: Study, request: PlanRequest, overrides: Sequence[str]
) -> list[str]:
    """Turn a budget in dollars into FLOPs, and adapt depth and layout to the budget.

    Returns:
        One sentence per assumption.

    Raises:
        SpecError: No price is known.
    """
    notes = []
    if request.budget_usd is not None:
        budget, sentence = convert_dollars_to_flops(study, request)
        notes.append(sentence)
        new.set("target", budget_flops=budget)
        study = _with_values(study, "target", budget_flops=budget)
    _follow_published_shapes(new, study, overrides)
    return notes


def _follow_published_shapes(new: FirstPlan, study: Study, overrides: Sequence[str]) -> None:
    """Give a plan for GPUs the depth of published models of its budget's size, and a layout that
    fits in memory with as little recomputation and sharding as possible.

    Values of `--set` are kept.
    """
    plan, given = study.plan, _list_given_keys(overrides)
    if not PRESETS[new.name].gpu or plan.proxy.factory or plan.proxy.command:
        return
    if "model.num_layers" not in given:
        layers = compute_published_layers(study.target_params_guess)
        step = _DEPTH_STEP if layers > 2 * _DEPTH_STEP else 1
        depth = max(1, step * round(layers / step))
        new.set("model", num_layers=depth)
        study = _with_values(study, "model", num_layers=depth)
    if not {"launch.data_parallel_shard", "launch.activation_checkpointing"} & given:
        new.set("launch", **_find_fitting_layout(study))


def _find_fitting_layout(study: Study) -> dict[str, object]:
    """Return the sharding and recomputation of the first layout whose fullest rank fits the GPU;
    empty if none fits, which keeps the plan's layout.
    """
    launch, run = study.plan.launch, plan_main_run(study)
    ranks = launch.data_parallel_shard * launch.data_parallel_replicate
    room = look_up_gpu(launch.gpu)[1].memory_gb * GIGA * (1 - RESERVED)
    shards = range(launch.data_parallel_shard, ranks + 1, launch.data_parallel_shard)
    # Cheapest first: less recomputation, then fewer shards
    for checkpointing, shard in itertools.product(("selective", "full"), shards):
        changes: dict[str, object] = {
            "data_parallel_shard": shard,
            "data_parallel_replicate": ranks // shard,
            "activation_checkpointing": checkpointing,
        }
        layout = read_parallelism({**launch.model_dump(), **changes})
        if ranks % shard or find_layout_problems(layout, run.shape, run.batch_tokens):
            continue
        batches = count_microbatches(layout, run.shape, run.batch_tokens)
        memory = estimate_memory(
            run.shape, layout, run.precision, *batches, optimizer=run.optimizer
        )
        if memory.total_bytes <= room:
            return changes
    return {}


def find_manifest(plan: Plan, folder: Path) -> Manifest | None:
    """Return the manifest of the corpus that a plan in `folder` names; None if there is no corpus
    yet.

    Raises:
        DataError: The folder is not a valid corpus.
    """
    corpus = folder / plan.data.path
    return read_manifest(corpus) if plan.data.path and (corpus / MANIFEST).exists() else None


def sketch_study(plan: Plan, manifest: Manifest | None) -> Study:
    """Return the study of a plan for counting, not for running: without a corpus, and with an
    assumed vocabulary if need be.
    """
    assumed = plan.data.vocab_size or (ASSUMED_VOCAB_SIZE if plan.launch.gpu else BYTE_VOCAB_SIZE)
    manifest = manifest or build_unnamed_manifest("unnamed", assumed)
    return Study(
        plan=plan, study_dir=Path(), corpus=None, manifest=manifest, code_dir=Path(), factory=None
    )


def convert_dollars_to_flops(study: Study, request: PlanRequest) -> tuple[float, str]:
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
    # Dollars are only nearly proportional to FLOPs, because widths are multiples of a number.
    for _ in range(_ROUNDS):
        run = plan_main_run(_with_values(study, "target", budget_flops=budget))
        machine = build_machine(given, compute_flops_per_token(run.shape, MFU_CONVENTION))
        if machine.price_usd is None:
            raise SpecError(
                "forerun init",
                [f"gpu = {machine.name}: has no published price: give usd_per_gpu_hour"],
            )
        share = estimate_paid_share(machine, count_params(run.shape).total)
        hours = compute_gpu_hours(
            make_exact(run.flops[MFU_CONVENTION] + run.optimizer_flops), machine.peak_flops, share
        )
        usd = hours.multiply(machine.price_usd).value
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


def summarize_plan(study: Study) -> dict[str, Json]:
    """Return the size and cost of a plan's main run and proxies."""
    run, stages = plan_main_run(study), compute_stage_costs(study, Speeds())
    flops = sum(stage.flops.value for stage in stages)
    return {
        "params": count_params(run.shape).total,
        "width": run.shape.width,
        "num_layers": run.shape.num_layers,
        "tokens": run.num_tokens,
        "num_runs": sum_stage_costs(stages).num_runs[0],
        "flops": flops,
        "share_of_main_run": flops / run.flops["causal"],
        "vocab_size": study.manifest.vocab_size,
    }
