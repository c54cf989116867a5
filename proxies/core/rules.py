"""Definitions of the parametrizations (muP, CompleteP, ...): how numbers scale from a base run.

A parametrization is a table of powers: how initial std, learning rate, weight decay, and AdamW's
eps of each kind of parameter grow with the ratios of width (m_N), depth (m_L), batch (m_B), and
duration in tokens (m_D) to the base run. It makes one explicit choice for each rule on which
published sources differ. This module defines the powers;
`forerun._proxies.parametrization.parametrization` evaluates them for the parameters of a model.

The presets are the choices of the named sources. Only the set of parameters that decay is forerun's
own choice, because most sources leave it to their users: all presets decay hidden matrices and the
readout. `docs/parametrizations.md` says where the sources disagree, and which are quoted at second
hand.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks, SpecError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, Hparams
from forerun._proxies.core.muon import RMS_POWER, SHAPE_RULES, MuonRate
from forerun._proxies.core.notation import add_article
from forerun._proxies.core.numbers import KINDS, Kind
from forerun._proxies.core.optimizers import WEIGHT_DECAY, Recipe, has_renamed_setting
from forerun._proxies.core.powers import UNSCALED, Powers, Ratios

Name = Literal["sp", "mup", "mup_no_wd_scaling", "completep", "completedp", "umup"]
NAMES: tuple[Name, ...] = get_args(Name)
IN_BLOCKS: tuple[Kind, ...] = ("hidden", "block_gain", "block_bias", "qk_gain")
"""Kinds of parameters inside the residual blocks, to which the depth rule applies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindRule:
    """Scaling of the numbers of one kind of parameter.

    m_N is the ratio of the model's width; for hidden matrices and the readout, that of their own
    fan-in.
    """

    init_std: Powers
    learning_rate: Powers
    weight_decay: Powers
    """Scaling of AdamW's coupled decay (a step takes the share lr * wd of a weight); if decay is
    independent, the scaling of that share."""
    eps: Powers


