"""Parametrizations as data: for every question that sources answer differently, one explicit
choice. Standard library.

A parametrization is a table of powers: how initial std, learning rate, weight decay and AdamW eps
of each kind of parameter grow with the ratios of width (m_N), depth (m_L), batch (m_B) and duration
in tokens (m_D) to the base run. `proxies.parametrization.parametrization` turns it into numbers.
The presets are the named sources' own choices, but for what decays, which most sources leave to
their user: hidden matrices and the readout, in all of them. `docs/parametrizations.md` says where
the sources disagree, and which are quoted at second hand.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin, get_type_hints

from proxies.core import canon
from proxies.core.checks import Checks, SpecError
from proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, Hparams
from proxies.core.muon import RMS_POWER, SHAPE_RULES, MuonRate
from proxies.core.notation import with_article
from proxies.core.numbers import KINDS, Kind
from proxies.core.optimizers import WEIGHT_DECAY, Recipe, is_renamed
from proxies.core.powers import Powers, Ratios

Name = Literal["sp", "mup", "mup_no_wd_scaling", "completep", "completedp", "umup"]
NAMES: tuple[Name, ...] = get_args(Name)
IN_BLOCKS: tuple[Kind, ...] = ("hidden", "block_gain", "block_bias", "qk_gain")
"""Kinds inside the residual blocks, which is where depth counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindRule:
    """How one kind's numbers scale. m_N is the model's; for hidden matrices and the readout, their
    own fan-in's.
    """

    init_std: Powers
    learning_rate: Powers
    weight_decay: Powers
    """Of AdamW's coupled decay (lr * wd is the share a step takes); with independent decay, of that
    share itself."""
    eps: Powers


