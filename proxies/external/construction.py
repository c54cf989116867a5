"""Call a user's model factory, measure its initial values, and report what went wrong.

A factory is `build(shape) -> nn.Module`, or `build(shape, forward)` if it applies the attention
scale and the residual multiplier of `forward` itself. The module takes ids [B, T] (int64) and
returns logits [B, T, V], or an object with `.logits`.

A factory draws its weights with initial stds of its own choice: 0.02, 1 / sqrt(fan-in), and so on.
At the base shape these values are kept. At another shape, each tensor must have the initial std
that the parametrization gives: the factory's std at the base shape, times the parametrization's
factor between the shapes. So this module measures the stds of the factory's models at both shapes.
The tensor is then multiplied by the required std divided by the measured std.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from forerun._proxies.core.canon import PACKAGE_DIR
from forerun._proxies.core.notation import add_article, format_counted
from forerun._proxies.core.numbers import ForwardNumbers
from forerun._proxies.core.programs import FactoryError
from forerun._proxies.core.shape import Shape

# ---- Initial values ----

MIN_SAMPLES = 50_000
"""Minimum number of elements from which a std is measured. Its relative standard error is then at
most 1 / sqrt(2 * MIN_SAMPLES), about 0.3 %."""
MAX_BUILDS = 64
"""Maximum number of models that are built to collect the elements."""
MAX_ELEMENTS = 2 * 10**8
"""Number of drawn elements after which no further model of a shape is built, so that a large model
is built once."""


@dataclass(slots=True)
class InitialSpread:
    """The mean, spread, and bounds of the initial values of a group of parameters.

    Only sums over the values are kept, not the values.
    """

    total: float = 0.0
    squares: float = 0.0
    num_elements: int = 0
    min_value: float = math.inf
    max_value: float = -math.inf

    def add(self, parameter: nn.Parameter) -> None:
        """Add the values of a parameter."""
        values = parameter.detach().double()
        self.total += values.sum().item()
        self.squares += values.square().sum().item()
        self.num_elements += values.numel()
        self.min_value = min(self.min_value, values.min().item())
        self.max_value = max(self.max_value, values.max().item())

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.total / self.num_elements

    @property
    def std(self) -> float:
        """Standard deviation; 0 if all values are equal."""
        if self.is_constant:
            return 0.0
        return math.sqrt(max(0.0, self.squares / self.num_elements - self.mean * self.mean))

    @property
    def is_constant(self) -> bool:
        """Whether all values are equal."""
        return self.min_value == self.max_value

    @property
    def is_random(self) -> bool:
        """Whether the values are drawn around zero.

        Only such values are scaled; values that are drawn around one are kept.
        """
        return not self.is_constant and self.std > abs(self.mean)


def find_block_prefixes(module: nn.Module, num_layers: int) -> frozenset[str]:
    """Return the paths of the lists of blocks, each with its last dot, such as `layers.`.

    A list of blocks is an `nn.ModuleList`, or any module whose children with parameters are
    numbered from 0 to `num_layers` - 1.
    """
    members: dict[str, set[str]] = {}
    for name, _ in module.named_parameters():
        if (prefix := _find_prefix(name)) is not None:
            members.setdefault(prefix, set()).add(name[len(prefix) :].split(".")[0])
    layers = {str(i) for i in range(num_layers)}
    modules = dict(module.named_modules())
    module_lists = {
        prefix for prefix in members if isinstance(modules.get(prefix.rstrip(".")), nn.ModuleList)
    }
    numbered = {prefix for prefix, children in members.items() if children == layers}
    return frozenset(module_lists | numbered)


def _find_prefix(name: str) -> str | None:
    """Return the path before the first number in a name, with its last dot; None without one."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if first is None else "".join(f"{part}." for part in parts[:first])


def get_group_name(name: str, blocks: frozenset[str]) -> str:
    """Return the name that a parameter has in all blocks, such as `layers.*.attention.wq.weight`.

    Args:
        name: Name of the parameter.
        blocks: Paths of the lists of blocks.
    """
    prefix = _find_prefix(name)
    if prefix is None or prefix not in blocks:
        return name
    return f"{prefix}*.{name[len(prefix) :].partition('.')[2]}"


@lru_cache(maxsize=32)
def measure_spreads(build: Build, shape: Shape) -> Mapping[str, InitialSpread]:
    """Measure the spread of the initial values of every group of parameters.

    Models are built with the seeds 0, 1, and so on, until every group has enough elements.

    Raises:
        FactoryError: The factory fails.
    """
    groups: dict[str, InitialSpread] = {}
    num_drawn = 0
    for seed in range(MAX_BUILDS):
        module = construct(build, shape, seed=seed)
        blocks = find_block_prefixes(module, shape.num_layers)
        for name, parameter in module.named_parameters():
            if parameter.numel():
                groups.setdefault(get_group_name(name, blocks), InitialSpread()).add(parameter)
                num_drawn += parameter.numel()
        # Constants need no further samples.
        min_elements = min(
            (group.num_elements for group in groups.values() if not group.is_constant),
            default=MIN_SAMPLES,
        )
        if min_elements >= MIN_SAMPLES or num_drawn > MAX_ELEMENTS:
            break
    return groups


