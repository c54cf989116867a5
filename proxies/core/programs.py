"""The user's own code as part of a run: a model factory, or a whole trainer. Standard library
only.
"""

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

from proxies.core import canon
from proxies.core.checks import Checks
from proxies.core.errors import InputError
from proxies.core.hyperparameters import HYPERPARAMETERS, USER_TRAINER_HPARAMS

MetricsFormat = Literal["jsonl", "wandb", "tensorboard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Factory:
    """A function that builds a `torch.nn.Module` of a shape, in the user's own module."""

    target: str
    """`package.module:function`."""
    source_sha256: str
    """Of the module's source file: other code is another run."""
    dimensions: tuple[tuple[str, str], ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Patterns of parameter names, and what each of their dimensions is: (`*.experts.up`, `expert
    in out`)."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for pattern, words in self.dimensions:
            named = words.split()
            plain = (
                bool(named)
                and all(word.isidentifier() for word in named)
                and bool({"in", "out"} & {*named})
            )
            twice = [word for word in ("in", "out") if named.count(word) > 1]
            checks.that(
                plain and not twice,
                f"{pattern!r} = {words!r}: must be one word for each dimension, `in`, `out` or "
                "both once among them, "
                "such as 'expert in out'",
            )
        fine = re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", self.target)
        checks.that(bool(fine), f"target = {self.target!r}: must be package.module:function")
        checks.that(
            len(self.source_sha256) == 64, f"source_sha256 = {self.source_sha256!r} is not a sha256"
        )
        checks.done()


class FactoryError(InputError):
    """A factory that cannot be used. `problems` lists all that is wrong with it."""

    cause, refuses_study = "user_code", True

    def __init__(self, target: str, problems: list[str]) -> None:
        self.target, self.problems = target, problems
        super().__init__(f"{target}: " + "; ".join(problems))

    def __reduce__(self) -> tuple[type[FactoryError], tuple[str, list[str]]]:
        """As it was made: it travels from workers."""
        return FactoryError, (self.target, self.problems)


class FactoryChangedError(InputError):
    """The factory's source is no longer what the run was named after."""

    cause, refuses_study = "user_code", True


PLACEHOLDERS = {
    **{
        HYPERPARAMETERS[name].told_as: HYPERPARAMETERS[name].meaning
        for name in USER_TRAINER_HPARAMS
    },
    "num_steps": "optimizer steps",
    "warmup_steps": "warmup steps among them",
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
    "vocab_size": "tokens known",
    "seq_len": "tokens per sequence",
    "base_width": "width the hyperparameters are set at",
    "base_num_layers": "blocks of the base shape",
    "width_multiplier": "width / base_width",
    "parametrization": "its name",
    "batch_tokens": "tokens per step",
    "batch_sequences": "sequences per step",
    "batch_warmup_steps": "steps before the batch is full",
    "batch_warmup_stages": "equal stages; 1: no warmup",
    "seed": "seed of weights and data order",
    "run_dir": "an empty folder for this run",
    "run_json": "the file in it with all these values and the spec",
    "data": "the corpus folder",
}
"""What a command template may name."""

PLACES = ("run_dir", "run_json", "data")
"""Those of the machine that a run is on."""
NEEDED = {
    "lr": "the search cannot reach the trainer",
    "width": "the model would not grow",
    "num_steps": "the trainer cannot know when to end",
    "seed": "repetitions would all be the same run, and every interval too narrow",
}
"""What a template must name (or {run_json}, which holds everything), and why."""


LossUnit = Literal["nats", "bits", "bits per byte"]
"""Unit of a logged loss: nats or bits per token, or bits per byte of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A trainer's command line, and where it leaves its metrics. No shell runs it.

    The metrics of `tensorboard` carry their own step; `step_key` is of `jsonl` and `wandb`.
    """

    template: str
    """With `{placeholders}`; a brace of its own is written twice."""
    metrics_format: MetricsFormat
    metrics_path: str
    """The JSONL file, or the folder below which the run or event files lie; `{placeholders}`
    allowed; a relative path starts in `{run_dir}`."""
    step_key: str
    train_loss_key: str
    validation_loss_key: str
    grad_norm_key: str
    """Empty: the trainer logs none."""
    own: tuple[str, ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Names that a plan declares beside the placeholders."""
    train_loss_unit: LossUnit = field(default="nats", metadata=canon.UNLESS_DEFAULT)
    validation_loss_unit: LossUnit = field(default="nats", metadata=canon.UNLESS_DEFAULT)
    bytes_per_token: float = field(default=0.0, metadata=canon.UNLESS_DEFAULT)
    """Bytes of text per token, for a loss in bits per byte; 0 if not declared."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("metrics_format", get_args(MetricsFormat))
        problems = [*template_problems(self.template, self.own), *_command_problems(self.template)]
        checks.problems += [f"template: {problem}" for problem in problems]
        problems = [
            *template_problems(self.metrics_path, self.own),
            *_path_problems(self.metrics_path),
        ]
        checks.problems += [f"metrics_path: {problem}" for problem in problems]
        for name in ("step_key", "train_loss_key", "validation_loss_key"):
            checks.that(bool(getattr(self, name)), f"{name} is empty")
        keys = [
            key
            for key in (
                self.step_key,
                self.train_loss_key,
                self.validation_loss_key,
                self.grad_norm_key,
            )
            if key
        ]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        checks.that(not twice, f"{', '.join(map(repr, twice))}: two metrics must not share one key")
        checks.number("bytes_per_token", least=0)
        for name in ("train_loss_unit", "validation_loss_unit"):
            checks.one_of(name, get_args(LossUnit))
            checks.that(
                getattr(self, name) != "bits per byte" or self.bytes_per_token > 0,
                f"{name} is bits per byte: set metrics_bytes_per_token to the bytes of the text "
                "over its tokens",
            )
        checks.done()

    def nats_per_unit(self, unit: LossUnit) -> float:
        """Return the factor that converts a loss in a unit to nats per token."""
        return {
            "nats": 1.0,
            "bits": math.log(2),
            "bits per byte": math.log(2) * self.bytes_per_token,
        }[unit]

    @property
    def named(self) -> set[str]:
        """The placeholders of its template."""
        return placeholders_in(self.template)

    def reaches(self, placeholder: str) -> bool:
        """Whether the trainer receives this value: a search over one that it does not receive has
        no effect.
        """
        return not {placeholder, "run_json"}.isdisjoint(placeholders_in(self.template))


def template_problems(template: str, own: Sequence[str] = ()) -> list[str]:
    """What is wrong with a template, which may also name a plan's `own` axes; nothing for a good
    one.
    """
    if not template.strip():
        return ["it is empty"]
    try:
        fields = [
            (f, spec, how)
            for _, f, spec, how in string.Formatter().parse(template)
            if f is not None
        ]
    except ValueError as error:
        return [f"{template!r} does not parse ({error}): write a literal brace twice"]
    problems, known = [], (*PLACEHOLDERS, *own)
    for name, spec, how in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {{{near[0]}}}?" if near else f"must be one of {', '.join(known)}"
            problems.append(
                f"{{{name}}} is unknown, also to search.axes: {meant} (write a literal brace twice)"
            )
        elif spec or how:
            problems.append(
                f"{{{name}}} has a format, which would change the value: write {{{name}}}"
            )
    return problems


def placeholders_in(template: str) -> set[str]:
    """The placeholders of a template; none for one that does not parse."""
    try:
        return {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError:
        return set()


def _command_problems(template: str) -> list[str]:
    """Quotes, and what a trainer must be told."""
    problems = []
    try:
        shlex.split(template)
    except ValueError as error:
        problems.append(
            f"{template!r} does not split into words ({error}): are its quotes balanced?"
        )
    names = placeholders_in(template)
    missing = (
        {}
        if "run_json" in names
        else {name: why for name, why in NEEDED.items() if name not in names}
    )
    return problems + [f"it lacks {{{name}}}: {why}" for name, why in missing.items()]


def _path_problems(path: str) -> list[str]:
    """Two runs must never write, nor an attempt find, the same metrics."""
    names, pure = placeholders_in(path), PurePosixPath(path)
    shared = (
        pure.is_absolute() or path.startswith("~") or not names.isdisjoint(("data", "run_json"))
    )
    if ".." in pure.parts or (shared and "run_dir" not in names):
        return [
            (
                f"{path!r} is outside {{run_dir}}, so runs would write one file: begin it with "
                f"{{run_dir}}/"
            )
        ]
    return []