@dataclass(frozen=True, kw_only=True, slots=True)
class Parametrization:
    """One choice for each question on which sources differ. `get_parametrization` returns a
    source's choices.
    """

    name: Name
    """Name of the source from which the choices started."""
    width: Literal["none", "mup"]
    """Width rule. `mup`: hidden init std m_N^-1/2 and learning rate m_N^-1 (Tensor Programs V,
    arXiv 2203.03466, Table 8)."""
    attention: Literal["inverse_head_dim", "inverse_sqrt_head_dim"]
    """Scale of q . k: sqrt(base head_dim) / head_dim, or 1 / sqrt(head_dim). They differ only if
    head_dim grows."""
    output: Literal["multiplier", "absorbed"]
    """Place of the readout's 1 / m_N: a forward multiplier (mup, CompleteP), or absorbed in its
    init std, rate, and decay (Complete(d)P, Lingle arXiv 2404.05728). Under Adam the two are the
    same function only if eps and weight decay scale too, as with `scaled` decay and the eps of
    `completedp`."""
    depth_alpha: float | None
    """Depth rule: branches times m_L^-alpha, learning rates in blocks times m_L^(alpha-1). 1:
    CompleteP (arXiv 2505.01618); 1/2: u-muP (arXiv 2407.17465) and ArchScale; None: no depth rule
    (mup, Megatron-LM)."""
    weight_decay: Literal["scaled", "unscaled", "root", "independent"]
    """Weight decay of hidden matrices against width: `scaled` times m_N (mup, CompleteP,
    Complete(d)P), `unscaled` (mup's GitHub head with decoupled_wd, Megatron-LM, Cerebras), `root`
    times m_N^1/2 (arXiv 2510.15262), `independent`: a step removes the given share at every
    learning rate (u-muP, ArchScale)."""
    decayed: Literal["matrices", "two_dimensional", "all"]
    """Parameters with weight decay: hidden matrices and readout (default of forerun); these and the
    embeddings (nanoGPT); all (mup with one parameter group, the table of Complete(d)P)."""
    embedding_rate: Literal["constant", "inverse_root"]
    """Learning rate of the embeddings against width: constant (mup, CompleteP) or m_N^-1/2 (u-muP,
    nanochat)."""
    eps: Literal["unscaled", "hidden", "blocks", "all", "completedp"]
    """AdamW's eps: unscaled (mup); m_N^-1 m_L^-alpha for hidden matrices (Megatron-LM's
    `--use-mup`, without a depth rule), for blocks (CompleteP's Table 1), or for all (CompleteP's
    code). `completedp` scales as the gradients do: blocks m_N^-1 m_L^-alpha, but QK-norm gains
    without m_N; embeddings m_N^-1; the readout m_N^-1 if a multiplier makes its gradients small, 1
    if the multiplier is absorbed."""
    rate_batch_power: float
    """Power of m_B in every learning rate: 1/2 (Complete(d)P, nanochat), 0 for none."""
    rate_duration_power: float
    """Power of m_D in every learning rate: -1/2 (Complete(d)P), -0.32 (arXiv 2603.28743), -0.3 and
    -0.28 (Marin), 0 for none (a regression of StepLaw's public runs gives +0.03 [-0.01, 0.11])."""
    moments: Literal["fixed", "scaled"]
    """Scaling with batch and duration. `scaled`: 1 - beta times m_B/m_D, eps times
    (m_D/m_B)^1/2, decay times (m_B/m_D)^1/2 (Complete(d)P), but independent decay times m_B/m_D."""
    muon_rate: MuonRate = field(default="none", metadata=canon.UNLESS_DEFAULT)
    """Factor of Muon's learning rate for a matrix of r rows and c columns: sqrt(max(1, r/c))
    `original` (Jordan), 0.2 sqrt(max(r, c)) `match_rms_adamw` (Moonlight, arXiv 2502.16982),
    sqrt(max(r, c)) `spectral` (Megatron-LM's name), sqrt(r/c) `unit_rms` (the spectral condition,
    arXiv 2310.17813; Megatron-LM's name); `none`: AdamW steps everything."""
    muon_width_power: float = field(default=0.0, metadata=canon.UNLESS_DEFAULT)
    """Power of m_N by which Muon's learning rate is also multiplied: 0 in every source; 1/2 keeps
    the size of an update's elements, as AdamW without a width rule does."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name, words in CHOICES.items():
            checks.require_one_of(name, words)
        for name, (least, most) in POWER_BOUNDS.items():
            if getattr(self, name) is not None:
                checks.require_number(name, least=least, most=most)
        if checks.has_no_problem and self.width == "none":
            self._check_no_width(checks)
        checks.require(
            self.rates_by_shape or not self.muon_width_power,
            f"muon_width_power = {self.muon_width_power}: must be 0 where muon_rate is none",
        )
        checks.require(
            not self.rates_by_shape or self.weight_decay != "root",
            "weight_decay = 'root': derived for AdamW's rates, so Muon's must be scaled, "
            "unscaled or independent",
        )
        checks.raise_problems()

    def _check_no_width(self, checks: Checks) -> None:
        """Check that no choice asks for a width rule, since this parametrization has none."""
        for name, allowed in (
            ("output", ("multiplier",)),
            ("weight_decay", ("unscaled", "independent")),
            ("embedding_rate", ("constant",)),
            ("eps", ("unscaled",) if self.depth_alpha is None else CHOICES["eps"]),
        ):
            checks.require(
                getattr(self, name) in allowed,
                f"{name} = {getattr(self, name)!r}: {self.name} has no width rule, so it must be "
                f"{' or '.join(allowed)}",
            )

    @property
    def needs_tokens(self) -> bool:
        """Whether numbers scale with batch or duration, so that the base run's are needed."""
        return self.moments == "scaled" or bool(self.rate_batch_power or self.rate_duration_power)

    @property
    def rates_by_shape(self) -> bool:
        """Whether the learning rates of hidden matrices depend on their shape, as for Muon."""
        return self.muon_rate != "none"

    @property
    def unscaled(self) -> Parametrization:
        """The control of this parametrization: `sp` with the same choices of decay and Muon's rate.

        At the base shape it is the same function as this parametrization. At other shapes only
        Muon's learning rate scales, by the power of the width with which the elements of an update
        keep their size.
        """
        power = RMS_POWER - SHAPE_RULES[self.muon_rate].width_power if self.rates_by_shape else 0.0
        return dataclasses.replace(
            PRESETS["sp"],
            decayed=self.decayed,
            weight_decay="independent" if self.weight_decay == "independent" else "unscaled",
            muon_rate=self.muon_rate,
            muon_width_power=power,
        )

    @property
    def changed(self) -> dict[str, object]:
        """Choices that differ from those of the named source."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(PRESETS[self.name], field.name)
        }

    def __str__(self) -> str:
        """Return the name with the changed choices: `completep(depth_alpha=0.5)`."""
        changes = ", ".join(f"{name}={value}" for name, value in self.changed.items())
        return f"{self.name}({changes})" if changes else self.name


CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(hint)
    for name, hint in get_type_hints(Parametrization).items()
    if get_origin(hint) is Literal
}
"""Allowed words of every field that takes a word."""

POWER_BOUNDS: dict[str, tuple[float, float]] = {
    "rate_batch_power": (-2, 2),
    "rate_duration_power": (-2, 2),
    "depth_alpha": (0.5, 1),
    "muon_width_power": (-2, 2),
}
"""Smallest and largest allowed value of every field that is a number; all of them are powers."""

_MUP = Parametrization(
    name="mup",
    width="mup",
    attention="inverse_head_dim",
    output="multiplier",
    depth_alpha=None,
    weight_decay="scaled",
    decayed="matrices",
    embedding_rate="constant",
    eps="unscaled",
    rate_batch_power=0.0,
    rate_duration_power=0.0,
    moments="fixed",
)

PRESETS: dict[str, Parametrization] = {
    "sp": dataclasses.replace(
        _MUP, name="sp", width="none", attention="inverse_sqrt_head_dim", weight_decay="unscaled"
    ),
    "mup": _MUP,
    "mup_no_wd_scaling": dataclasses.replace(
        _MUP, name="mup_no_wd_scaling", weight_decay="unscaled"
    ),
    "completep": dataclasses.replace(_MUP, name="completep", depth_alpha=1.0, eps="blocks"),
    "completedp": dataclasses.replace(
        _MUP,
        name="completedp",
        output="absorbed",
        depth_alpha=1.0,
        eps="completedp",
        rate_batch_power=0.5,
        rate_duration_power=-0.5,
        moments="scaled",
    ),
    "umup": dataclasses.replace(
        _MUP,
        name="umup",
        depth_alpha=0.5,
        weight_decay="independent",
        embedding_rate="inverse_root",
    ),
}


def get_parametrization(name: str, **changes: object) -> Parametrization:
    """Return the parametrization of a source, with some of its choices changed.

    Args:
        name: Name of the source.
        changes: Changed choices by field of `Parametrization`.

    Raises:
        SpecError: The name or a choice is unknown (all problems at once).
    """
    choices = [field.name for field in dataclasses.fields(Parametrization) if field.name != "name"]
    problems = []
    if name not in PRESETS:
        problems.append(f"parametrization = {name!r}: {_suggest(name, NAMES)}")
    problems += [
        f"{change} is not an option: {_suggest(change, choices)}"
        for change in changes
        if change not in choices
    ]
    known: dict[str, Any] = {name: value for name, value in changes.items() if name in choices}
    try:
        parametrization = dataclasses.replace(PRESETS.get(name, _MUP), **known)
    except SpecError as error:
        problems += error.problems
    if problems:
        raise SpecError("Parametrization", problems)
    return parametrization


def _suggest(word: str, words: Iterable[str]) -> str:
    """Return advice for an unknown word: the nearest known word, or all words."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"did you mean {near[0]}?" if near else f"must be one of {', '.join(words)}"


