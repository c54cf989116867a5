"""Findings of the ladder: its rungs, the scaling law, the chosen main run, and the curves of runs.

Units are those of `forerun._launcher.report.views.finding`.
"""

from __future__ import annotations

from forerun._launcher.report.views.finding import Estimate, Finding, Interval, LossCurve, Number

# ---- Curves of the runs ----


class Wider(Finding):
    """Mean training losses of all widths at one learning rate; a wider model should be better."""

    learning_rate: Number
    curves: list[LossCurve]


class NoiseScaleLook(Finding):
    """A measurement of the gradient noise at one step of a rung."""

    width: int
    num_layers: int = 0
    step: int = 0
    run_tokens: Number = 0
    """Tokens of the whole run."""
    batch_tokens: Number
    tokens: Number
    """Tokens trained on before the look."""
    scale_tokens: Number | None
    interval: tuple[Number | None, Number | None]
    inverse: Number
    """Inverse of the noise scale, which may be measured as negative."""
    inverse_error: Number
    """Standard error of the inverse."""


class BatchComparison(Finding):
    """A batch compared with the noise scale expected at the end of a run."""

    outcome: str
    batch_tokens: Number
    num_tokens: Number
    scale_tokens: Number | None
    interval: Interval | None


class NoiseExponent(Finding):
    """The power of the tokens with which the noise scale grows."""

    exponent: Number
    interval: Interval


class NoiseScale(Finding):
    """The gradient noise scale of the rungs."""

    level: Number
    looks: list[NoiseScaleLook]
    law: NoiseExponent | None = None
    judged: BatchComparison | None = None


# ---- Ladder, fit, and choice ----


class Rung(Finding):
    """A rung of the ladder."""

    width: int
    num_layers: int = 0
    params: Number
    tokens: Number
    flops: Number
    loss_nats: Number | None
    """Measured validation loss; None if the run diverged."""
    fitted_nats: Number | None
    """Loss that the fitted law gives for the rung."""


class RateOffset(Finding):
    """A rung at one learning rate, `octaves` above the rung's own rate."""

    octaves: Number
    learning_rate: Number
    loss_nats: Number | None
    num_seeds: int


class RungCheck(Finding):
    """A rung that was run at other learning rates too."""

    width: int
    params: Number
    tokens: Number
    num_steps: int
    offsets: list[RateOffset]
    noise_nats: Number | None
    """Standard deviation of the loss of one run; None if unknown."""
    excess_nats: Estimate
    """Loss at the rung's own rate minus loss at the best rate."""
    optimum_octaves: Estimate
    """Best rate, in octaves above the rung's own rate."""
    better_octaves: Number | None
    """Offset of the rate with the lowest loss; None if the rung's own rate has it."""
    outcome: str
    words: str
    """Sentence on the outcome."""


class Branches(Finding):
    """Rungs of one width that share a stable phase."""

    width: int
    curves: list[LossCurve]


class TunedCheck(Finding):
    """Gate `ladder_tuned`, which the checked rungs decide."""

    outcome: str
    reason: str


class Ladder(Finding):
    """The rungs of the ladder, and the checks of their learning rates."""

    rungs: list[Rung]
    branches: Branches | None
    checks: tuple[RungCheck, ...] = ()
    tuned: TunedCheck | None = None


class HeldOutRun(Finding):
    """A run predicted from smaller ones."""

    params: Number
    tokens: Number
    predicted: Number
    """Predicted loss in nats."""
    interval: Interval | None


class Backtest(Finding):
    """The largest rungs, predicted from the smaller ones."""

    num_fitted: int
    num_held_out: int
    extrapolation: Number
    """FLOPs of the largest held-out run divided by those of the largest fitted run."""
    mean_error: Number
    """Mean of predicted loss / measured loss - 1."""
    largest_error: Number
    num_covered: int | None
    """Number of held-out runs inside their intervals; None if there are no intervals."""
    runs: tuple[HeldOutRun, ...] = ()


class FitMember(Finding):
    """One law of a fit."""

    form: str
    weight: Number
    status: str
    parameters: dict[str, Number | None]
    params_vs_flops: Number | None = None
    """Exponent of the optimal size in the FLOPs, by the law itself."""
    tokens_vs_flops: Number | None = None
    loss_at_choice_nats: Number | None = None
    """Loss that the law predicts for the chosen run."""


class Fit(Finding):
    """The scaling law of the ladder."""

    form: str
    status: str
    parameters: dict[str, Number | None]
    members: list[FitMember]
    intervals: dict[str, Interval | None]
    level: Number
    exponents: dict[str, Estimate]
    num_runs: int
    backtest: Backtest | None
    backtests: tuple[Backtest, ...] = ()
    warnings: list[str]
    residual_sd: Number | None


class FrontierPoint(Finding):
    """The best loss for an amount of compute."""

    flops: Number
    params: Number
    loss_nats: Number
    interval: Interval | None


class FlatRange(Finding):
    """Sizes whose predicted loss is near the best (within
    `scaling_fits.allocation.allocate.FLAT`).
    """

    params: Interval


class Allocation(Finding):
    """The best size and tokens for the budget, by the fit."""

    flops: Number
    params: Number
    tokens: Number
    tokens_per_param: Number
    loss: Number
    interval: Interval | None
    params_interval: Interval | None
    tokens_interval: Interval | None
    flat_range: FlatRange
    warnings: list[str]


class Prediction(Finding):
    """The forecast of one new run."""

    flops: Number
    loss: Number
    interval: Interval | None
    level: Number
    extrapolation: Number
    """FLOPs divided by those of the largest fitted run."""
    warnings: list[str]


class ShapeSize(Finding):
    """Width and depth of a model."""

    width: int
    num_layers: int


class AspectCost(Finding):
    """The cost of another width per layer.

    The cost is in nats for the chosen run, and a share of the loss for a table of runs.
    """

    width_per_layer: Number
    interval: Interval
    nats: Number = 0
    share: Number = 0


class AspectPoint(Finding):
    """The effect of the width per layer on the loss at a rung."""

    width_per_layer: Number
    log_loss: Number
    """Natural logarithm of the loss, minus that of the law without the effect."""


class AspectEstimate(AspectPoint):
    """A point of the fitted curve, with its interval."""

    interval: Interval


class AspectTerm(Finding):
    """The best width per layer in a table of runs."""

    best: Number | None
    determined: bool
    """Whether the runs determine the best width per layer."""
    costs: list[AspectCost]
    tried: Interval = (0, 0)
    """Lowest and highest width per layer of the runs."""
    interval: Interval = (0, 0)
    """Interval of the best width per layer; unset in an `Aspect`, which has `best_interval`."""


class Aspect(AspectTerm):
    """The width per layer of the chosen run."""

    width_per_layer: Number
    ends: list[ShapeSize] | None
    """Shapes at the ends of the interval of the optimal size."""
    best_interval: Interval = (0, 0)
    points: list[AspectPoint]
    curve: list[AspectEstimate]


class Choice(Finding):
    """The main run that the fit chooses for the budget."""

    budget_flops: Number
    allocation: Allocation
    shape: ShapeSize
    aspect: Aspect | None = None
    params: int
    params_non_embedding: int
    num_steps: int
    tokens: Number
    flops_causal: Number
    prediction: Prediction
