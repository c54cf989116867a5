"""A user's own model as a proxy: `[proxy] factory = "package.module:function"`.

The module is imported from the plan's folder or the installed packages, never from a study folder.
What it builds is described against base shapes from the same factory, started by the
parametrization's law, and hooked for the forward multipliers; at the base shape it is what the
factory builds, value by value.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from proxies.core.canon import file_sha256
from proxies.core.numbers import ForwardNumbers, ParameterNumbers
from proxies.core.programs import Factory, FactoryChangedError, FactoryError
from proxies.core.spec import RunSpec
from proxies.external.construction import (
    Build,
    construct,
    logits_of,
    quoted,
    takes_forward,
    with_values,
)
from proxies.external.description import describe, outline_of
from proxies.parametrization.parametrization import parameter_table

_loaded: dict[str, tuple[Path, str]] = {}
"""Modules asked for here: their file, and its sha256 when they were imported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactoryModel:
    """A factory's model, initialised and hooked, with the numbers it is trained with."""

    module: nn.Module
    numbers: tuple[ParameterNumbers, ...]

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Logits [N, V] of token ids [B, T], N = B * T."""
        return logits_of(self.module, ids_BT).flatten(0, 1)


def build_model(spec: RunSpec, folder: Path) -> FactoryModel:
    """The model of a run, its factory found from `folder`.

    Raises:
        FactoryChangedError: the source is not the one the run names.
        FactoryError: everything that prevents training it.
        ValueError: the run names no factory.
    """
    if spec.factory is None:
        raise ValueError(f"run {spec.id[:12]} names no factory")
    build = checked_load(spec.factory, folder, spec.own_values)
    description = describe(build, spec)
    module = construct(build, spec.shape, description.forward, seed=spec.seed)
    module.to(torch.float64 if spec.numerics.dtype == "float64" else torch.float32).train()
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, factor in description.factors.items():
            if factor != 1:
                parameters[name].mul_(factor)
    hook_multipliers(module, description.forward, description.embeddings, description.readouts)
    return FactoryModel(module=module, numbers=description.numbers)


def hook_multipliers(
    module: nn.Module, forward: ForwardNumbers, embeddings: Sequence[str], readouts: Sequence[str]
) -> None:
    """Have the embedding multiplier scale what `embeddings` give, and the output multiplier what
    `readouts` get.
    """
    for name in embeddings if forward.embedding != 1 else ():
        module.get_submodule(name).register_forward_hook(_scale_output(forward.embedding))
    for name in readouts if forward.output != 1 else ():
        module.get_submodule(name).register_forward_pre_hook(_scale_input(forward.output))


def _scale_output(factor: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, inputs, output: output * factor


def _scale_input(factor: float) -> Callable[[nn.Module, Any], tuple[Any, ...]]:
    return lambda module, inputs: (inputs[0] * factor, *inputs[1:])


def numbers_of(spec: RunSpec, folder: Path) -> tuple[ParameterNumbers, ...]:
    """What the parameters of a run's model are trained with, ours or that of a factory found from
    `folder`.

    Raises:
        FactoryChangedError, FactoryError: as `build_model`.
    """
    if spec.factory is None:
        return parameter_table(spec)
    return outline_of(checked_load(spec.factory, folder, spec.own_values), spec).numbers


def load(
    target: str, folder: Path, values: Mapping[str, float | int | str] | None = None
) -> tuple[Build, Factory]:
    """Import `package.module:function` from `folder` (first on `sys.path` from now on) or what is
    installed.

    It gets `values`, those of a plan's own axes, as keywords.

    Raises:
        FactoryError: no such module or function, an error in it, or arguments other than `(shape)`
            and `(shape, forward)` and these keywords.
        SpecError: the target is not of that form.
    """
    Factory(target=target, source_sha256="0" * 64)  # the form of the target
    name, _, function = target.partition(":")
    module = _imported(target, name, folder.resolve())
    build = getattr(module, function, None)
    if module.__file__ is None or not callable(build):
        raise FactoryError(
            target, [f"{module.__file__ or folder / name} has no function {function}"]
        )
    build = with_values(build, tuple((values or {}).items()))
    takes_forward(build)
    return build, Factory(target=target, source_sha256=_loaded[name][1])


def checked_load(factory: Factory, folder: Path, values: Mapping[str, float | int | str]) -> Build:
    """The function of a run or a frozen config, which is what it was when that was named after it.

    Raises:
        FactoryChangedError: its source is another.
        FactoryError: as `load`.
    """
    build, found = load(factory.target, folder, values)
    if found.source_sha256 != factory.source_sha256:
        raise FactoryChangedError(
            f"{factory.target} has changed: its source's sha256 was {factory.source_sha256[:12]} "
            "and is "
            f"{found.source_sha256[:12]}; another model is another study: put the source back, or "
            "start a new one"
        )
    return build


def _imported(target: str, name: str, folder: Path) -> ModuleType:
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    local = folder.joinpath(*name.split(".")).with_suffix(".py")
    _forget_changed(name, local)
    if name in _loaded and name in sys.modules:
        return sys.modules[name]
    # the folder is the user's, and its files change
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        said = f"{name} cannot be imported from {folder} or what is installed: {quoted(error)}"
        raise FactoryError(target, [said]) from error
    finally:
        sys.dont_write_bytecode = before
    file = Path(module.__file__ or local)
    if local.is_file() and file.resolve() != local.resolve():
        raise FactoryError(target, [f"{local} has the name of {file}: rename it"])
    if file.is_file():
        _loaded[name] = (file, file_sha256(file))
    return module


def _forget_changed(name: str, local: Path) -> None:
    """Forget a module that was edited since it was imported, or that came from another plan's
    folder.
    """
    if name not in _loaded:
        return
    file, sha256 = _loaded[name]
    if not file.is_file() or file_sha256(file) != sha256 or (local.is_file() and local != file):
        top = name.partition(".")[0]
        for each in [each for each in sys.modules if each.partition(".")[0] == top]:
            del sys.modules[each]
            _loaded.pop(each, None)
