"""The plan: the question of a study, and the records that follow from it alone.

The keys of its sections are in `sections` and `search`; section `[cluster]` is here. `file` reads
plans, and `writing` writes them. No torch.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from launcher.plan.calibration_records import Open, Part
from launcher.plan.keys import Count, Section, must
from launcher.plan.search import SearchSection
from launcher.plan.sections import (
    DEFAULT_OPTIMIZER,
    DataSection,
    LadderSection,
    LaunchSection,
    ModelSection,
    ProxySection,
    TargetSection,
    TransferSection,
)
from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import ADDED_HPARAMS, SET_BY, hyperparameter_named
from proxies.core.muon import DEFAULT_MUON_RATE
from proxies.core.notation import counted
from proxies.core.optimizers import RECIPES, has_hyperparameter
from proxies.core.programs import Command, Factory
from proxies.core.rules import Parametrization, named
from proxies.core.schedule import Schedule, whole_warmup
from proxies.core.shape import Shape
from proxies.core.spec import Numerics
from scaling_fits.allocation.shapes import layers_of
from sweeps.run.budget import BudgetCaps
from sweeps.search.space import Params, SearchSpace

# ---- Section [cluster] ----
# It is not part of the question, so it may change on resume.

Cap = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]

LEAST_SHARE = 0.01
"""Minimum share of a GPU: below it CUDA itself does not fit, and Ray counts in units of
1/10,000.
"""
_OURS = (
    "--ntasks",
    "--ntasks-per-node",
    "--signal",
    "--requeue",
    "--no-requeue",
    "--open-mode",
    "--export",
    "-n",
)
_ADDRESS = re.compile(r"|auto|([\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_SLURM_OPTION = re.compile(r"(--[a-z][a-z0-9-]*|-[A-Za-z])([= ][ -~]+)?")
_Address = Annotated[str, must(_ADDRESS.fullmatch, "must be host:port of the head, or auto")]
_SlurmOption = Annotated[
    str,
    must(_SLURM_OPTION.fullmatch, "must be one option of sbatch, such as --nodes=4"),
    must(
        lambda option: re.split("[= ]", option)[0] not in _OURS,
        "must be left to the script, which sets it",
    ),
]
_GPUS = must(
    lambda number: (
        number == 0 or LEAST_SHARE <= number <= 1 or (number > 1 and number.is_integer())
    ),
    f"must be 0, a share of one GPU of at least {LEAST_SHARE}, or a whole number",
)


class ClusterSection(Section):
    """The workers that train proxies, and the limits of the study's spend."""

    backend: Literal["ray", "inline"] = Field(
        "ray", description="ray: worker processes; inline: this process."
    )
    address: _Address = Field(
        "",
        description="Existing Ray cluster, as host:port or auto; empty: workers on this machine "
        "only.",
    )
    num_workers: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0,
        description="Ray workers, one thread each; 0: as many as fit.",
    )
    worker_cpus: Annotated[float, Field(gt=0, le=10**4)] = Field(
        1.0, description="CPU cores of a worker."
    )
    worker_gpus: Annotated[float, Field(ge=0, le=10**4), _GPUS] = Field(
        0.0,
        description="GPUs of a worker; below 1 several workers share one evenly, each limited to "
        "its share of the "
        "memory.",
    )
    worker_memory_gib: Annotated[float, Field(ge=0, le=10**6)] = Field(
        0.0, description="Memory of a worker, used to place it on a node; 0: not counted."
    )
    slurm_options: tuple[_SlurmOption, ...] = Field(
        (),
        description='#SBATCH options for `forerun run --sbatch FILE`, such as "--nodes=4", '
        '"--time=08:00:00".',
    )
    max_attempts: Count = Field(3, description="Attempts at a run that crashes its worker.")
    max_runs: Annotated[int, Field(ge=0)] = Field(
        0, description="Most runs of the study, over all its drivers; 0: no limit."
    )
    max_flops: Cap = Field(0.0, description="Most training FLOPs of all proxies; 0: no limit.")
    max_hours: Cap = Field(0.0, description="Most hours with a driver running; 0: no limit.")
    max_device_hours: Cap = Field(
        0.0, description="Most device-hours: those hours times devices; 0: no limit."
    )
    max_usd: Cap = Field(0.0, description="Most dollars, at the prices below; 0: no limit.")
    usd_per_device_hour: Cap = Field(
        0.0, description="Price of a device-hour in dollars; 0: unknown."
    )
    usd_per_device_hour_by_kind: dict[Annotated[str, Field(min_length=1)], Cap] = Field(
        {},
        description='The same of devices whose name holds a word, such as { A100 = 1.5, "H100" = '
        "2.5 }; of two that "
        "fit, the longer one; others cost usd_per_device_hour.",
    )

    def num_devices(self, kinds: Sequence[str]) -> dict[str, float]:
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
    """A study's question. Everything measured and decided follows from it and the data."""

    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    proxy: ProxySection = ProxySection()
    search: SearchSection = SearchSection()
    transfer: TransferSection = TransferSection()
    ladder: LadderSection = LadderSection()
    target: TargetSection = TargetSection()
    cluster: ClusterSection = ClusterSection()
    launch: LaunchSection = LaunchSection()

    def shape(self, width: int, vocab_size: int) -> Shape:
        """Return the shape at a width.

        Raises:
            SpecError: The width does not fit the head dim, the feed-forward ratio, or the key-value
                heads.
        """
        num_heads, rest = divmod(width, self.model.head_dim)
        if rest:
            raise SpecError(
                "Shape", [f"width = {width} must be a multiple of head_dim = {self.model.head_dim}"]
            )
        ffn_width = self.model.ffn_ratio * width
        if not ffn_width.is_integer():
            raise SpecError(
                "Shape",
                [
                    (
                        f"width = {width} times ffn_ratio = {self.model.ffn_ratio} must be a whole "
                        "number"
                    )
                ],
            )
        if num_heads % (group := self.model.query_heads_per_kv_head):
            heads = counted(num_heads, "head")
            raise SpecError(
                "Shape",
                [
                    (
                        f"width = {width}: its {heads} must be a multiple of "
                        "query_heads_per_kv_head = "
                        f"{group}"
                    )
                ],
            )
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
        """Scaling rules: those of the named source, with the plan's own choices."""
        by_shape = RECIPES[self.proxy.optimizer].rates_by_shape
        usual = {"muon_rate": DEFAULT_MUON_RATE} if by_shape else {}
        return named(
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
            own=tuple(self.search.own),
            train_loss_unit=proxy.metrics_train_loss_unit,
            validation_loss_unit=proxy.metrics_validation_loss_unit,
            bytes_per_token=proxy.metrics_bytes_per_token,
        )

    def reaches(self, name: str) -> bool:
        """Return whether the trainer gets a hyperparameter: forerun's gets those of its optimizer,
        a command only those it names.
        """
        if self.command is not None:
            return self.command.reaches(hyperparameter_named(name).told_as)
        return has_hyperparameter(self.proxy.optimizer, name)

    @property
    def space(self) -> SearchSpace:
        """Search space at the start of the search. Raises SpecError if a range is not valid."""
        return self.search.space(self.reaches)

    @property
    def not_searched(self) -> tuple[str, ...]:
        """Hyperparameters that every search varies but the user's own trainer does not get."""
        return tuple(name for name in self.search.ranges if not self.reaches(name))

    @property
    def first_points(self) -> tuple[Params, ...]:
        """Points of `search.warm_start`, with the values that they leave out."""
        space = self.space
        return tuple(space.nearest(dict(point)) for point in self.search.warm_start)

    def schedule(self, num_steps: int, warmup_share: float) -> Schedule:
        """Return the schedule over `num_steps`, with its fractions turned into steps."""
        proxy = self.proxy
        decay = max(1, round(proxy.decay_fraction * num_steps)) if proxy.schedule == "wsd" else 0
        stages = self.batch_stages
        ramp = max(stages - 1, round(proxy.batch_warmup_fraction * num_steps)) if stages > 1 else 0
        return Schedule(
            kind=proxy.schedule,
            num_steps=num_steps,
            warmup_steps=whole_warmup(warmup_share, num_steps, decay),
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

    def steps_for(self, num_full_batches: float) -> int:
        """Return the number of steps that train on so many full batches; it is larger if the batch
        warms up.
        """
        num_steps = max(1, round(num_full_batches))
        if self.proxy.batch_warmup_fraction:
            num_steps = max(num_steps, self.proxy.batch_warmup_stages)
            share = float(self.schedule(num_steps, 0.0).num_full_batches) / num_steps
            num_steps = max(num_steps, round(num_full_batches / share))
        return num_steps

    def num_tokens(self, num_steps: int, batch_tokens: int | None = None) -> int:
        """Return the number of tokens of a run. `batch_tokens`: None for the proxies' batch."""
        return int(
            (batch_tokens or self.proxy.batch_tokens)
            * self.schedule(num_steps, 0.0).num_full_batches
        )

    def target_steps(self, params: float) -> int:
        """Return the number of steps of a main run with so many parameters: the budget divided by 6
        N and the batch.
        """
        return self.steps_for(self.target.budget_flops / (6.0 * params * self.target_batch_tokens))

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

    def ladder_depths(self, width: int) -> tuple[int, ...]:
        """Return the numbers of layers of the ladder's rungs with a width."""
        if self.ladder.width_per_layer:
            return (layers_of(width, self.ladder.width_per_layer),)
        return tuple(sorted(self.ladder.depths)) or (self.model.num_layers,)

    @property
    def scales_depth(self) -> bool:
        """Whether the ladder's rungs differ in depth."""
        return bool(self.ladder.width_per_layer or self.ladder.depths)

    @property
    def width_per_layer(self) -> float:
        """Width per layer of the main run, if its depth is chosen with its width: the ladder's
        rule; for a grid of depths the base's, until the fit tells which is best. 0 if the depth is
        given.
        """
        if self.target.num_layers or not self.scales_depth:
            return 0.0
        return self.ladder.width_per_layer or self.proxy.base_width / self.model.num_layers

    @property
    def tested_depths(self) -> tuple[int, ...]:
        """Depths at which the learning-rate curve is measured. A plan that scales depth always
        tests it.
        """
        own = self.model.num_layers
        return self.transfer.depths or ((own, 2 * own) if self.scales_depth else ())

    def factory(self, source_sha256: str) -> Factory:
        """Return the user's own model, whose source has this sha256."""
        return Factory(
            target=self.proxy.factory,
            source_sha256=source_sha256,
            dimensions=tuple(self.proxy.dimensions.items()),
        )

    @property
    def alone(self) -> bool:
        """Whether proxies train one at a time, because they are a user's own code or use what a
        bank does not support.
        """
        proxy = self.proxy
        own = bool(proxy.factory or proxy.command or proxy.batch_warmup_fraction)
        return own or bool(proxy.microbatch_tokens or proxy.activation_checkpointing)

    def numerics(self, part: Part) -> Numerics:
        """Return how proxies, or the ladder's rungs, compute; choices left to the calibration have
        their plain values.

        Each worker has one thread, so the number of workers does not change results.
        """
        proxy = self.proxy
        slots = self.ladder.num_slots if part == "ladder" else proxy.num_slots
        return Numerics(
            dtype=proxy.dtype,
            matmul_precision=proxy.matmul_precision,
            num_slots=1 if self.alone or slots == "auto" else slots,
            num_threads=1,
            microbatch_tokens=proxy.microbatch_tokens or None,
            activation_checkpointing=proxy.activation_checkpointing,
            compiled=proxy.compiled is True,
        )

    def choices(self, part: Part) -> tuple[Open, ...]:
        """Return the choices that are left to the calibration; none for a user's own code."""
        if self.proxy.factory or self.proxy.command:
            return ()
        slots = self.ladder.num_slots if part == "ladder" else self.proxy.num_slots
        found: dict[Open, bool] = {
            "num_slots": slots == "auto" and not self.alone,
            "compiled": self.proxy.compiled == "auto",
        }
        return tuple(name for name, is_open in found.items() if is_open)

    def question(self) -> dict[str, canon.Json]:
        """Return the part of the plan that must not change on resume: everything that decides what
        finished runs mean, or which are asked for first.
        """
        plain: dict[str, canon.Json] = json.loads(
            self.model_dump_json(
                exclude={
                    "cluster": True,
                    "data": True,
                    "launch": True,
                    # More or fewer checks or repeats of rungs change no existing run, nor does
                    # a second run of a trial.
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
            )
        )
        search = plain["search"]
        assert isinstance(search, dict)
        proxy = plain["proxy"]
        assert isinstance(proxy, dict)
        rules, ladder = proxy["rules"], plain["ladder"]
        assert isinstance(rules, dict) and isinstance(ladder, dict)
        # Studies that began before these keys existed must be able to continue.
        for section, name, default in (
            (proxy, "decay_shape", "linear"),
            (proxy, "decay_branches", False),
            (proxy, "metrics_train_loss_unit", "nats"),
            (proxy, "metrics_validation_loss_unit", "nats"),
            (proxy, "metrics_bytes_per_token", 0.0),
            (search, "warm_start", []),
            (proxy, "dimensions", {}),
            (proxy, "describe", ""),
            (ladder, "depths", []),
            (ladder, "width_per_layer", 0.0),
            (proxy, "optimizer", DEFAULT_OPTIMIZER),
            (rules, "muon_rate", None),
            (rules, "muon_width_power", None),
            *(
                (proxy, one.name, one.default)
                for one in SET_BY["proxy"]
                if one.name in ADDED_HPARAMS
            ),
        ):
            if section[name] == default:
                del section[name]
        return plain