Attention = Literal["inverse_head_dim", "inverse_sqrt_head_dim"]
Readout = Literal["multiplier", "absorbed"]
DecayScaling = Literal["scaled", "unscaled", "root", "independent"]
Decayed = Literal["matrices", "two_dimensional", "all"]
EmbeddingRate = Literal["constant", "inverse_root"]
EpsScaling = Literal["unscaled", "hidden", "blocks", "all", "completedp"]
Moments = Literal["fixed", "scaled"]
"""The choices of a `Parametrization`, whose fields explain each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parametrization:
    """One answer to each question on which sources differ. `named` gives a source's own answers."""

    name: Name
    """The source; with other answers than its own, where it began."""
    width: Literal["none", "mup"]
    """`mup`: hidden init std m_N^-1/2 and learning rate m_N^-1 (Tensor Programs V, arXiv
    2203.03466, Table 8)."""
    attention: Attention
    """Scale of q . k: sqrt(base head_dim) / head_dim, or 1 / sqrt(head_dim). Differs only where
    head_dim grows."""
    output: Readout
    """Where the readout's 1 / m_N sits: a forward multiplier (mup, CompleteP), or in its init std,
    rate and decay (Complete(d)P, Lingle arXiv 2404.05728). The same function under Adam only if eps
    and weight decay move too: they do with `scaled` decay and the eps of `completedp`."""
    depth_alpha: float | None
    """Branches times m_L^-alpha, block learning rates times m_L^(alpha-1): 1 CompleteP (arXiv
    2505.01618), 1/2 u-muP (arXiv 2407.17465) and ArchScale; None: no depth rule (mup, Megatron-LM).
    """
    weight_decay: DecayScaling
    """Of hidden matrices against width: `scaled` m_N (mup, CompleteP, Complete(d)P), `unscaled`
    (mup's GitHub head with decoupled_wd, Megatron-LM, Cerebras), `root` m_N^1/2 (arXiv 2510.15262),
    `independent`: a step takes the share given, whatever the learning rate (u-muP, ArchScale)."""
    decayed: Decayed
    """What decays: hidden matrices and readout (ours); those and the embeddings (nanoGPT);
    everything (mup given one group, the table of Complete(d)P)."""
    embedding_rate: EmbeddingRate
    """The embeddings' learning rate against width: 1 (mup, CompleteP) or m_N^-1/2 (u-muP,
    nanochat)."""
    eps: EpsScaling
    """AdamW's: unscaled (mup); m_N^-1 m_L^-alpha for hidden matrices (Megatron-LM's `--use-mup`,
    without a depth rule), for blocks (CompleteP's Table 1) or for all (its code); `completedp`, as
    large as the gradients everywhere: blocks so, but QK-norm gains without m_N; embeddings m_N^-1;
    a readout m_N^-1 where a multiplier makes its gradients small, 1 where that is absorbed."""
    rate_batch_power: float
    """Of every learning rate: 1/2 with m_B (Complete(d)P, nanochat), 0 none."""
    rate_duration_power: float
    """Of every learning rate with m_D: -1/2 (Complete(d)P), -0.32 (arXiv 2603.28743), -0.3 and
    -0.28 (Marin), 0 none (a regression of StepLaw's public runs gives +0.03 [-0.01, 0.11])."""
    moments: Moments
    """`scaled`: 1 - beta times m_B/m_D, eps times (m_D/m_B)^1/2, decay times (m_B/m_D)^1/2
    (Complete(d)P); independent decay, a share in itself, times m_B/m_D."""
    muon_rate: MuonRate = field(default="none", metadata=canon.UNLESS_DEFAULT)
    """What Muon's learning rate is multiplied with for a matrix of r rows and c columns:
    sqrt(max(1, r/c)) `original` (Jordan), 0.2 sqrt(max(r, c)) `match_rms_adamw` (Moonlight, arXiv
    2502.16982), sqrt(max(r, c)) `spectral` (Megatron-LM's word), sqrt(r/c) `unit_rms` (the spectral
    condition, arXiv 2310.17813; Megatron-LM's word); `none`: AdamW steps everything."""
    muon_width_power: float = field(default=0.0, metadata=canon.UNLESS_DEFAULT)
    """And m_N to this power: 0 in every source; 1/2 keeps the size of a step's elements, as AdamW's
    has without a width rule."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name, words in CHOICES.items():
            checks.one_of(name, words)
        for name, (least, most) in POWERS.items():
            if getattr(self, name) is not None:
                checks.number(name, least=least, most=most)
        if checks.fine and self.width == "none":
            self._check_no_width(checks)
        said = f"muon_width_power = {self.muon_width_power}: must be 0 where muon_rate is none"
        checks.that(self.rates_by_shape or not self.muon_width_power, said)
        said = (
            "weight_decay = 'root': derived for AdamW's rates, so Muon's must be scaled, "
            "unscaled or independent"
        )
        checks.that(not self.rates_by_shape or self.weight_decay != "root", said)
        checks.done()

    def _check_no_width(self, checks: Checks) -> None:
        """An answer about width that nothing would follow is a mistake, not a choice."""
        for name, fine in (
            ("output", ("multiplier",)),
            ("weight_decay", ("unscaled", "independent")),
            ("embedding_rate", ("constant",)),
            ("eps", ("unscaled",) if self.depth_alpha is None else CHOICES["eps"]),
        ):
            problem = (
                f"{name} = {getattr(self, name)!r}: {self.name} has no width rule, so it "
                f"must be {' or '.join(fine)}"
            )
            checks.that(getattr(self, name) in fine, problem)

    @property
    def needs_tokens(self) -> bool:
        """Whether batch or duration count, so that a run must say what its base run's were."""
        return self.moments == "scaled" or bool(self.rate_batch_power or self.rate_duration_power)

    @property
    def rates_by_shape(self) -> bool:
        """Whether the learning rates of hidden matrices follow their shape, as an optimizer such as
        Muon needs.
        """
        return self.muon_rate != "none"

    @property
    def unscaled(self) -> Parametrization:
        """The same at the base shape, and scaled by nothing: a step's elements stay as large as
        they were, by Muon too.
        """
        decay: DecayScaling = "independent" if self.weight_decay == "independent" else "unscaled"
        power = RMS_POWER - SHAPE_RULES[self.muon_rate].width_power if self.rates_by_shape else 0.0
        return dataclasses.replace(
            PRESETS["sp"],
            decayed=self.decayed,
            weight_decay=decay,
            muon_rate=self.muon_rate,
            muon_width_power=power,
        )

    @property
    def changed(self) -> dict[str, object]:
        """Answers that are not the named source's own."""
        own = PRESETS[self.name]
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(own, field.name)
        }

    def __str__(self) -> str:
        """The name, with what was changed: `completep(depth_alpha=0.5)`."""
        changes = ", ".join(f"{name}={value}" for name, value in self.changed.items())
        return f"{self.name}({changes})" if changes else self.name


CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(hint)
    for name, hint in get_type_hints(Parametrization).items()
    if get_origin(hint) is Literal
}
"""Of every field that takes one of some words, the words."""

POWERS: dict[str, tuple[float, float]] = {
    "rate_batch_power": (-2, 2),
    "rate_duration_power": (-2, 2),
    "depth_alpha": (0.5, 1),
    "muon_width_power": (-2, 2),
}
"""Of every field that is a number, its bounds."""

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