# ---- Rules of each kind of parameter ----


def make_kind_rule(
    parametrization: Parametrization, kind: Kind, *, by_shape: bool | None = None
) -> KindRule:
    """Return how the numbers of one kind of parameter scale.

    Args:
        parametrization: The choices.
        kind: Kind of the parameter.
        by_shape: Whether the learning rate of its optimizer follows the shape of a matrix; None for
            what most parameters of the kind have.
    """
    p = parametrization
    if by_shape is None:
        by_shape = p.rates_by_shape and kind == "hidden"
    has_width_rule = p.width == "mup"
    is_absorbed = has_width_rule and kind == "readout" and p.output == "absorbed"
    as_hidden = is_absorbed or (has_width_rule and kind == "hidden")

    # Initialization: a readout that absorbs its multiplier has half a power more
    init_width = -1.0 if is_absorbed else -0.5 if as_hidden else 0.0

    # Learning rate and weight decay against width
    rate_width = -1.0 if as_hidden else 0.0
    decay_width = {"scaled": 1.0, "root": 0.5}.get(p.weight_decay, 0.0) if as_hidden else 0.0
    if has_width_rule and kind == "embedding" and p.embedding_rate == "inverse_root":
        rate_width = -0.5
    if by_shape:
        # In every source a step removes the same share lr * wd of a weight as at the base
        rate_width = SHAPE_RULES[p.muon_rate].width_power + p.muon_width_power
        decay_width = 0.0 if p.weight_decay == "independent" else -rate_width

    # Depth counts inside the residual blocks only
    rate_depth = 0.0
    if p.depth_alpha is not None and kind in IN_BLOCKS:
        rate_depth = p.depth_alpha - 1

    # Batch and duration: decay follows the gradient noise, eps its inverse
    noise_decay = noise_eps = UNSCALED
    if p.moments == "scaled":
        # Coupled decay is multiplied by the learning rate, so each of the two gets a square root
        power = 1.0 if p.weight_decay == "independent" else 0.5
        noise_decay = Powers(batch=power, duration=-power)
        noise_eps = Powers(batch=-0.5, duration=0.5)
    return KindRule(
        init_std=Powers(width=init_width),
        learning_rate=Powers(
            width=rate_width,
            depth=rate_depth,
            batch=p.rate_batch_power,
            duration=p.rate_duration_power,
        ),
        weight_decay=noise_decay.multiply(Powers(width=decay_width)),
        eps=UNSCALED if by_shape else noise_eps.multiply(_scale_eps(p, kind)),
    )


