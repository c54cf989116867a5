"""The saved state of a run between two steps.

A state is one safetensors file with a JSON header, never a pickle. Its name is
`step-STEP-SHA256.safetensors`, with the hash of all its bytes. It is written under a temporary
name, synced and renamed, and the state before it is kept, so that there is a valid state at any
moment, also after a power failure. A state that is damaged or of another run is renamed, and the
state before it is used.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks, SpecError
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.training.run_progress import RunProgress, get_environment

SCHEMA_VERSION = 1
NUM_KEPT = 2
_NAME = re.compile(r"step-(\d{8})-([0-9a-f]{64})\.safetensors")
"""Name of a state, as `save_state` writes it: eight digits of the step, so that names sort by step,
and the hash."""
_ASIDE = ".aside"
"""End of the name of a state that is not used."""
_LOSSES, _NORMS = "loss_nats", "grad_norm"
"""Names of the tensors with the logged losses and gradient norms."""


class StateError(InputError):
    """A state cannot be written, or a run cannot resume from it. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The header of a state."""

    schema_version: int
    run_id: str
    """Content id of the run's `RunSpec`, including its numerics."""
    step: int
    """Number of optimizer steps done."""
    seconds: float
    num_microbatches: int
    """Maximum number of passes that a batch was split into so far."""
    environment: dict[str, str]
    """Everything except the spec that arithmetic depends on
    (`forerun._proxies.training.run_progress.get_environment`)."""
    trunk_steps: int = field(default=0, metadata=canon.UNLESS_DEFAULT)
    """Number of these steps that a shorter run of the same trunk has made."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("schema_version", "num_microbatches")
        checks.require_whole("step", "trunk_steps", least=0)
        checks.require_number("seconds", least=0)
        checks.raise_problems()


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState:
    """The state of a run, which determines the rest of it together with its spec and the data."""

    header: Header
    tensors: dict[str, Tensor]
    """Tensors on the CPU by name: those of the engine, and the logged `loss_nats` and `grad_norm`,
    [step] each."""


def capture_state(
    run: RunProgress, device: torch.device, tensors: Mapping[str, Tensor]
) -> SlotState:
    """Return the state of a run.

    Args:
        run: Progress of the run.
        device: Device of its engine.
        tensors: Tensors of the engine, which are copied.
    """
    header = Header(
        schema_version=SCHEMA_VERSION,
        run_id=run.spec.id,
        step=run.step,
        seconds=run.seconds,
        num_microbatches=run.num_microbatches,
        environment=get_environment(device),
        trunk_steps=run.trunk_steps,
    )
    logged = {_LOSSES: run.losses_nats, _NORMS: run.grad_norms}
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in logged.items()}
    copies = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    return SlotState(header=header, tensors={**copies, **columns})


def to_trunk_state(state: SlotState, trunk: str) -> SlotState:
    """Return the state of a run before its decay as a state of its trunk, the part of its training
    that runs of other durations share (`forerun._proxies.core.branches`).
    """
    return replace(state, header=replace(state.header, run_id=trunk, trunk_steps=0))


def to_branch_state(state: SlotState, run_id: str) -> SlotState:
    """Return the state of a trunk as a state of a run that continues it.

    The time until then does not count as time of the run.
    """
    header = replace(state.header, run_id=run_id, trunk_steps=state.header.step, seconds=0.0)
    return replace(state, header=header)


def resume_progress(
    spec: RunSpec, state: SlotState, like: Mapping[str, Tensor], num_microbatches: int
) -> RunProgress:
    """Return the progress of a run at a saved state.

    Args:
        spec: The run.
        state: State of that run.
        like: Tensors with the names, shapes and dtypes that the engine expects, without the logged
            tensors.
        num_microbatches: Minimum number of passes that each batch is split into from now on.

    Raises:
        StateError: The tensors are not those of this run, or the run was at its end.
    """
    header, logged = state.header, torch.zeros(state.header.step, dtype=torch.float64)
    expected = {**like, _LOSSES: logged, _NORMS: logged}
    mismatches = [
        name
        for name in sorted(expected.keys() | state.tensors.keys())
        if name not in expected
        or name not in state.tensors
        or (expected[name].shape, expected[name].dtype)
        != (state.tensors[name].shape, state.tensors[name].dtype)
    ]
    if mismatches:
        raise StateError(f"it differs from the run in the tensors {', '.join(mismatches)}")
    if header.step >= spec.schedule.num_steps:
        raise StateError(f"it is at step {header.step}, and the run has {spec.schedule.num_steps}")
    return RunProgress(
        spec,
        step=header.step,
        seconds=header.seconds,
        num_microbatches=max(num_microbatches, header.num_microbatches),
        trunk_steps=header.trunk_steps,
        losses_nats=state.tensors[_LOSSES].tolist(),
        grad_norms=state.tensors[_NORMS].tolist(),
    )


def save_state(folder: Path, state: SlotState) -> Path:
    """Write a state into a folder, durably, then delete all but the newest `NUM_KEPT`.

    Returns:
        The path of the new file.

    Raises:
        StateError: The state cannot be written, for example for lack of space; the states before it
            are kept.
    """
    # Two workers may have attempts at one run, so the temporary name has the host and the process.
    scratch = folder / f"{socket.gethostname()}-{os.getpid()}.part"
    try:
        canon.make_folder(folder)
        safetensors.torch.save_file(
            state.tensors, scratch, {"header": canon.to_canonical_json(state.header)}
        )
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        path = folder / f"step-{state.header.step:08d}-{canon.hash_file(scratch)}.safetensors"
        scratch.replace(path)
        canon.sync_folder(folder)
        for old in _list_newest_first(folder)[NUM_KEPT:]:
            old.unlink(missing_ok=True)
    except (OSError, safetensors.SafetensorError) as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise StateError(f"no checkpoint could be written in {folder} ({error})") from error
    return path


def load_newest_state(
    folder: Path,
    run_id: str,
    current: Mapping[str, str],
    notes: list[str],
    most_steps: float = math.inf,
) -> SlotState | None:
    """Return the newest valid state of a run; None if there is none.

    A state that is not valid is renamed, so that it is not used again.

    Args:
        folder: Folder with the states of the run.
        run_id: Id of the run.
        current: Current environment. A state of another environment is not valid, because the run
            would not continue bitwise equal.
        notes: List to which sentences for the user are added.
        most_steps: Maximum number of steps of the state; states after more are ignored.
    """
    for path in _list_newest_first(folder):
        if int(path.name.split("-")[1]) > most_steps:
            continue
        try:
            return _read_verified(path, run_id, current)
        except (
            OSError,
            safetensors.SafetensorError,
            canon.CanonError,
            SpecError,
            StateError,
        ) as error:
            _put_aside(path, str(error), notes)
    return None


def discard_newest_state(folder: Path, why: str, notes: list[str]) -> None:
    """Rename the newest state, which the run could not resume from, so that it is not used again.

    Args:
        folder: Folder with the states of the run.
        why: Reason, for the user.
        notes: List to which a sentence for the user is added.
    """
    _put_aside(_list_newest_first(folder)[0], why, notes)


def _put_aside(path: Path, why: str, notes: list[str]) -> None:
    """Rename a state; the file is deleted with its folder when the run has its result."""
    # The beginning of the name has the step and eight digits of the hash
    notes.append(f"checkpoint {path.name[:22]} of run {path.parent.name[:12]} is not used: {why}")
    # Another worker with an attempt at the same run may have removed it.
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_name(path.name + _ASIDE))


def _list_newest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _read_verified(path: Path, run_id: str, current: Mapping[str, str]) -> SlotState:
    """Read a state, and check that it is of a run and an environment.

    Raises:
        StateError: The state is damaged, or of another schema, run or environment.
        OSError, SafetensorError, CanonError, SpecError: The file cannot be read or parsed.
    """
    if path.name.rpartition("-")[2].partition(".")[0] != canon.hash_file(path):
        raise StateError("it is damaged: its bytes do not match its hash")
    with safetensors.safe_open(path, framework="pt") as file:
        header = canon.decode(Header, canon.parse((file.metadata() or {}).get("header", "null")))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if header.schema_version != SCHEMA_VERSION:
        raise StateError(
            f"it has schema {header.schema_version}, this version reads {SCHEMA_VERSION}"
        )
    if header.run_id != run_id:
        raise StateError(f"it belongs to run {header.run_id[:12]}")
    if differences := [
        f"{key} {header.environment.get(key)}"
        for key in current
        if current[key] != header.environment.get(key)
    ]:
        raise StateError(f"it was written under {', '.join(differences)}")
    return SlotState(header=header, tensors=tensors)