def named(name: str, **changes: object) -> Parametrization:
    """A source's own answers, or those with `changes`.

    Raises:
        SpecError: no such source, or changes that are none of the choices; all at once.
    """
    choices = [field.name for field in dataclasses.fields(Parametrization) if field.name != "name"]
    problems = [] if name in PRESETS else [f"parametrization = {name!r}: {_one_of(name, NAMES)}"]
    problems += [
        f"{change} is not an option: {_one_of(change, choices)}"
        for change in changes
        if change not in choices
    ]
    known = {change: value for change, value in changes.items() if change in choices}
    try:
        found = dataclasses.replace(PRESETS.get(name, _MUP), **known)  # type: ignore[arg-type]
    except SpecError as error:
        problems += error.problems
    if problems:
        raise SpecError("Parametrization", problems)
    return found


def _one_of(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), list(words), n=1)
    return f"did you mean {near[0]}?" if near else f"must be one of {', '.join(words)}"


def kind_rule(
    parametrization: Parametrization, kind: Kind, *, by_shape: bool | None = None
) -> KindRule:
    """Return how the numbers of one kind of parameter scale.

    `by_shape` says whether its optimizer's rate follows a matrix's shape. None: as for most
    parameters of the kind.
    """
    p = parametrization
    scaled = p.width == "mup"
    by_shape = p.rates_by_shape and kind == "hidden" if by_shape is None else by_shape
    # An absorbed readout is sized as mup's hidden matrices are, but for its init: half a power
    # more.
    absorbed = scaled and kind == "readout" and p.output == "absorbed"
    as_hidden = absorbed or (scaled and kind == "hidden")
    rate_width = -1.0 if as_hidden else 0.0
    if scaled and kind == "embedding" and p.embedding_rate == "inverse_root":
        rate_width = -0.5
    alpha = p.depth_alpha if kind in IN_BLOCKS else None
    decay_width = {"scaled": 1.0, "root": 0.5}.get(p.weight_decay, 0.0) if as_hidden else 0.0
    if by_shape:  # the share that decay takes, lr * wd, is that of the base in every source
        rate_width = SHAPE_RULES[p.muon_rate].width_power + p.muon_width_power
        decay_width = 0.0 if p.weight_decay == "independent" else -rate_width
    decay, eps = _noise(p)
    return KindRule(
        init_std=Powers(width=-1.0 if absorbed else -0.5 if as_hidden else 0.0),
        learning_rate=Powers(
            width=rate_width,
            depth=0.0 if alpha is None else alpha - 1,
            batch=p.rate_batch_power,
            duration=p.rate_duration_power,
        ),
        weight_decay=decay.times(Powers(width=decay_width)),
        eps=Powers() if by_shape else eps.times(_eps(p, kind)),
    )


def _noise(p: Parametrization) -> tuple[Powers, Powers]:
    """Decay and eps follow the noise of the gradient: the root of batch over duration, and its
    inverse.
    """
    if p.moments == "fixed":
        return Powers(), Powers()
    # A share is rate times decay, and each of them has the root.
    half = 1.0 if p.weight_decay == "independent" else 0.5
    return Powers(batch=half, duration=-half), Powers(batch=-0.5, duration=0.5)


def decay_share(
    parametrization: Parametrization, recipe: Recipe, kind: Kind, ratios: Ratios, hparams: Hparams
) -> float:
    """Return the share of a weight that a step removes at the peak: the decay times the rate, or
    the decay itself.
    """
    spec = recipe.optimizer_for(kind)
    # a plan may have only one of them
    by_shape = spec.rates_by_shape and parametrization.rates_by_shape
    rule = kind_rule(parametrization, kind, by_shape=by_shape)
    rate, decay = (
        recipe.value_at_base(hparams, spec.name, name) for name in (LEARNING_RATE, WEIGHT_DECAY)
    )
    share = decay * rule.weight_decay.at(ratios)
    return (
        share
        if parametrization.weight_decay == "independent"
        else share * rate * rule.learning_rate.at(ratios)
    )


def _eps(p: Parametrization, kind: Kind) -> Powers:
    """Adam's eps follows the size of the gradients it is added to."""
    width, depth = -1.0 if p.width == "mup" else 0.0, -(p.depth_alpha or 0.0)
    scaled: dict[str, tuple[Kind, ...]] = {"hidden": ("hidden",), "blocks": IN_BLOCKS, "all": KINDS}
    if kind in scaled.get(p.eps, ()):
        return Powers(width=width, depth=depth)
    if p.eps == "completedp":
        if kind in IN_BLOCKS:
            return Powers(width=0.0 if kind == "qk_gain" else width, depth=depth)
        if kind == "embedding" or (kind == "readout" and p.output == "multiplier"):
            return Powers(width=width)
    return Powers()


