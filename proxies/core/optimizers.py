"""The registries of optimizers, and of recipes, which assign them to kinds of parameters. Standard
library only.

To add an optimizer: an entry of `OPTIMIZERS`, an entry of `RECIPES`, its update in `proxies.model`,
and its line in `proxies.model.optimizer`. Plans, searches, frozen configs, explanations and
estimates read both registries. An exporter refuses an optimizer that it does not list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, Hparams
from proxies.core.muon import iteration_flops
from proxies.core.numbers import KINDS, Kind, kind_of
from proxies.core.shape import Shape, parameter_shapes

WEIGHT_DECAY = "weight_decay"
"""Setting that every optimizer has: a step multiplies a weight by 1 - lr * weight_decay."""


def _no_flops(size: tuple[int, ...]) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """Description of an optimizer: all but its update."""

    name: str
    """Name in frozen configs and exports."""
    label: str
    """Name in sentences."""
    source: str
    """Paper or page that defines it."""
    settings: tuple[str, ...]
    """Names of its settings. Each is a hyperparameter, which declares its meaning, bounds, default,
    and scaling."""
    num_moments: int
    """Numbers that it keeps for each weight from step to step."""
    step_copies: int
    """Copies of the weights during a step, beside weights, gradients, and moments."""
    kinds: tuple[Kind, ...] = KINDS
    """Kinds of parameters that it may step."""
    only_matrices: bool = False
    """Whether it may step parameters of two dimensions only."""
    rates_by_shape: bool = False
    """Whether the learning rate of a matrix follows its shape (`proxies.core.muon.MuonRate`)."""
    step_flops: Callable[[tuple[int, ...]], float] = _no_flops
    """FLOPs that it adds to every step for a parameter of that size, whatever the batch."""
    gathered_bytes: int = 0
    """Bytes per weight of the one whole matrix that a rank gathers for its step; 0 if it does
    not."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.settings if name not in HYPERPARAMETERS]
        missing = [name for name in (LEARNING_RATE, WEIGHT_DECAY) if name not in self.settings]
        if unknown or missing:
            raise ValueError(
                f"optimizer {self.name}: unknown settings {unknown}, missing settings {missing}"
            )

    def can_step(self, kind: Kind, size: tuple[int, ...] | None = None) -> bool:
        """Return whether it may step parameters of a kind, and of a size if one is given."""
        return kind in self.kinds and (size is None or not self.only_matrices or len(size) == 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """An assignment of optimizers to kinds of parameters, which a plan names in
    `proxy.optimizer`.
    """

    name: str
    label: str
    """Name in sentences."""
    default: str
    """Optimizer of all parameters that `by_kind` gives to no other."""
    by_kind: Mapping[Kind, str] = field(default_factory=lambda: MappingProxyType({}))
    """Optimizers of single kinds. A parameter that its optimizer cannot step gets the default
    one."""
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    """Hyperparameters that set a setting of another name, by optimizer and setting."""

    def optimizer_for(self, kind: Kind, size: tuple[int, ...] | None = None) -> OptimizerSpec:
        """Return the optimizer that steps parameters of a kind; `size` is the parameter's, if it is
        known.
        """
        chosen = OPTIMIZERS[self.by_kind.get(kind, self.default)]
        return chosen if chosen.can_step(kind, size) else OPTIMIZERS[self.default]

    @property
    def optimizers(self) -> tuple[OptimizerSpec, ...]:
        """Its optimizers, the main one first."""
        return tuple(
            OPTIMIZERS[name] for name in dict.fromkeys((*self.by_kind.values(), self.default))
        )

    @property
    def main(self) -> OptimizerSpec:
        """The optimizer whose learning rate the search is about: of hidden matrices where they have
        their own.
        """
        return self.optimizers[0]

    @property
    def rates_by_shape(self) -> bool:
        """Whether the learning rates of hidden matrices follow their shape."""
        return self.main.rates_by_shape

    def hyperparameter_for(self, optimizer: str, setting: str) -> str:
        """Return the name of the hyperparameter that sets an optimizer's setting."""
        return self.renamed.get(optimizer, {}).get(setting, setting)

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Names of the hyperparameters that set some setting of its optimizers, those of the main
        one first.
        """
        names = (
            self.hyperparameter_for(spec.name, name)
            for spec in self.optimizers
            for name in spec.settings
        )
        return tuple(dict.fromkeys(names))

    @property
    def renamed_hyperparameters(self) -> dict[str, str]:
        """Names of settings by the hyperparameter that sets them under another name."""
        return {
            name: setting
            for by_setting in self.renamed.values()
            for setting, name in by_setting.items()
        }

    def value_at_base(self, hparams: Hparams, optimizer: str, setting: str) -> float:
        """Return the value of an optimizer's setting at the base shape."""
        name = self.hyperparameter_for(optimizer, setting)
        value: float = getattr(hparams, name)
        fallback = HYPERPARAMETERS[name].zero_means
        return getattr(hparams, fallback) if fallback and value == 0 else value


OPTIMIZERS: Mapping[str, OptimizerSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            OptimizerSpec(
                name="adamw",
                label="AdamW",
                source="arXiv 1711.05101",
                settings=(LEARNING_RATE, WEIGHT_DECAY, "eps", "beta1", "beta2"),
                num_moments=2,
                step_copies=1,  # torch's foreach implementation holds the denominators
            ),
            OptimizerSpec(
                name="muon",
                label="Muon",
                source="Jordan 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon",
                settings=(LEARNING_RATE, WEIGHT_DECAY, "momentum"),
                num_moments=1,
                step_copies=2,  # the gradients looked ahead, and what they become
                kinds=("hidden",),
                only_matrices=True,
                rates_by_shape=True,
                step_flops=iteration_flops,
                gathered_bytes=16,  # gathered, stacked, and what the iteration holds
            ),
        )
    }
)
"""Optimizers by name."""

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe(name="adamw", label="AdamW", default="adamw"),
            Recipe(
                name="muon",
                label="Muon, and AdamW for all but hidden matrices",
                default="adamw",
                by_kind={"hidden": "muon"},
                renamed={
                    "adamw": {
                        LEARNING_RATE: "adamw_learning_rate",
                        WEIGHT_DECAY: "adamw_weight_decay",
                    }
                },
            ),
        )
    }
)
"""Recipes by the name that a plan gives."""