# ---- Construction ----

Build = Callable[..., nn.Module]
"""A model factory."""


def get_neutral_multipliers(shape: Shape) -> ForwardNumbers:
    """Return the forward multipliers of an ordinary model.

    The attention scale is 1 / sqrt(head_dim), all other multipliers are 1.
    """
    return ForwardNumbers(
        embedding=1.0, attention=1 / math.sqrt(shape.head_dim), residual=1.0, output=1.0
    )


def get_factory_name(build: Build) -> str:
    """Return the name of a factory for messages, `module:function`."""
    return f"{getattr(build, '__module__', '?')}:{getattr(build, '__qualname__', repr(build))}"


@lru_cache(maxsize=32)
def bind_values(build: Build, values: tuple[tuple[str, float | int | str], ...]) -> Build:
    """Bind the values that a plan declares for the user's own code to a factory, as keyword
    arguments.

    Equal values give the same object, so that caches by factory work.
    """
    bound: Any = partial(build, **dict(values))
    bound.__module__ = build.__module__
    bound.__qualname__ = get_factory_name(build).partition(":")[2]
    return cast(Build, bound) if values else build


_SIGNATURE = "must be build(shape) or build(shape, forward), with the plan's own axes as keywords"


def takes_forward(build: Build) -> bool:
    """Return whether a factory takes the forward multipliers.

    Raises:
        FactoryError: It takes neither `(shape)` nor `(shape, forward)`.
    """
    try:
        keywords = build.keywords if isinstance(build, partial) else {}
        signature = inspect.signature(build.func if isinstance(build, partial) else build)
        has_forward = "forward" in signature.parameters
        signature.bind(None, **keywords, **({"forward": None} if has_forward else {}))
    except (TypeError, ValueError) as error:
        raise FactoryError(get_factory_name(build), [f"{_SIGNATURE}: {error}"]) from None
    return has_forward


def construct(
    build: Build,
    shape: Shape,
    forward: ForwardNumbers | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
) -> nn.Module:
    """Build the factory's model of a shape, without changing the state of torch's generator.

    The factory never gets the embedding and output multipliers: hooks apply them.

    Args:
        build: The factory.
        shape: Shape of the model.
        forward: Attention scale and residual multiplier; None for those of an ordinary model.
        seed: Seed of torch's generator on the CPU.
        device: Default device of torch while the factory runs.

    Raises:
        FactoryError: The factory has the wrong signature, raises an error, or does not return a
            module.
    """
    target, keywords = get_factory_name(build), {}
    if takes_forward(build):
        keywords["forward"] = dataclasses.replace(
            forward or get_neutral_multipliers(shape), embedding=1.0, output=1.0
        )
    # What the factory prints must not reach standard output: with `--json` it is one JSON object.
    quiet = contextlib.redirect_stdout(sys.stderr)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device), quiet:
            torch.default_generator.manual_seed(seed)
            module = build(shape, **keywords)
    except (Exception, SystemExit) as error:
        problem = (
            f"fails at width {shape.width} with {format_counted(shape.num_layers, 'layer')}: "
            f"{describe_error(error)}"
        )
        raise FactoryError(target, [problem]) from error
    if not isinstance(module, nn.Module):
        problem = (
            f"returns {add_article(type(module).__name__)} at width {shape.width}: must be a "
            "torch.nn.Module"
        )
        raise FactoryError(target, [problem])
    return module


def construct_on_meta(
    build: Build, shape: Shape, forward: ForwardNumbers | None = None
) -> nn.Module:
    """Build the model on the meta device, without its values; on the CPU if that fails."""
    try:
        return construct(build, shape, forward, device="meta")
    except FactoryError:
        return construct(build, shape, forward)


def compute_logits(module: nn.Module, ids_BT: Tensor) -> Tensor:
    """Return the logits of token ids: what the module returns, or its `.logits`.

    Args:
        module: The user's model.
        ids_BT: Token ids, [B, T].

    Returns:
        Logits, [B, T, V].
    """
    output: Any = module(ids_BT)
    logits_BTV: Tensor = getattr(output, "logits", output)
    return logits_BTV


def describe_error(error: BaseException) -> str:
    """Describe an error, with the innermost line of the user's code that it came from."""
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return (
            f"{Path(error.filename or '?').name}, line {error.lineno}: "
            f"`{(error.text or '').strip()}`: {message}"
        )
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_installed = bool({"site-packages", "importlib"} & {*path.parts})
        if path.is_file() and not path.is_relative_to(PACKAGE_DIR) and not is_installed:
            return f"{path.name}, line {frame.lineno}: `{frame.line}`: {message}"
    return message
