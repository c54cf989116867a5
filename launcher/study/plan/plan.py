"""The plan of a study, and the records that follow from it alone, such as shapes and schedules.

A study's question is the part of its plan that decides what is measured; it must not change while
the study runs (`Plan.to_question`). The keys of the sections are in `sections` and `search`, and
those of `[cluster]` are here. `file` reads plans, and `writing` writes them. This module does not
import torch.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from forerun._launcher.study.plan.calibration_records import OpenChoice, Part
from forerun._launcher.study.plan.keys import Count, Section, require
from forerun._launcher.study.plan.search import SearchSection
from forerun._launcher.study.plan.sections import (
    DataSection,
    LadderSection,
    LaunchSection,
    ModelSection,
    ProxySection,
    TargetSection,
    TransferSection,
)
from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import ADDED_HPARAMS, SET_BY, get_hyperparameter
from forerun._proxies.core.muon import DEFAULT_MUON_RATE
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.optimizers import RECIPES, has_hyperparameter
from forerun._proxies.core.programs import Command, Factory
from forerun._proxies.core.rules import Parametrization, get_parametrization
from forerun._proxies.core.schedule import Schedule, compute_warmup_steps
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics
from forerun._scaling_fits.allocation.shapes import compute_layers
from forerun._sweeps.run.caps import BudgetCaps
from forerun._sweeps.search.space import Params, SearchSpace

# ---- Section [cluster] ----
# This section is not part of the question, so it may change on resume.

Cap = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]

MIN_GPU_SHARE = 0.01
"""Minimum share of a GPU. CUDA itself does not fit in a smaller share, and Ray counts GPUs in units
of 1/10,000.
"""
_RESERVED_SLURM_OPTIONS = (
    "--ntasks",
    "--ntasks-per-node",
    "--signal",
    "--requeue",
    "--no-requeue",
    "--open-mode",
    "--export",
    "-n",
)
"""Options of sbatch that forerun's job script sets itself."""
_ADDRESS = re.compile(r"|auto|([\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
"""Empty, `auto`, or host:port, where the host may be an IPv6 address in brackets."""
_SLURM_OPTION = re.compile(r"(--[a-z][a-z0-9-]*|-[A-Za-z])([= ][ -~]+)?")
"""A long or short option, with a value in printable ASCII if it has one."""
_Address = Annotated[str, require(_ADDRESS.fullmatch, "must be host:port of the head, or auto")]
_SlurmOption = Annotated[
    str,
    require(_SLURM_OPTION.fullmatch, "must be one option of sbatch, such as --nodes=4"),
    require(
        lambda option: re.split("[= ]", option)[0] not in _RESERVED_SLURM_OPTIONS,
        "must be left to the script, which sets it",
    ),
]
_GPUS = require(
    lambda number: (
        number == 0 or MIN_GPU_SHARE <= number <= 1 or (number > 1 and number.is_integer())
    ),
    f"must be 0, a share of one GPU of at least {MIN_GPU_SHARE}, or a whole number",
)


class ClusterSection(Section):
    """The workers that train proxies, and the limits of the study's spend."""

    backend: Literal["ray", "inline"] = "ray"
    """ray: worker processes; inline: this process."""
    address: _Address = ""
    """Existing Ray cluster, as host:port or auto; empty: workers on this machine only."""
    num_workers: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Ray workers, one thread each; 0: as many as fit."""
    worker_cpus: Annotated[float, Field(gt=0, le=10**4)] = 1.0
    """CPU cores of a worker."""
    worker_gpus: Annotated[float, Field(ge=0, le=10**4), _GPUS] = 0.0
    """GPUs of a worker; if below 1, several workers share a GPU evenly, and each is limited to its
    share of the memory."""
    worker_memory_gib: Annotated[float, Field(ge=0, le=10**6)] = 0.0
    """Memory of a worker, used to place it on a node; 0: not counted."""
    slurm_options: tuple[_SlurmOption, ...] = ()
    """#SBATCH options for `forerun run --sbatch FILE`, such as "--nodes=4", "--time=08:00:00"."""
    max_attempts: Count = 3
    """Maximum attempts at a run that crashes its worker."""
    max_runs: Annotated[int, Field(ge=0)] = 0
    """Maximum number of runs of the study, over all its drivers; 0: no limit."""
    max_flops: Cap = 0.0
    """Maximum training FLOPs of all proxies; 0: no limit."""
    max_hours: Cap = 0.0
    """Maximum hours with a driver running; 0: no limit."""
    max_device_hours: Cap = 0.0
    """Maximum device-hours (hours with a driver running, times devices); 0: no limit."""
    max_usd: Cap = 0.0
    """Maximum dollars, at the prices below; 0: no limit."""
    usd_per_device_hour: Cap = 0.0
    """Price of a device-hour in dollars; 0: unknown."""
    usd_per_device_hour_by_kind: dict[Annotated[str, Field(min_length=1)], Cap] = Field({})
    """Price by kind of device: { A100 = 1.5, "H100" = 2.5 } holds for devices with that word in
    their name. If two words fit, the longer one counts; if none fits, usd_per_device_hour."""

    def count_devices(self, kinds: Sequence[str]) -> dict[str, float]:
        """Return the number of devices of workers by kind: GPUs, or cores for workers without
        GPUs.
        """
        each = self.worker_gpus or self.worker_cpus
        return {kind: number * each for kind, number in Counter(kinds).items()}

    @property
    def caps(self) -> BudgetCaps:
        """Maximum spend of the study."""
        return BudgetCaps(
            num_runs=self.max_runs or None,
            flops=self.max_flops or None,
            hours=self.max_hours or None,
            device_hours=self.max_device_hours or None,
            usd=self.max_usd or None,
            usd_per_device_hour=self.usd_per_device_hour or None,
            usd_per_device_hour_by_kind=self.usd_per_device_hour_by_kind,
        )


class Plan(Section):
    """The plan of a study. Everything that is measured and decided follows from it and the data."""

    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    proxy: ProxySection = ProxySection()
    search: SearchSection = SearchSection()
    transfer: TransferSection = TransferSection()
    ladder: LadderSection = LadderSection()
    target: TargetSection = TargetSection()
    cluster: ClusterSection = ClusterSection()
    launch: LaunchSection = LaunchSection()

    def build_shape(self, width: int, vocab_size: int) -> Shape:
        """Return the shape at a width.

        Raises:
            SpecError: The width does not fit the head dim, the feed-forward ratio, or the key-value
                heads.
        """
        num_heads = width // self.model.head_dim
        if width % self.model.head_dim:
            raise SpecError(
                "Shape", [f"width = {width} must be a multiple of head_dim = {self.model.head_dim}"]
            )
        ffn_width = self.model.ffn_ratio * width
        if not ffn_width.is_integer():
            problem = (
                f"width = {width} times ffn_ratio = {self.model.ffn_ratio} must be a whole number"
            )
            raise SpecError("Shape", [problem])
        if num_heads % (group := self.model.query_heads_per_kv_head):
            heads = format_counted(num_heads, "head")
            problem = f"its {heads} must be a multiple of query_heads_per_kv_head = {group}"
            raise SpecError("Shape", [f"width = {width}: {problem}"])
        return Shape(
            num_layers=self.model.num_layers,
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_heads // group,
            ffn_width=int(ffn_width),
            vocab_size=vocab_size,
            seq_len=self.model.seq_len,
            family=self.model.family,
            tied=self.model.tied,
            qk_norm=self.model.qk_norm,
        )

    @property
    def parametrization(self) -> Parametrization:
        """Scaling rules of the parametrization that the plan names, with the plan's own choices
        (`proxy.rules`).
        """
        by_shape = RECIPES[self.proxy.optimizer].rates_by_shape
        usual = {"muon_rate": DEFAULT_MUON_RATE} if by_shape else {}
        return get_parametrization(
            self.proxy.parametrization,
            **{**usual, **self.proxy.rules.model_dump(exclude_none=True)},
        )

    @property
    def command(self) -> Command | None:
        """The user's own trainer; None if forerun's trainer is used."""
        proxy = self.proxy
        if not proxy.command:
            return None
        return Command(
            template=proxy.command,
            metrics_format=proxy.metrics_format,
            metrics_path=proxy.metrics_path,
            step_key=proxy.metrics_step_key,
            train_loss_key=proxy.metrics_train_loss_key,
            validation_loss_key=proxy.metrics_validation_loss_key,
            grad_norm_key=proxy.metrics_grad_norm_key,
            own=tuple(self.search.user_axes),
            train_loss_unit=proxy.metrics_train_loss_unit,
            validation_loss_unit=proxy.metrics_validation_loss_unit,
            bytes_per_token=proxy.metrics_bytes_per_token,
        )

    def is_passed_to_trainer(self, name: str) -> bool:
        """Return whether the trainer gets a hyperparameter. forerun's trainer gets those of its
        optimizer, and a user's command only those that it names.
        """
        if self.command is not None:
            return self.command.can_receive(get_hyperparameter(name).placeholder_name)
        return has_hyperparameter(self.proxy.optimizer, name)

    @property
    def space(self) -> SearchSpace:
        """Search space at the start of the search.

        Raises:
            SpecError: A range is not valid.
        """
        return self.search.build_space(self.is_passed_to_trainer)

    @property
    def not_searched(self) -> tuple[str, ...]:
        """Hyperparameters that every search varies but the user's own trainer does not get."""
        return tuple(name for name in self.search.ranges if not self.is_passed_to_trainer(name))

    @property
    def first_points(self) -> tuple[Params, ...]:
        """Points of `search.warm_start`, with the values that they leave out."""
        space = self.space
        return tuple(space.nearest(dict(point)) for point in self.search.warm_start)

    def build_schedule(self, num_steps: int, warmup_share: float) -> Schedule:
        """Return the schedule over `num_steps`, with its fractions turned into steps."""
        proxy = self.proxy
        decay = max(1, round(proxy.decay_fraction * num_steps)) if proxy.schedule == "wsd" else 0
        stages = self.batch_stages
        # Each stage but the last needs a step of its own.
        ramp = max(stages - 1, round(proxy.batch_warmup_fraction * num_steps)) if stages > 1 else 0
        return Schedule(
            kind=proxy.schedule,
            num_steps=num_steps,
            warmup_steps=compute_warmup_steps(warmup_share, num_steps, decay),
            decay_steps=decay,
            final_fraction=proxy.final_fraction,
            batch_warmup_steps=ramp,
            batch_warmup_stages=stages,
            decay_shape=proxy.decay_shape,
        )

    @property
    def batch_stages(self) -> int:
        """Number of equal stages in which the batch grows to its size."""
        return self.proxy.batch_warmup_stages if self.proxy.batch_warmup_fraction else 1

    def count_steps(self, num_full_batches: float) -> int:
        """Return the number of steps that train on as many tokens as `num_full_batches` batches of
        the full size. With a batch warmup, there are more steps than that.
        """
        num_steps = max(1, round(num_full_batches))
        if self.proxy.batch_warmup_fraction:
            num_steps = max(num_steps, self.proxy.batch_warmup_stages)
            share = float(self.build_schedule(num_steps, 0.0).num_full_batches) / num_steps
            num_steps = max(num_steps, round(num_full_batches / share))
        return num_steps

    def count_tokens(self, num_steps: int, batch_tokens: int | None = None) -> int:
        """Return the number of tokens of a run. `batch_tokens`: None for the proxies' batch."""
        return int(
            (batch_tokens or self.proxy.batch_tokens)
            * self.build_schedule(num_steps, 0.0).num_full_batches
        )

    def count_target_steps(self, params: float) -> int:
        """Return the number of steps of a main run with `params` parameters, N: the budget divided
        by 6N and by the tokens of a batch.
        """
        return self.count_steps(
            self.target.budget_flops / (6.0 * params * self.target_batch_tokens)
        )

    @property
    def hyperparameter_widths(self) -> tuple[int, ...]:
        """Widths at which hyperparameters other than the learning rate are tested, ascending."""
        base, given = self.proxy.base_width, self.transfer.hyperparameter_widths
        if given:
            return tuple(sorted(given))
        farthest = max(self.transfer.widths, key=lambda width: abs(math.log2(width / base)))
        return tuple(sorted([base, farthest]))

    @property
    def target_batch_tokens(self) -> int:
        """Tokens per step of the main run."""
        return self.target.batch_tokens or self.proxy.batch_tokens

    @property
    def target_num_layers(self) -> int:
        """Number of layers of the main run, if its depth is not chosen with its width."""
        return self.target.num_layers or self.model.num_layers

    @property
    def ladder_batch_tokens(self) -> int:
        """Tokens per step of the ladder's rungs."""
        return self.ladder.batch_tokens or self.proxy.batch_tokens

    @property
    def ladder_sizes(self) -> list[tuple[int, int]]:
        """Width and number of layers of every model of the ladder."""
        widths, ratio = self.ladder.widths, self.ladder.width_per_layer
        if ratio:
            return [(width, compute_layers(width, ratio)) for width in widths]
        depths = sorted(self.ladder.depths) or [self.model.num_layers]
        return [*itertools.product(widths, depths)]

    @property
    def scales_depth(self) -> bool:
        """Whether the ladder's rungs differ in depth."""
        return bool(self.ladder.width_per_layer or self.ladder.depths)

    @property
    def width_per_layer(self) -> float:
        """Width divided by number of layers of the main run; 0 if the plan sets the number of
        layers. With a grid of depths, this is the ratio of the base, until the fit finds the best.
        """
        if self.target.num_layers or not self.scales_depth:
            return 0.0
        return self.ladder.width_per_layer or self.proxy.base_width / self.model.num_layers

    @property
    def tested_depths(self) -> tuple[int, ...]:
        """Depths at which the learning-rate curve is measured. A plan that scales depth always
        tests it.
        """
        depth = self.model.num_layers
        return self.transfer.depths or ((depth, 2 * depth) if self.scales_depth else ())

    def build_factory(self, source_sha256: str) -> Factory:
        """Return the user's own model, whose source has this sha256."""
        return Factory(
            target=self.proxy.factory,
            source_sha256=source_sha256,
            dimensions=tuple(self.proxy.dimensions.items()),
        )

    @property
    def trains_alone(self) -> bool:
        """Whether proxies train one at a time, because they are a user's own code or use what a
        bank does not support.
        """
        proxy = self.proxy
        return bool(
            proxy.factory
            or proxy.command
            or proxy.batch_warmup_fraction
            or proxy.microbatch_tokens
            or proxy.activation_checkpointing
        )

    def build_numerics(self, part: Part) -> Numerics:
        """Return the mode in which proxies, or the ladder's rungs, compute. A choice that is left
        to the calibration has its plain value.

        Each worker has one thread, so the number of workers does not change results.
        """
        proxy = self.proxy
        slots = self.ladder.num_slots if part == "ladder" else proxy.num_slots
        return Numerics(
            dtype=proxy.dtype,
            matmul_precision=proxy.matmul_precision,
            num_slots=1 if self.trains_alone or slots == "auto" else slots,
            num_threads=1,
            microbatch_tokens=proxy.microbatch_tokens or None,
            activation_checkpointing=proxy.activation_checkpointing,
            compiled=proxy.compiled is True,
        )

    def list_open_choices(self, part: Part) -> tuple[OpenChoice, ...]:
        """Return the choices that are left to the calibration; none for a user's own code."""
        if self.proxy.factory or self.proxy.command:
            return ()
        slots = self.ladder.num_slots if part == "ladder" else self.proxy.num_slots
        choices: list[OpenChoice] = (
            ["num_slots"] if slots == "auto" and not self.trains_alone else []
        )
        return (*choices, "compiled") if self.proxy.compiled == "auto" else tuple(choices)

    def to_question(self) -> dict[str, canon.Json]:
        """Return the question: the part of the plan that decides what is measured, and that must
        not change on resume.

        It has every key that changes the meaning of finished runs, or the order in which runs are
        asked for.
        """
        question: dict[str, Any] = json.loads(self.model_dump_json(exclude=_NOT_IN_QUESTION))
        defaults = json.loads(Plan().model_dump_json())
        for path in _ADDED_KEYS:
            *parents, key = path.split(".")
            section, default = question, defaults
            for parent in parents:
                section, default = section[parent], default[parent]
            if section[key] == default[key]:
                del section[key]
        return question


_NOT_IN_QUESTION: dict[str, Any] = {
    "cluster": True,
    "data": True,
    "launch": True,
    # These keys only add or remove runs (repeats and checks of rungs, a second run of a trial); no
    # existing run changes.
    "search": {"replay_winner"},
    "ladder": {
        "num_seeds",
        "check_offsets_octaves",
        "num_checked",
        "check_share",
        "check_num_seeds",
    },
    "proxy": {"code_path", "timeout_seconds"},
}
_ADDED_KEYS = (
    "proxy.decay_shape",
    "proxy.decay_branches",
    "proxy.metrics_train_loss_unit",
    "proxy.metrics_validation_loss_unit",
    "proxy.metrics_bytes_per_token",
    "search.warm_start",
    "proxy.dimensions",
    "proxy.describe",
    "ladder.depths",
    "ladder.width_per_layer",
    "proxy.optimizer",
    "proxy.rules.muon_rate",
    "proxy.rules.muon_width_power",
    *(f"proxy.{added.name}" for added in SET_BY["proxy"] if added.name in ADDED_HPARAMS),
)
"""Keys that are left out of the question where they have their default, because studies that began
before they existed must be able to continue.
"""
