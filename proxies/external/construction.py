"""Call a user's model factory, measure its initial values, and report what went wrong.

A factory is `build(shape) -> nn.Module`, or `build(shape, forward)` if it applies the attention
scale and the residual multiplier of `forward` itself. The module takes ids [B, T] (int64) and
returns logits [B, T, V], or an object with `.logits`.

A factory draws its weights by its own law: a constant std of 0.02, 1 / sqrt(fan-in), and so on. At
the base shape these values are kept. At another shape, a tensor is multiplied by the ratio of
initial stds, this shape over the base shape, that the parametrization wants, divided by the ratio
that the factory gives. So the stds that the factory gives are measured here.
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

from proxies.core.notation import counted, with_article
from proxies.core.numbers import ForwardNumbers
from proxies.core.programs import FactoryError
from proxies.core.shape import Shape

# ---- Initial values ----

MIN_SAMPLES = 50_000
"""Number of elements that a std is measured from. The standard error of the std is then 0.3 %, that
of a ratio of two stds 0.45 %."""
MAX_BUILDS = 64
MAX_ELEMENTS = 2 * 10**8
"""Number of drawn elements per shape after which no further model is built: a large model is built
once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The distribution of the initial values of a group of parameters."""

    mean: float
    std: float
    """Standard deviation; 0 if all values are equal."""
    constant: bool
    """Whether all values are equal."""

    @property
    def random(self) -> bool:
        """Whether the values are drawn around zero.

        Only such values are scaled; values that are drawn around one are kept.
        """
        return not self.constant and self.std > abs(self.mean)


@dataclass(slots=True)
class _Moments:
    """The sums from which the spread of a group of parameters is computed."""

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

    def compute_spread(self) -> Spread:
        """Return the spread of all values that were added."""
        mean = self.total / self.num_elements
        if self.min_value == self.max_value:
            return Spread(mean=mean, std=0.0, constant=True)
        variance = max(0.0, self.squares / self.num_elements - mean * mean)
        return Spread(mean=mean, std=math.sqrt(variance), constant=False)


def block_prefixes(module: nn.Module, num_layers: int) -> frozenset[str]:
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


def group_of(name: str, blocks: frozenset[str]) -> str:
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
def spreads(build: Build, shape: Shape) -> Mapping[str, Spread]:
    """Measure the spread of the initial values of every group of parameters.

    Models are built with the seeds 0, 1, and so on, until every group has enough elements.

    Raises:
        FactoryError: The factory fails.
    """
    moments: dict[str, _Moments] = {}
    num_drawn = 0
    for seed in range(MAX_BUILDS):
        module = construct(build, shape, seed=seed)
        blocks = block_prefixes(module, shape.num_layers)
        for name, parameter in module.named_parameters():
            if parameter.numel():
                moments.setdefault(group_of(name, blocks), _Moments()).add(parameter)
                num_drawn += parameter.numel()
        # Constants need no further samples.
        varied = [group for group in moments.values() if group.min_value < group.max_value]
        min_elements = min((group.num_elements for group in varied), default=MIN_SAMPLES)
        if min_elements >= MIN_SAMPLES or num_drawn > MAX_ELEMENTS:
            break
    return {name: group.compute_spread() for name, group in moments.items()}


# ---- Construction ----

Build = Callable[..., nn.Module]
"""A model factory."""


def neutral(shape: Shape) -> ForwardNumbers:
    """Return the forward multipliers of an ordinary model.

    The attention scale is 1 / sqrt(head_dim), all other multipliers are 1.
    """
    return ForwardNumbers(
        embedding=1.0, attention=1 / math.sqrt(shape.head_dim), residual=1.0, output=1.0
    )


def name_of(build: Build) -> str:
    """Return the name of a factory for messages, `module:function`."""
    return f"{getattr(build, '__module__', '?')}:{getattr(build, '__qualname__', repr(build))}"


@lru_cache(maxsize=32)
def with_values(build: Build, values: tuple[tuple[str, float | int | str], ...]) -> Build:
    """Bind the values of a plan's own axes to a factory as keyword arguments.

    Equal values give the same object, so that caches by factory work.
    """
    bound: Any = partial(build, **dict(values))
    bound.__module__, bound.__qualname__ = build.__module__, name_of(build).partition(":")[2]
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
        raise FactoryError(name_of(build), [f"{_SIGNATURE}: {error}"]) from None
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
    target, keywords = name_of(build), {}
    if takes_forward(build):
        keywords["forward"] = dataclasses.replace(
            forward or neutral(shape), embedding=1.0, output=1.0
        )
    # What the factory prints must not reach standard output: with `--json` it is one JSON object.
    quiet = contextlib.redirect_stdout(sys.stderr)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device), quiet:
            torch.default_generator.manual_seed(seed)
            module = build(shape, **keywords)
    except (Exception, SystemExit) as error:
        problem = (
            f"fails at width {shape.width} with {counted(shape.num_layers, 'layer')}: "
            f"{quoted(error)}"
        )
        raise FactoryError(target, [problem]) from error
    if not isinstance(module, nn.Module):
        problem = (
            f"returns {with_article(type(module).__name__)} at width {shape.width}: must be a "
            "torch.nn.Module"
        )
        raise FactoryError(target, [problem])
    return module


def outline(build: Build, shape: Shape, forward: ForwardNumbers | None = None) -> nn.Module:
    """Build the model on the meta device, without its values; on the CPU if that fails."""
    try:
        return construct(build, shape, forward, device="meta")
    except FactoryError:
        return construct(build, shape, forward)


def logits_of(module: nn.Module, ids_BT: Tensor) -> Tensor:
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


def quoted(error: BaseException) -> str:
    """Describe an error, with the innermost line of the user's code that it came from."""
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return (
            f"{Path(error.filename or '?').name}, line {error.lineno}: "
            f"`{(error.text or '').strip()}`: {message}"
        )
    package_folder = Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_installed = bool({"site-packages", "importlib"} & {*path.parts})
        if path.is_file() and not path.is_relative_to(package_folder) and not is_installed:
            return f"{path.name}, line {frame.lineno}: `{frame.line}`: {message}"
    return message