def _scale_eps(p: Parametrization, kind: Kind) -> Powers:
    """Return the scaling of eps with width and depth, which is that of the gradients."""
    width, depth = -1.0 if p.width == "mup" else 0.0, -(p.depth_alpha or 0.0)
    scaled_kinds: dict[str, tuple[Kind, ...]] = {
        "hidden": ("hidden",),
        "blocks": IN_BLOCKS,
        "all": KINDS,
    }
    if kind in scaled_kinds.get(p.eps, ()):
        return Powers(width=width, depth=depth)
    if p.eps == "completedp":
        if kind in IN_BLOCKS:
            return Powers(width=0.0 if kind == "qk_gain" else width, depth=depth)
        if kind == "embedding" or (kind == "readout" and p.output == "multiplier"):
            return Powers(width=width)
    return UNSCALED


def make_forward_rule(
    parametrization: Parametrization,
) -> dict[Literal["residual", "output"], Powers]:
    """Return how the multipliers of the residual branches and of the output scale.

    The attention's multiplier depends on the head dim instead (`compute_forward_of_shape` in
    `forerun._proxies.parametrization.parametrization`).
    """
    has_multiplier = parametrization.width == "mup" and parametrization.output == "multiplier"
    return {
        "residual": Powers(depth=-(parametrization.depth_alpha or 0.0)),
        "output": Powers(width=-1.0 if has_multiplier else 0.0),
    }


def has_decay(parametrization: Parametrization, kind: Kind) -> bool:
    """Return whether weight decay applies to a kind of parameter."""
    if parametrization.decayed == "all" or kind in ("hidden", "readout"):
        return True
    return parametrization.decayed == "two_dimensional" and kind == "embedding"


# ---- Scaling of hyperparameters ----