if TYPE_CHECKING:
    OptimizerName = str
    RecipeName = str
else:  # the registries' names are spelled out nowhere else
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    RecipeName = Literal[tuple(RECIPES)]


def has_hyperparameter(recipe: str, name: str) -> bool:
    """Return whether a hyperparameter has a meaning under a recipe: it sets something there, or no
    optimizer at all.
    """
    own = RECIPES[recipe].hyperparameters
    return name in own or not any(name in other.hyperparameters for other in RECIPES.values())


def list_recipes_with(name: str) -> list[str]:
    """Return the names of the recipes under which a hyperparameter has a meaning."""
    return [recipe for recipe in RECIPES if has_hyperparameter(recipe, name)]


def is_renamed(name: str) -> bool:
    """Return whether a hyperparameter sets, in some recipe, a setting of another name."""
    return any(name in recipe.renamed_hyperparameters for recipe in RECIPES.values())


def find_recipe(*, rates_by_shape: bool) -> Recipe:
    """Return the first recipe whose hidden matrices have rates that follow their shape, or have
    not.
    """
    return next(recipe for recipe in RECIPES.values() if recipe.rates_by_shape == rates_by_shape)


def optimizer_flops(recipe: str, shape: Shape) -> float:
    """Return the FLOPs that a recipe adds to every step of a model, whatever its batch.

    They are no part of a run's training FLOPs (`proxies.core.flops`). Times and hours count them.
    """
    chosen = RECIPES[recipe]
    return sum(
        chosen.optimizer_for(kind_of(name), size).step_flops(size)
        for name, size in parameter_shapes(shape).items()
    )
