"""Registries of optimizers, and of recipes, which assign optimizers to kinds of parameters.

A new optimizer needs an entry of `OPTIMIZERS`, an entry of `RECIPES`, its update in
`forerun._proxies.model`, and its line in `forerun._proxies.model.optimizer`. Plans, searches,
frozen configs, explanations, and estimates read both registries. An exporter refuses an optimizer
that it does not list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, Hparams
from forerun._proxies.core.muon import compute_iteration_flops
from forerun._proxies.core.numbers import KINDS, Kind, get_kind
from forerun._proxies.core.shape import Shape, list_parameter_shapes

WEIGHT_DECAY = "weight_decay"
"""Setting that every optimizer has: a step multiplies a weight by 1 - lr * weight_decay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """Description of an optimizer, without its update."""

    name: str
    """Name in frozen configs and exports."""
    label: str
    """Name in sentences."""
    source: str
    """Paper or page that defines it."""
    settings: tuple[str, ...]
    """Names of its settings, learning rate and weight decay among them; each is a key of
    `forerun._proxies.core.hyperparameters.HYPERPARAMETERS`."""
    num_moments: int
    """Numbers that it keeps for each weight from step to step."""
    step_copies: int
    """Copies of the weights that a step needs, in addition to weights, gradients, and moments."""
    kinds: tuple[Kind, ...] = KINDS
    """Kinds of parameters that it may step."""
    only_matrices: bool = False
    """Whether it may step parameters of two dimensions only."""
    rates_by_shape: bool = False
    """Whether the learning rate of a matrix follows its shape
    (`forerun._proxies.core.muon.MuonRate`).
    """
    step_flops: Callable[[tuple[int, ...]], float] = lambda size: 0.0
    """Function from a parameter's size to the FLOPs that the optimizer adds to every step."""
    gathered_bytes: int = 0
    """Memory in bytes per weight for the whole matrix that a rank gathers before it updates it; 0
    if ranks gather no matrices."""

    def can_step(self, kind: Kind, size: tuple[int, ...] | None = None) -> bool:
        """Return whether it may step parameters of a kind, and of a size if one is given."""
        return kind in self.kinds and (size is None or not self.only_matrices or len(size) == 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """An assignment of optimizers to kinds of parameters; a plan names it in `proxy.optimizer`."""

    name: str
    label: str
    """Name in sentences."""
    default: str
    """Name of the optimizer of all parameters that have no other."""
    by_kind: Mapping[Kind, str] = field(default_factory=dict)
    """Names of optimizers by kind of parameter. A parameter that its optimizer cannot step gets the
    default optimizer."""
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Names of hyperparameters that are not called like the setting that they set, by optimizer and
    setting."""

    def get_optimizer(self, kind: Kind, size: tuple[int, ...] | None = None) -> OptimizerSpec:
        """Return the optimizer of a parameter, by its kind and, if known, its size."""
        chosen = OPTIMIZERS[self.by_kind.get(kind, self.default)]
        return chosen if chosen.can_step(kind, size) else OPTIMIZERS[self.default]

    @property
    def optimizers(self) -> tuple[OptimizerSpec, ...]:
        """Optimizers of the recipe. The first is the main optimizer: the default only if there is
        no other.
        """
        return tuple(
            OPTIMIZERS[name] for name in dict.fromkeys((*self.by_kind.values(), self.default))
        )

    @property
    def main(self) -> OptimizerSpec:
        """Optimizer of the hidden matrices, whose learning rate a study searches."""
        return self.optimizers[0]

    @property
    def rates_by_shape(self) -> bool:
        """Whether the learning rates of hidden matrices depend on their shape."""
        return self.main.rates_by_shape

    def get_hyperparameter_name(self, optimizer: str, setting: str) -> str:
        """Return the name of the hyperparameter that sets an optimizer's setting."""
        return self.renamed.get(optimizer, {}).get(setting, setting)

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Names of the hyperparameters that set its optimizers, the main optimizer's first."""
        names = (
            self.get_hyperparameter_name(spec.name, name)
            for spec in self.optimizers
            for name in spec.settings
        )
        return tuple(dict.fromkeys(names))

    @property
    def renamed_hyperparameters(self) -> dict[str, str]:
        """Settings by the hyperparameter that sets them, if the two have different names."""
        return {
            name: setting
            for by_setting in self.renamed.values()
            for setting, name in by_setting.items()
        }

    def get_base_value(self, hparams: Hparams, optimizer: str, setting: str) -> float:
        """Return the value of an optimizer's setting at the base shape."""
        name = self.get_hyperparameter_name(optimizer, setting)
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
                step_copies=1,  # the denominators of torch's foreach implementation
            ),
            OptimizerSpec(
                name="muon",
                label="Muon",
                source="Jordan 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon",
                settings=(LEARNING_RATE, WEIGHT_DECAY, "momentum"),
                num_moments=1,
                step_copies=2,  # Nesterov momentum, and the orthogonal matrices
                kinds=("hidden",),
                only_matrices=True,
                rates_by_shape=True,
                step_flops=compute_iteration_flops,
                gathered_bytes=16,  # gathered matrix, its stacked copy, and the iteration's buffers
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
else:  # literals of the registered names, which plans and records are checked against
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    RecipeName = Literal[tuple(RECIPES)]


def has_hyperparameter(recipe: str, name: str) -> bool:
    """Return whether a hyperparameter has a meaning under a recipe.

    This is true if it sets an optimizer of this recipe, or if it sets no optimizer of any recipe.
    """
    if name in RECIPES[recipe].hyperparameters:
        return True
    return not any(name in chosen.hyperparameters for chosen in RECIPES.values())


def list_recipes_with(name: str) -> list[str]:
    """Return the names of the recipes under which a hyperparameter has a meaning."""
    return [recipe for recipe in RECIPES if has_hyperparameter(recipe, name)]


def has_renamed_setting(name: str) -> bool:
    """Return whether the name of a hyperparameter differs from that of the setting that it sets.

    For example, `adamw_learning_rate` sets AdamW's `learning_rate` in the recipe `muon`.
    """
    return any(name in recipe.renamed_hyperparameters for recipe in RECIPES.values())


def find_recipe(*, rates_by_shape: bool) -> Recipe:
    """Return the first recipe that has this value of `rates_by_shape`."""
    return next(recipe for recipe in RECIPES.values() if recipe.rates_by_shape == rates_by_shape)


def compute_optimizer_flops(recipe: str, shape: Shape) -> float:
    """Return the FLOPs that a recipe adds to every step of a model, at any batch size.

    A run's training FLOPs (`forerun._proxies.core.flops`) do not include them; estimates of time
    do.
    """
    chosen = RECIPES[recipe]
    return sum(
        chosen.get_optimizer(get_kind(name), size).step_flops(size)
        for name, size in list_parameter_shapes(shape).items()
    )