def follows_shape(name: str) -> bool:
    """Return whether a setting scales with a matrix's own shape where its optimizer's rates do:
    rate and decay.
    """
    return HYPERPARAMETERS[name].scaling in ("learning_rate", "weight_decay")


def forward_rule(parametrization: Parametrization) -> dict[Literal["residual", "output"], Powers]:
    """How the forward multipliers scale; the attention's depends on head_dim, and is no power of
    these ratios.
    """
    multiplied = parametrization.width == "mup" and parametrization.output == "multiplier"
    return {
        "residual": Powers(depth=-(parametrization.depth_alpha or 0.0)),
        "output": Powers(width=-1.0 if multiplied else 0.0),
    }


def decays(parametrization: Parametrization, kind: Kind) -> bool:
    """Whether weight decay applies to a kind of parameter."""
    if parametrization.decayed == "all":
        return True
    return kind in ("hidden", "readout") or (
        parametrization.decayed == "two_dimensional" and kind == "embedding"
    )


def scaled_kind(name: str) -> Kind:
    """Return the kind of parameter for which a hyperparameter's scaling is shown."""
    return "embedding" if is_renamed(name) else "hidden"


def scaling(parametrization: Parametrization, name: str, kind: Kind | None = None) -> Powers:
    """How a hyperparameter's value, of a complement's 1 - value, moves with the ratios for one kind
    of parameter.
    """
    by, kind = HYPERPARAMETERS[name].scaling, kind or scaled_kind(name)
    if by is None:
        return Powers()
    if by == "moments":
        return Powers() if parametrization.moments == "fixed" else Powers(batch=1, duration=-1)
    powers: Powers = getattr(kind_rule(parametrization, kind), by)
    return powers


def scaled(parametrization: Parametrization, name: str, value: float, ratios: Ratios) -> float:
    """A value set at the base, at these ratios.

    Raises:
        SpecError: of a complement, a value that would leave [0, 1).
    """
    factor = scaling(parametrization, name).at(ratios)
    if HYPERPARAMETERS[name].scale != "log2_complement":
        return value * factor
    found = value if factor == 1 else 1 - (1 - value) * factor
    if not 0 <= found < 1:
        problem = (
            f"1 - {name} times m_B / m_D = {factor:.4g} gives {name} = {found:.4g}, outside [0, 1)"
        )
        way = "a smaller batch, a longer run" if factor > 1 else "a larger batch, a shorter run"
        raise SpecError("Parametrization", [f"{problem}: use {way}, or moments = fixed"])
    return found


def moments(parametrization: Parametrization, ratios: Ratios, hparams: Hparams) -> dict[str, float]:
    """The weights of the optimizer's moving averages: as set at the base, or 1 - beta scaled (arXiv
    2512.22382).

    Raises:
        SpecError: all of those that would leave [0, 1).
    """
    found, problems = {}, []
    for name, value in hparams.values.items():
        if HYPERPARAMETERS[name].scaling != "moments" or value is None:
            continue
        try:
            found[name] = scaled(parametrization, name, value, ratios)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError("Parametrization", problems)
    return found


def decay_problems(
    parametrization: Parametrization, recipe: Recipe, ratios: Ratios, hparams: Hparams
) -> list[str]:
    """Return the problem of the first kind of parameter of which a step at the peak would remove a
    whole weight.
    """
    for kind in KINDS:
        if not decays(parametrization, kind):
            continue
        if (share := decay_share(parametrization, recipe, kind, ratios, hparams)) < 1:
            continue
        optimizer = recipe.optimizer_for(kind).name
        rate, decay = (
            recipe.value_at_base(hparams, optimizer, name) for name in (LEARNING_RATE, WEIGHT_DECAY)
        )
        name = recipe.hyperparameter_for(optimizer, WEIGHT_DECAY)
        return [
            (
                f"{name} = {decay} at learning rate {rate}: a step would take {share:.3g} of "
                f"{with_article(kind)} weight"
            )
        ]
    return []


def refusals(
    parametrization: Parametrization, ratios: Ratios, hparams: Hparams, *, tied: bool
) -> list[str]:
    """What is wrong with a run under a parametrization; nothing, if it is fine."""
    problems = []
    if tied and parametrization.output == "absorbed":
        problems.append(
            f"tied = True under {parametrization}: output must be multiplier, because a matrix "
            "shared with the "
            "embedding has no init and rate of its own to absorb the readout's 1 / m_N"
        )
    try:
        moments(parametrization, ratios, hparams)
    except SpecError as error:
        problems += error.problems
    return problems
