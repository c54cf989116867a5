"""Train a user's model as a proxy: `[proxy] factory = "package.module:function"`.

The module is imported from the plan's folder or the installed packages, never from a study folder.
The model is compared with models of base shapes from the same factory. Its initial values are
scaled to the stds of the parametrization, and hooks apply the forward multipliers. At the base
shape it is exactly what the factory builds, value by value.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from forerun._proxies.core.canon import hash_file
from forerun._proxies.core.numbers import ForwardNumbers, ParameterNumbers
from forerun._proxies.core.programs import Factory, FactoryChangedError, FactoryError
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.external.construction import (
    Build,
    bind_values,
    compute_logits,
    construct,
    describe_error,
    takes_forward,
)
from forerun._proxies.external.description import describe_model, describe_outline
from forerun._proxies.parametrization.parametrization import compute_parameter_table

_loaded: dict[str, tuple[Path, str]] = {}
"""File of each imported user module, and the file's SHA-256 at import time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserModel:
    """A factory's model, initialized and hooked, with the numbers it is trained with."""

    module: nn.Module
    numbers: tuple[ParameterNumbers, ...]

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Return the logits [B * T, V] of token ids [B, T]."""
        return compute_logits(self.module, ids_BT).flatten(0, 1)


def build_model(spec: RunSpec, folder: Path) -> UserModel:
    """Build the model of a run by its factory.

    Args:
        spec: The run.
        folder: Folder that the factory's module is imported from.

    Raises:
        FactoryChangedError: The factory's source differs from the one that the run was made for.
        FactoryError: The model cannot be trained; lists every problem.
        ValueError: The run has no factory.
    """
    if spec.factory is None:
        raise ValueError(f"run {spec.id[:12]} names no factory")
    build = load_unchanged_factory(spec.factory, folder, spec.user_values)
    description = describe_model(build, spec)
    module = construct(build, spec.shape, description.forward, seed=spec.seed)
    module.to(torch.float64 if spec.numerics.dtype == "float64" else torch.float32).train()
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, factor in description.factors.items():
            if factor != 1:
                parameters[name].mul_(factor)
    hook_multipliers(module, description.forward, description.embeddings, description.readouts)
    return UserModel(module=module, numbers=description.numbers)


def hook_multipliers(
    module: nn.Module, forward: ForwardNumbers, embeddings: Sequence[str], readouts: Sequence[str]
) -> None:
    """Register hooks that apply the embedding and output multipliers.

    Args:
        module: The model.
        forward: The multipliers.
        embeddings: Paths of modules whose output the embedding multiplier scales.
        readouts: Paths of modules whose input the output multiplier scales.
    """
    for name in embeddings if forward.embedding != 1 else ():
        module.get_submodule(name).register_forward_hook(
            lambda module, inputs, output: output * forward.embedding
        )
    for name in readouts if forward.output != 1 else ():
        module.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs: (inputs[0] * forward.output, *inputs[1:])
        )


def get_parameter_numbers(spec: RunSpec, folder: Path) -> tuple[ParameterNumbers, ...]:
    """Return the numbers that the parameters of a run's model are trained with.

    Args:
        spec: The run, with or without a factory.
        folder: Folder that the factory's module is imported from.

    Raises:
        FactoryChangedError: The factory's source differs from the one that the run was made for.
        FactoryError: The model cannot be trained; lists every problem.
    """
    if spec.factory is None:
        return compute_parameter_table(spec)
    return describe_outline(
        load_unchanged_factory(spec.factory, folder, spec.user_values), spec
    ).numbers


def load_factory(
    target: str, folder: Path, values: Mapping[str, float | int | str] | None = None
) -> tuple[Build, Factory]:
    """Import a factory from a folder, or from the installed packages.

    Args:
        target: The factory, as `package.module:function`.
        folder: Folder to import from; it stays first on `sys.path`.
        values: Values of a plan's own axes, which the factory gets as keyword arguments.

    Returns:
        The function, and the record of the factory with the hash of its source.

    Raises:
        FactoryError: The module or function does not exist, the module cannot be imported, or the
            function does not take `(shape)` or `(shape, forward)` and these keywords.
        SpecError: The target does not have that form.
    """
    Factory(target=target, source_sha256="0" * 64)  # checks the form of the target
    name, _, function = target.partition(":")
    module = _import_module(target, name, folder.resolve())
    build = getattr(module, function, None)
    if module.__file__ is None or not callable(build):
        raise FactoryError(
            target, [f"{module.__file__ or folder / name} has no function {function}"]
        )
    build = bind_values(build, tuple((values or {}).items()))
    takes_forward(build)
    return build, Factory(target=target, source_sha256=_loaded[name][1])


def load_unchanged_factory(
    factory: Factory, folder: Path, values: Mapping[str, float | int | str]
) -> Build:
    """Load the factory of a run or a frozen config, and check that its source has not changed.

    Args:
        factory: Record of the factory.
        folder: Folder to import from.
        values: Values of a plan's own axes, which the factory gets as keyword arguments.

    Raises:
        FactoryChangedError: The source has changed.
        FactoryError: The factory cannot be loaded (`load_factory`).
    """
    build, current = load_factory(factory.target, folder, values)
    if current.source_sha256 != factory.source_sha256:
        raise FactoryChangedError(
            f"{factory.target} has changed: its source's sha256 was {factory.source_sha256[:12]} "
            f"and is {current.source_sha256[:12]}; a study trains one model only: restore the "
            "source, or start a new study"
        )
    return build


def _import_module(target: str, name: str, folder: Path) -> ModuleType:
    """Import a module, again if its file has changed since the last import.

    Raises:
        FactoryError: It cannot be imported, or an installed module has the same name.
    """
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    local = folder.joinpath(*name.split(".")).with_suffix(".py")
    _forget_changed(name, local)
    if name in _loaded and name in sys.modules:
        return sys.modules[name]
    # Write no `__pycache__` into the user's folder.
    dont_write_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        problem = (
            f"{name} cannot be imported from {folder} or what is installed: {describe_error(error)}"
        )
        raise FactoryError(target, [problem]) from error
    finally:
        sys.dont_write_bytecode = dont_write_bytecode
    file = Path(module.__file__ or local)
    if local.is_file() and file.resolve() != local.resolve():
        raise FactoryError(target, [f"{local} has the name of {file}: rename it"])
    if file.is_file():
        _loaded[name] = (file, hash_file(file))
    return module


def _forget_changed(name: str, local: Path) -> None:
    """Forget a module whose file has changed since its import, or that is from another folder."""
    if name not in _loaded:
        return
    file, sha256 = _loaded[name]
    if not file.is_file() or hash_file(file) != sha256 or (local.is_file() and local != file):
        package = name.partition(".")[0]
        names = [loaded for loaded in sys.modules if loaded.partition(".")[0] == package]
        for loaded in names:
            del sys.modules[loaded]
            _loaded.pop(loaded, None)