def get_scaling(parametrization: Parametrization, name: str, kind: Kind | None = None) -> Powers:
    """Return how a hyperparameter scales for one kind of parameter.

    Args:
        parametrization: The choices.
        name: The hyperparameter. If its scale is a complement, 1 - value is what scales.
        kind: Kind of the parameter; None for hidden matrices, or for embeddings if the
            hyperparameter sets AdamW in the recipe `muon`, where it updates no hidden matrix.
    """
    rule_name = HYPERPARAMETERS[name].scaling
    if rule_name is None:
        return UNSCALED
    if rule_name == "moments":
        is_fixed = parametrization.moments == "fixed"
        return UNSCALED if is_fixed else Powers(batch=1, duration=-1)
    kind = kind or ("embedding" if has_renamed_setting(name) else "hidden")
    powers: Powers = getattr(make_kind_rule(parametrization, kind), rule_name)
    return powers


def depends_on_shape(name: str) -> bool:
    """Return whether a setting depends on a matrix's shape if its optimizer's rates do."""
    return HYPERPARAMETERS[name].scaling in ("learning_rate", "weight_decay")


def scale_value(parametrization: Parametrization, name: str, value: float, ratios: Ratios) -> float:
    """Return the value of a hyperparameter at some ratios, from its value at the base.

    Raises:
        SpecError: The scaled value of a complement is outside [0, 1).
    """
    factor = get_scaling(parametrization, name).evaluate(ratios)
    if HYPERPARAMETERS[name].scale != "log2_complement":
        return value * factor
    result = value if factor == 1 else 1 - (1 - value) * factor
    if not 0 <= result < 1:
        advice = "a smaller batch, a longer run" if factor > 1 else "a larger batch, a shorter run"
        problem = (
            f"1 - {name} times m_B / m_D = {factor:.4g} gives {name} = {result:.4g}, outside "
            f"[0, 1): use {advice}, or moments = fixed"
        )
        raise SpecError("Parametrization", [problem])
    return result


def scale_moments(
    parametrization: Parametrization, ratios: Ratios, hparams: Hparams
) -> dict[str, float]:
    """Return the decay factors of the optimizer's moving averages, such as beta1 and beta2.

    If `moments` is `scaled`, 1 - beta scales with batch and duration (arXiv 2512.22382).

    Raises:
        SpecError: A factor would be outside [0, 1) (all problems at once).
    """
    averages, problems = {}, []
    for name, value in hparams.values.items():
        if HYPERPARAMETERS[name].scaling != "moments" or value is None:
            continue
        try:
            averages[name] = scale_value(parametrization, name, value, ratios)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError("Parametrization", problems)
    return averages


# ---- Checks ----


def find_run_problems(
    parametrization: Parametrization, ratios: Ratios, hparams: Hparams, *, tied: bool
) -> list[str]:
    """Return the problems of a run under a parametrization; empty if it has none."""
    problems = []
    if tied and parametrization.output == "absorbed":
        problems.append(
            f"tied = True under {parametrization}: output must be multiplier, because a matrix "
            "shared with the embedding has no init and rate of its own to absorb the readout's "
            "1 / m_N"
        )
    try:
        scale_moments(parametrization, ratios, hparams)
    except SpecError as error:
        problems += error.problems
    return problems


def find_decay_problems(
    parametrization: Parametrization, recipe: Recipe, ratios: Ratios, hparams: Hparams
) -> list[str]:
    """Return a problem if weight decay would remove whole weights in a step at the peak rate.

    Only the first kind of parameter with this problem is reported.
    """
    for kind in KINDS:
        if not has_decay(parametrization, kind):
            continue
        optimizer = recipe.get_optimizer(kind)
        rate = recipe.get_base_value(hparams, optimizer.name, LEARNING_RATE)
        decay = recipe.get_base_value(hparams, optimizer.name, WEIGHT_DECAY)
        # Check both: a plan may change the optimizer and not the parametrization, or the reverse
        by_shape = optimizer.rates_by_shape and parametrization.rates_by_shape
        rule = make_kind_rule(parametrization, kind, by_shape=by_shape)
        share = decay * rule.weight_decay.evaluate(ratios)
        if parametrization.weight_decay != "independent":
            share *= rate * rule.learning_rate.evaluate(ratios)
        if share >= 1:
            name = recipe.get_hyperparameter_name(optimizer.name, WEIGHT_DECAY)
            problem = f"{name} = {decay} at learning rate {rate}: a step would take {share:.3g} of"
            return [f"{problem} {add_article(kind)} weight"]
    return []
