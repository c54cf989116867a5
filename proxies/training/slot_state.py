"""The state of a run between two steps, as one file: whole and of this very run, or refused. Never
pickled.

A file is safetensors with a JSON header, named `step-STEP-SHA256.safetensors` after the hash of all
its bytes. It is written beside, synced and renamed, and the one before it is kept: at every moment
the newest good one is there, also after a power cut. What is not good is put aside under another
name, and the one before it is used.
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

from proxies.core import canon
from proxies.core.checks import Checks, SpecError
from proxies.core.errors import InputError
from proxies.core.spec import RunSpec
from proxies.training.outcome import RunProgress, environment

SCHEMA_VERSION = 1
NUM_KEPT = 2
_NAME = re.compile(r"step-(\d{8})-([0-9a-f]{64})\.safetensors")
_ASIDE = ".aside"
_LOSSES, _NORMS = "loss_nats", "grad_norm"


class StateError(InputError):
    """A state that cannot be written, or that a run cannot resume from. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a state says of itself."""

    schema_version: int
    run_id: str
    """Content id of its `RunSpec`, numerics included."""
    step: int
    """Optimizer steps done."""
    seconds: float
    num_microbatches: int
    """The most passes that any batch so far was split into."""
    environment: dict[str, str]
    """What arithmetic depends on besides the spec (`proxies.training.outcome.environment`)."""
    trunk_steps: int = field(default=0, metadata=canon.UNLESS_DEFAULT)
    """Of the steps, how many a shorter run of its trunk has made."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("schema_version", "num_microbatches")
        checks.whole("step", "trunk_steps", least=0)
        checks.number("seconds", least=0)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState:
    """Everything that the rest of a run follows from, besides its spec and the data."""

    header: Header
    tensors: dict[str, Tensor]
    """On the CPU: the engine's own by name, and what was logged, [step] each: `loss_nats` and
    `grad_norm`."""


def captured(run: RunProgress, device: torch.device, tensors: Mapping[str, Tensor]) -> SlotState:
    """The state of `run`, whose engine on `device` adds its own `tensors`; all are copied."""
    header = Header(
        schema_version=SCHEMA_VERSION,
        run_id=run.spec.id,
        step=run.step,
        seconds=run.seconds,
        num_microbatches=run.num_microbatches,
        environment=environment(device),
        trunk_steps=run.trunk_steps,
    )
    logged = {_LOSSES: run.losses_nats, _NORMS: run.grad_norms}
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in logged.items()}
    copies = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    return SlotState(header=header, tensors={**copies, **columns})


def of_trunk(state: SlotState, trunk: str) -> SlotState:
    """The state of a run before its decay, as that of its trunk."""
    return replace(state, header=replace(state.header, run_id=trunk, trunk_steps=0))


def of_branch(state: SlotState, run_id: str) -> SlotState:
    """The state of a trunk, as that of a run that goes on from it: the time until there is not its
    own.
    """
    header = replace(state.header, run_id=run_id, trunk_steps=state.header.step, seconds=0.0)
    return replace(state, header=header)


def resumed(
    spec: RunSpec, state: SlotState, like: Mapping[str, Tensor], num_microbatches: int
) -> RunProgress:
    """The progress to go on from.

    Args:
        spec: the run.
        state: of that run.
        like: tensors with the names, shapes and dtypes that the engine expects beside what was
            logged.
        num_microbatches: passes that each batch is split into from now on, at least.

    Raises:
        StateError: the tensors are not those of this run.
    """
    header, logged = state.header, torch.zeros(state.header.step, dtype=torch.float64)
    expected = {**like, _LOSSES: logged, _NORMS: logged}
    unlike = [
        name
        for name in sorted(expected.keys() | state.tensors.keys())
        if name not in expected
        or name not in state.tensors
        or (expected[name].shape, expected[name].dtype)
        != (state.tensors[name].shape, state.tensors[name].dtype)
    ]
    if unlike or header.step >= spec.schedule.num_steps:
        raise StateError(
            f"step {header.step} of {spec.schedule.num_steps}: unlike the run in "
            f"{', '.join(unlike)}"
        )
    return RunProgress(
        spec,
        step=header.step,
        seconds=header.seconds,
        num_microbatches=max(num_microbatches, header.num_microbatches),
        trunk_steps=header.trunk_steps,
        losses_nats=state.tensors[_LOSSES].tolist(),
        grad_norms=state.tensors[_NORMS].tolist(),
    )


def store(folder: Path, state: SlotState) -> Path:
    """Write `state` into `folder`, durably, then delete all but the newest `NUM_KEPT`.

    Raises:
        StateError: it does not fit, or cannot be written; the states before it are untouched.
    """
    # two workers may hold attempts of one run
    scratch = folder / f"{socket.gethostname()}-{os.getpid()}.part"
    try:
        canon.make_folder(folder)
        safetensors.torch.save_file(
            state.tensors, scratch, {"header": canon.canonical(state.header)}
        )
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        path = folder / f"step-{state.header.step:08d}-{canon.file_sha256(scratch)}.safetensors"
        scratch.replace(path)
        canon.sync_folder(folder)
        for old in _newest_first(folder)[NUM_KEPT:]:
            old.unlink(missing_ok=True)
    except (OSError, safetensors.SafetensorError) as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise StateError(f"no checkpoint could be written in {folder} ({error})") from error
    return path


def newest(
    folder: Path,
    run_id: str,
    found: Mapping[str, str],
    notes: list[str],
    most_steps: float = math.inf,
) -> SlotState | None:
    """The newest good state of a run, or None: it starts over. A bad one is put aside, with a note
    in `notes`.

    Args:
        folder: where the states of the run lie.
        run_id: the run's.
        found: the environment that it would go on in; a state of another one is not bitwise its
            own.
        notes: sentences for the user are added here.
        most_steps: a state after more is passed over.
    """
    for path in _newest_first(folder):
        if int(path.name.split("-")[1]) > most_steps:
            continue
        try:
            return _verified(path, run_id, found)
        except (
            OSError,
            safetensors.SafetensorError,
            canon.CanonError,
            SpecError,
            StateError,
        ) as error:
            _put_aside(path, str(error), notes)
    return None


def put_newest_aside(folder: Path, why: str, notes: list[str]) -> None:
    """Put aside what `newest` gave, which its run could not go on from."""
    _put_aside(_newest_first(folder)[0], why, notes)


def _put_aside(path: Path, why: str, notes: list[str]) -> None:
    """Rename it; it is removed with its folder, once the run has its outcome."""
    notes.append(f"checkpoint {path.name[:22]} of run {path.parent.name[:12]} is not used: {why}")
    # another worker, with an attempt of the same run, has removed it
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_name(path.name + _ASIDE))


def _newest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _verified(path: Path, run_id: str, found: Mapping[str, str]) -> SlotState:
    """The state in a file. Raises StateError, OSError, SafetensorError, CanonError or SpecError."""
    if path.name.rpartition("-")[2].partition(".")[0] != canon.file_sha256(path):
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
    if other := [
        f"{key} {header.environment.get(key)}"
        for key in found
        if found[key] != header.environment.get(key)
    ]:
        raise StateError(f"it was written under {', '.join(other)}")
    return SlotState(header=header, tensors=tensors)
