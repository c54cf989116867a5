"""The user's own code in a run: a factory that builds the model, or a command that trains it."""

from __future__ import annotations

import difflib
import math
import re
import shlex
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, get_args

from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, USER_TRAINER_HPARAMS

# ---- Factories ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Factory:
    """A function in the user's module that builds a `torch.nn.Module` of a shape."""

    target: str
    """Name of the function, `package.module:function`."""
    source_sha256: str
    """Sha256 of the module's source file; a run with other code is another run."""
    dimensions: tuple[tuple[str, str], ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Patterns of parameter names, with one word for each of their dimensions: (`*.experts.up`,
    `expert in out`)."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for pattern, text in self.dimensions:
            words = text.split()
            counts = [words.count("in"), words.count("out")]
            checks.require(
                all(word.isidentifier() for word in words) and max(counts) == 1,
                f"{pattern!r} = {text!r}: must be one word for each dimension, `in`, `out` or "
                "both once among them, such as 'expert in out'",
            )
        checks.require(
            bool(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", self.target)),
            f"target = {self.target!r}: must be package.module:function",
        )
        checks.require(
            len(self.source_sha256) == canon.ID_LENGTH,
            f"source_sha256 = {self.source_sha256!r} is not a sha256",
        )
        checks.raise_problems()


class FactoryError(InputError):
    """A factory that cannot be used. `problems` lists everything that is wrong with it."""

    cause, refuses_study = "user_code", True
    """Kind of the failure, and whether the driver ends the study instead of retrying the run."""

    def __init__(self, target: str, problems: list[str]) -> None:
        self.target, self.problems = target, problems
        super().__init__(f"{target}: " + "; ".join(problems))

    def __reduce__(self) -> tuple[type[FactoryError], tuple[str, list[str]]]:
        """Return the arguments to pickle: workers send this error."""
        return FactoryError, (self.target, self.problems)


class FactoryChangedError(InputError):
    """A factory whose source has changed since the run's spec was made."""

    cause, refuses_study = "user_code", True
    """Kind of the failure, and whether the driver ends the study instead of retrying the run."""


# ---- Commands ----

PLACEHOLDERS = {
    **{
        HYPERPARAMETERS[name].placeholder_name: HYPERPARAMETERS[name].meaning
        for name in USER_TRAINER_HPARAMS
    },
    "num_steps": "optimizer steps",
    "warmup_steps": "warmup steps, part of num_steps",
    "decay_steps": "decay steps (wsd)",
    "decay_shape": "linear or sqrt (wsd)",
    "schedule": "cosine, linear, wsd or constant",
    "final_fraction": "last learning rate over the peak",
    "num_layers": "blocks",
    "width": "d_model",
    "num_heads": "query heads",
    "num_kv_heads": "key and value heads",
    "head_dim": "width of a head",
    "ffn_width": "feed-forward width",
    "vocab_size": "tokens in the vocabulary",
    "seq_len": "tokens per sequence",
    "base_width": "width at which the hyperparameters are set",
    "base_num_layers": "blocks of the base shape",
    "width_multiplier": "width / base_width",
    "parametrization": "name of the parametrization",
    "batch_tokens": "tokens per step",
    "batch_sequences": "sequences per step",
    "batch_warmup_steps": "steps before the batch is full",
    "batch_warmup_stages": "equal stages of the batch warmup; 1: no warmup",
    "seed": "seed of weights and data order",
    "run_dir": "an empty folder for this run",
    "run_json": "the file in it with all these values and the spec",
    "data": "the corpus folder",
}
"""Placeholders that a command's template may contain, with their meanings."""

PATH_PLACEHOLDERS = ("run_dir", "run_json", "data")
"""Placeholders for paths on the machine that trains the run."""
REQUIRED_PLACEHOLDERS = {
    "lr": "the search cannot reach the trainer",
    "width": "the model would not grow",
    "num_steps": "the trainer cannot know when to end",
    "seed": "repetitions would all be the same run, and every interval too narrow",
}
"""Placeholders that a template must contain, unless it contains {run_json}, and the reasons."""

MetricsFormat = Literal["jsonl", "wandb", "tensorboard"]
LossUnit = Literal["nats", "bits", "bits per byte"]
"""Unit of a logged loss: nats or bits per token, or bits per byte of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The command line of a trainer, and the place of its metrics. No shell runs it."""

    template: str
    """Command line with `{placeholders}`; a literal brace is written twice."""
    metrics_format: MetricsFormat
    metrics_path: str
    """Path of the JSONL file, or of the folder with the W&B run or event files. It may contain
    `{placeholders}`; a relative path starts in `{run_dir}`."""
    step_key: str
    """Key of the step; unused for `tensorboard`, whose metrics have their own step."""
    train_loss_key: str
    validation_loss_key: str
    grad_norm_key: str
    """Key of the gradient norm; empty if the trainer does not log it."""
    own: tuple[str, ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Placeholders that the plan declares."""
    train_loss_unit: LossUnit = field(default="nats", metadata=canon.UNLESS_DEFAULT)
    validation_loss_unit: LossUnit = field(default="nats", metadata=canon.UNLESS_DEFAULT)
    bytes_per_token: float = field(default=0.0, metadata=canon.UNLESS_DEFAULT)
    """Bytes of text per token, for a loss in bits per byte; 0 if not declared."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_one_of("metrics_format", get_args(MetricsFormat))
        problems = {
            "template": [
                *find_template_problems(self.template, self.own),
                *_find_command_problems(self.template),
            ],
            "metrics_path": [
                *find_template_problems(self.metrics_path, self.own),
                *_find_path_problems(self.metrics_path),
            ],
        }
        for name in problems:
            checks.problems += [f"{name}: {problem}" for problem in problems[name]]
        self._check_keys(checks)
        checks.require_number("bytes_per_token", least=0)
        for name in ("train_loss_unit", "validation_loss_unit"):
            checks.require_one_of(name, get_args(LossUnit))
            checks.require(
                getattr(self, name) != "bits per byte" or self.bytes_per_token > 0,
                f"{name} is bits per byte: set metrics_bytes_per_token to the bytes of the text "
                "over its tokens",
            )
        checks.raise_problems()

    def _check_keys(self, checks: Checks) -> None:
        required = ("step_key", "train_loss_key", "validation_loss_key")
        for name in required:
            checks.require(bool(getattr(self, name)), f"{name} is empty")
        keys = [key for name in (*required, "grad_norm_key") if (key := getattr(self, name))]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        checks.require(
            not repeated, f"{', '.join(map(repr, repeated))}: two metrics must not share one key"
        )

    def get_nats_per_unit(self, unit: LossUnit) -> float:
        """Return the factor that converts a loss in a unit to nats per token."""
        if unit == "nats":
            return 1.0
        return math.log(2) * (self.bytes_per_token if unit == "bits per byte" else 1.0)

    @property
    def placeholders(self) -> set[str]:
        """Placeholders of the template."""
        return find_placeholders(self.template)

    def can_receive(self, placeholder: str) -> bool:
        """Return whether the trainer receives a value; if not, a search over it has no effect."""
        return not {placeholder, "run_json"}.isdisjoint(self.placeholders)


def find_placeholders(template: str) -> set[str]:
    """Return the placeholders of a template; empty if it cannot be parsed."""
    try:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError:
        return set()


def find_template_problems(template: str, own: Sequence[str]) -> list[str]:
    """Return the problems of a template.

    Args:
        template: Text with `{placeholders}`.
        own: Placeholders that the plan declares.
    """
    if not template.strip():
        return ["it is empty"]
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        return [f"{template!r} does not parse ({error}): write a literal brace twice"]
    problems, known = [], (*PLACEHOLDERS, *own)
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = (
                f"did you mean {{{near[0]}}}?" if near else f"must be one of {', '.join(known)}"
            )
            problems.append(
                f"{{{name}}} is unknown, also to search.axes: {advice} (write a literal brace "
                "twice)"
            )
        elif spec or conversion:
            problems.append(
                f"{{{name}}} has a format, which would change the value: write {{{name}}}"
            )
    return problems


def _find_command_problems(template: str) -> list[str]:
    """Return the problems of a command line: its quotes, and placeholders that it lacks."""
    problems = []
    try:
        shlex.split(template)
    except ValueError as error:
        problems.append(
            f"{template!r} does not split into words ({error}): are its quotes balanced?"
        )
    names = find_placeholders(template)
    if "run_json" not in names:
        problems += [
            f"it lacks {{{name}}}: {REQUIRED_PLACEHOLDERS[name]}"
            for name in REQUIRED_PLACEHOLDERS
            if name not in names
        ]
    return problems


def _find_path_problems(path: str) -> list[str]:
    """Return the problem of a path to metrics at which two runs would write the same file."""
    names, parsed = find_placeholders(path), PurePosixPath(path)
    is_elsewhere = parsed.is_absolute() or path.startswith("~") or {"data", "run_json"} & names
    if ".." in parsed.parts or (is_elsewhere and "run_dir" not in names):
        problem = f"{path!r} is outside {{run_dir}}, so runs would write one file"
        return [f"{problem}: begin it with {{run_dir}}/"]
    return []
