"""The posterior of one study's law, given its runs, with the population of published studies as the
prior.

    log loss of a run = law(N, D) + departure(N, D) + noise

The law has the six coordinates of `population`. No law is exact, so a departure is added: a
Gaussian process over log N and log D, smooth over `Population.length`, whose variance is a multiple
of the noise variance (`DEPARTURES`). For each multiple the mode is found by Levenberg-Marquardt,
and draws around it come from a multivariate t distribution with importance weights (Gelman et al.,
Bayesian Data Analysis, third edition, sections 10.4 and 13.3). All draws are pooled by evidence and
resampled to equal weights. The noise variance has a scaled inverse chi-square prior and is
integrated out.

Shape suffixes: S draws, R merged runs, T new runs, P the six coordinates.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from forerun._scaling_fits.forecast.population import PUBLIC, Population
from forerun._scaling_fits.laws import solver
from forerun._scaling_fits.laws.forms import FORMS
from forerun._scaling_fits.laws.solver import NUM_COORDINATES, Floats, bisect
from forerun._scaling_fits.laws.table import TRUNK, RunTable
from forerun._scaling_fits.laws.traps import is_along_schedules
from forerun._scaling_fits.laws.weights import compute_excess

DEPARTURES = (1.0, 4.0, 16.0, 64.0)
"""Variances of the departure from the law, in multiples of the noise variance."""
MAX_MERGED_RUNS = 96
"""Maximum number of runs in a fit. If a study has more, runs that are neighbors in log N and log D
are averaged first."""

_NUM_STARTS = 8  # Starting points of the search for a mode
_NUM_STEPS = 25  # Maximum Levenberg-Marquardt steps of a search
_MAX_STEP = 1.5  # Maximum change of a coordinate in one step
_ROBUST_ROUNDS = 3  # Searches for a mode, between which outliers lose weight
_OUTLIER_SDS = 3.0
"""Standardized residual beyond which a run's noise variance grows with its square."""
_NOISE_FREEDOM = 2.0  # Degrees of freedom of the noise variance's prior
_PROPOSAL_FREEDOM = 6.0  # Degrees of freedom of the distribution from which draws are proposed
_PRIOR_FREEDOM = 4.0
"""Degrees of freedom of the population, a multivariate t distribution, which allows a study to
differ from the others if its runs show so."""
_SHARED_BY_TRUNK = 0.5
"""Share of the noise variance that decay branches of one trunk have in common."""
_MIN_BOX = 0.02  # Smallest side, in log N and log D, of a box in which runs are averaged
_DIFFERENCE = 1e-5  # Step of a coordinate for numerical derivatives
_BISECTIONS = 45
_TINY = 1e-300  # Lower bound of a number whose log is taken
_MAX_LOG = 300.0
"""Largest log of a term of a law, so that the square of an extreme draw's error stays finite."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MergedRuns:
    """Runs of a study, or averages of neighboring runs, in logs."""

    log_params: Floats
    log_tokens: Floats
    log_loss: Floats
    variance: Floats
    """Noise variance relative to that of one run on the frontier, where no other run has a lower
    loss for its FLOPs (`laws.weights`)."""
    trunk: Floats
    """Number of the trunk, the stable phase from which several runs decay; equal for all runs of
    one trunk, and unique for every other run."""

    @property
    def largest(self) -> NDArray[np.intp]:
        """Indices of the largest fifth of the runs. Among runs of one budget, larger models count
        as larger.
        """
        order = np.lexsort(
            (self.log_loss, self.log_params, np.round(self.log_params + self.log_tokens, 9))
        )
        return order[-max(1, len(order) // 5) :]

    @property
    def reference(self) -> tuple[float, float]:
        """Mean log N and log D of the largest fifth of the runs, the origin of a law's
        coordinates.
        """
        largest = self.largest
        return float(self.log_params[largest].mean()), float(self.log_tokens[largest].mean())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LawPosterior:
    """Draws of a study's law, its departure, and its noise, all with equal weights."""

    population: Population
    cells: MergedRuns
    theta: Floats
    """Laws (S, P) in the coordinates of `laws.solver`: log E, log A, log B, alpha, beta, k."""
    noise_sds: Floats
    """Standard deviations (S,) of the log loss of one run on the frontier."""
    departures: Floats
    """Variances (S,) of the departure from the law, in multiples of the noise variance."""
    mode: Floats
    """The most probable law (P,)."""
    left_out: Floats
    """Log loss of each run minus the prediction from the other runs (R,); empty for a chosen
    form."""

    @property
    def noise_sd(self) -> float:
        """Median standard deviation of one run's log loss."""
        return float(np.median(self.noise_sds))

    def predict_log_loss(self, params: Floats, tokens: Floats) -> tuple[Floats, Floats]:
        """Return the mean and the standard deviation of log loss that each draw predicts for each
        new run (S, T).

        The standard deviation includes the remaining uncertainty of the departure, the law's error
        beyond its runs, and the noise of one run.
        """
        n, d = np.log(params), np.log(tokens)
        middle_ST = solver.compute_log_loss(self.theta, n, d)
        residual_SR = self.cells.log_loss - solver.compute_log_loss(
            self.theta, self.cells.log_params, self.cells.log_tokens
        )
        kernel_TR = _compute_kernel(
            np.stack([n, d], axis=1), _stack_coordinates(self.cells), self.population.length
        )
        largest = float((self.cells.log_params + self.cells.log_tokens).max())
        error_T = self.population.compute_error_at(self.cells.reference, np.exp(n + d - largest))
        sd_ST = np.empty_like(middle_ST)
        for departure in np.unique(self.departures):
            chosen = self.departures == departure
            if departure == 0:
                sd_ST[chosen] = np.hypot(self.noise_sds[chosen, None], error_T)
                continue
            covariance = _compute_covariance(self.cells, float(departure), self.population.length)
            gain_TR = departure * kernel_TR @ np.linalg.inv(covariance)
            middle_ST[chosen] += residual_SR[chosen] @ gain_TR.T
            left_T = np.maximum(departure - departure * (gain_TR * kernel_TR).sum(axis=1), 0.0)
            sd_ST[chosen] = np.sqrt(self.noise_sds[chosen, None] ** 2 * (1.0 + left_T) + error_T**2)
        return middle_ST, sd_ST

    def compute_quantiles(
        self, params: Floats, tokens: Floats, shares: tuple[float, ...]
    ) -> list[Floats]:
        """Return quantiles (T,) of the log loss of one new run at each (N, D), one array for each
        share.
        """
        middle_ST, sd_ST = self.predict_log_loss(params, tokens)
        return [compute_mixture_quantile(middle_ST, sd_ST, share) for share in shares]


def compute_mixture_quantile(middle_ST: Floats, sd_ST: Floats, share: float) -> Floats:
    """Return the value at which the mean over draws of normal distribution functions reaches
    `share` (T,).
    """
    low, high = (middle_ST - 8.0 * sd_ST).min(axis=0), (middle_ST + 8.0 * sd_ST).max(axis=0)
    low, high = bisect(
        lambda at: ndtr((at - middle_ST) / sd_ST).mean(axis=0) < share, low, high, _BISECTIONS
    )
    return (low + high) / 2


def fit_posterior(
    table: RunTable, *, num_draws: int, seed: int, population: Population | None = None
) -> LawPosterior:
    """Draw laws, departures, and noise from the posterior of one study.

    Args:
        table: Runs with at least four different pairs of N and D.
        num_draws: Number of draws, S.
        seed: Seed of the draws; the mode does not depend on it.
        population: The prior; None for that of the published studies.
    """
    population = population or PUBLIC
    cells = merge_runs(table, population)
    problem = _Problem(cells, population)
    rng = np.random.default_rng([seed, 1])
    modes: list[_Mode] = []
    starts_SP = problem.build_starts()
    for departure in DEPARTURES:
        mode = problem.find_mode(starts_SP, departure)
        starts_SP = np.stack([mode.coordinates, problem.mean])
        modes.append(mode)
    evidence = np.array([mode.log_evidence for mode in modes])
    shares = np.exp(evidence - evidence.max())
    shares /= shares.sum()
    drawn = [problem.draw(mode, num_draws, rng) for mode in modes]
    weights = np.concatenate(
        [share * weight_S for share, (_, _, weight_S) in zip(shares, drawn, strict=True)]
    )
    chosen = _resample(weights, num_draws, rng)
    coordinates_SP = np.concatenate([draws for draws, _, _ in drawn])[chosen]
    noise_S = np.concatenate([noise for _, noise, _ in drawn])[chosen]
    heaviest = modes[int(shares.argmax())]
    return LawPosterior(
        population=population,
        cells=dataclasses.replace(cells, variance=heaviest.variance),
        theta=to_theta(coordinates_SP, cells.reference),
        noise_sds=np.sqrt(noise_S),
        departures=np.repeat(DEPARTURES, num_draws)[chosen],
        mode=to_theta(heaviest.coordinates[None, :], cells.reference)[0],
        left_out=_restore_row_order(heaviest.left_out, table),
    )


def _compute_content_order(table: RunTable) -> NDArray[np.intp]:
    """Return the order of the runs by size, tokens, and loss, so that the order of rows does not
    change any bit of a fit.
    """
    return np.lexsort((table.loss, table.tokens, table.params))


def _restore_row_order(values: Floats, table: RunTable) -> Floats:
    """Return the values of merged runs in the order of the table's rows, if no run was merged."""
    if len(values) != table.num_runs:
        return values
    ordered = np.empty_like(values)
    ordered[_compute_content_order(table)] = values
    return ordered


def merge_runs(table: RunTable, population: Population = PUBLIC) -> MergedRuns:
    """Return the runs in logs. If there are more than `MAX_MERGED_RUNS`, return averages over small
    boxes in log N and log D.

    A run off the frontier gives little information about efficient runs, so its variance is larger.
    """
    order = _compute_content_order(table)
    weight = table.weight[order]
    variance = (
        (1.0 + (compute_excess(table)[order] / population.near) ** 2) * weight.mean() / weight
    )
    # Runs outside a trunk get numbers of their own. Points of one curve share its noise, as
    # branches of one trunk do, and so all points of one size get one number.
    numbers = np.asarray(-1.0 - np.arange(table.num_runs), dtype=np.float64)
    if is_along_schedules(table.params, table.tokens):
        numbers = np.unique(table.params[order], return_inverse=True)[1].astype(np.float64)
    trunk = np.asarray(
        table.extra[TRUNK][order] if TRUNK in table.extra else numbers, dtype=np.float64
    )
    columns = np.log(np.stack([table.params, table.tokens, table.loss])[:, order])
    size = _MIN_BOX
    boxes = np.arange(table.num_runs)
    num_boxes = table.num_runs
    while num_boxes > MAX_MERGED_RUNS:
        _, boxes = np.unique(np.floor(columns[:2] / size), axis=1, return_inverse=True)
        num_boxes = int(boxes.max()) + 1
        size *= 1.3
    precision = 1.0 / variance
    total = np.bincount(boxes, precision, num_boxes)
    n, d, y = (np.bincount(boxes, precision * column, num_boxes) / total for column in columns)
    trunk_of_box = np.full(num_boxes, -np.inf)
    np.maximum.at(trunk_of_box, boxes, trunk)
    return MergedRuns(
        log_params=n, log_tokens=d, log_loss=y, variance=1.0 / total, trunk=trunk_of_box
    )


def to_theta(coordinates_SP: Floats, reference: tuple[float, float]) -> Floats:
    """Return laws in the coordinates of `laws.solver` from those of `population` about a reference
    point.
    """
    log_level, logit_e, logit_w, log_a, log_b, log_k = coordinates_SP.T
    k = np.exp(log_k)
    alpha, beta = np.exp(log_a) / k, np.exp(log_b) / k
    # log of (1 - e) * L0, to the power 1 / k
    log_rest = (log_level - np.logaddexp(0.0, logit_e)) / k
    log_a_term = log_rest - np.logaddexp(0.0, -logit_w) + alpha * reference[0]
    log_b_term = log_rest - np.logaddexp(0.0, logit_w) + beta * reference[1]
    log_e = log_level - np.logaddexp(0.0, -logit_e)
    return FORMS["coupled"].to_theta(
        np.stack([log_e, log_a_term, log_b_term, alpha, beta, k], axis=1)
    )


class _Mode(NamedTuple):
    """The most probable law under one departure ratio."""

    coordinates: Floats
    hessian: Floats
    """Hessian of the negative log posterior (P, P)."""
    log_evidence: float
    precision: Floats
    """Inverse of the relative covariance of the runs (R, R)."""
    variance: Floats
    """Relative noise variances, those of outliers enlarged (R,)."""
    left_out: Floats


class _Problem:
    """One study's runs under one prior."""

    def __init__(self, cells: MergedRuns, population: Population) -> None:
        self.cells = cells
        reference = cells.reference
        self.n, self.d = cells.log_params - reference[0], cells.log_tokens - reference[1]
        self.mean = np.array(
            [np.median(cells.log_loss[cells.largest]), *population.compute_mean_at(reference)]
        )
        self.prior = np.zeros((NUM_COORDINATES, NUM_COORDINATES))
        self.prior[0, 0] = 1e-4  # The level of the loss has a flat prior
        self.prior[1:, 1:] = np.linalg.inv(population.covariance)
        self.sd = np.array(population.sd)
        self.length = population.length
        self.shape = _NOISE_FREEDOM / 2 + len(self.n) / 2
        self.scale = _NOISE_FREEDOM / 2 * population.noise_sd**2

    def build_starts(self) -> Floats:
        """Return starting points: the population's mean, and random points around it."""
        spread = (
            np.random.default_rng(0).standard_normal((_NUM_STARTS - 1, NUM_COORDINATES - 1))
            * self.sd
        )
        offsets = np.pad(spread, ((1, 0), (1, 0)))
        return self.mean + offsets

    def find_mode(self, starts_SP: Floats, departure: float) -> _Mode:
        """Find the mode. Each round after the first enlarges the noise of runs that contradict the
        others.
        """
        variance = self.cells.variance
        points_SP = starts_SP
        for _ in range(_ROBUST_ROUNDS):
            covariance = _compute_covariance(
                dataclasses.replace(self.cells, variance=variance), departure, self.length
            )
            whiten = np.linalg.inv(np.linalg.cholesky(covariance))
            points_SP, objective_S, hessian_SPP = self._descend(points_SP, whiten)
            best = int(objective_S.argmin())
            point = points_SP[best]
            precision = whiten.T @ whiten
            residual = self.cells.log_loss - _compute_log_loss(point[None, :], self.n, self.d)[0]
            pull = precision @ residual
            noise = (self.scale + residual @ pull / 2) / self.shape
            standardized = pull / np.sqrt(np.diag(precision) * noise)
            used = variance
            variance = self.cells.variance * np.maximum(1.0, (standardized / _OUTLIER_SDS) ** 2)
            points_SP = points_SP[np.argsort(objective_S, kind="stable")[:2]]
        hessian = hessian_SPP[best]
        evidence = float(
            np.log(np.diag(whiten)).sum() - objective_S[best] - np.linalg.slogdet(hessian)[1] / 2
        )
        return _Mode(
            coordinates=point,
            hessian=hessian,
            log_evidence=evidence,
            precision=precision,
            variance=used,
            left_out=pull / np.diag(precision),
        )

    def _compute_objective(self, points_SP: Floats, squares_S: Floats) -> Floats:
        """Return the negative log posterior from whitened sums of squares (S,)."""
        distance_S = self._compute_distance(points_SP)
        prior_S = (_PRIOR_FREEDOM + NUM_COORDINATES) / 2 * np.log1p(distance_S / _PRIOR_FREEDOM)
        return self.shape * np.log(self.scale + squares_S / 2) + prior_S

    def _compute_distance(self, points_SP: Floats) -> Floats:
        """Return the squared distance from the population's mean, in its standard deviations
        (S,).
        """
        off_SP = points_SP - self.mean
        return np.einsum("sp,pq,sq->s", off_SP, self.prior, off_SP)

    def _sum_squares(self, points_SP: Floats, whiten: Floats) -> Floats:
        """Return the sum of squares of whitened residuals (S,)."""
        residual_SR = self.cells.log_loss - _compute_log_loss(points_SP, self.n, self.d)
        return ((residual_SR @ whiten.T) ** 2).sum(axis=1)

    def _descend(self, points_SP: Floats, whiten: Floats) -> tuple[Floats, Floats, Floats]:
        """Minimize the negative log posterior by Levenberg-Marquardt from every point at once."""
        points_SP = points_SP.copy()
        squares_S = self._sum_squares(points_SP, whiten)
        objective_S = self._compute_objective(points_SP, squares_S)
        damping_S = np.full(len(points_SP), 1e-2)
        diagonal = np.arange(NUM_COORDINATES)
        for _ in range(_NUM_STEPS):
            gradient_SP, hessian_SPP = self._differentiate(points_SP, squares_S, whiten)
            hessian_SPP[:, diagonal, diagonal] *= 1.0 + damping_S[:, None]
            step_SP = np.linalg.solve(hessian_SPP, gradient_SP[:, :, None])[:, :, 0]
            moved_SP = points_SP + np.clip(step_SP, -_MAX_STEP, _MAX_STEP)
            moved_squares_S = self._sum_squares(moved_SP, whiten)
            moved_objective_S = self._compute_objective(moved_SP, moved_squares_S)
            better = moved_objective_S < objective_S
            gained = float((objective_S - moved_objective_S)[better].max(initial=0.0))
            points_SP[better] = moved_SP[better]
            squares_S = np.where(better, moved_squares_S, squares_S)
            objective_S = np.where(better, moved_objective_S, objective_S)
            damping_S = np.clip(np.where(better, damping_S / 4, damping_S * 6), 1e-8, 1e8)
            if better.any() and gained < 1e-7:
                break
        return points_SP, objective_S, self._differentiate(points_SP, squares_S, whiten)[1]

    def _differentiate(
        self, points_SP: Floats, squares_S: Floats, whiten: Floats
    ) -> tuple[Floats, Floats]:
        """Return the negative gradient (S, P) and the Gauss-Newton Hessian (S, P, P) of the
        negative log posterior.
        """
        at_SR = _compute_log_loss(points_SP, self.n, self.d)
        slopes = []
        for index in range(NUM_COORDINATES):
            nudged_SP = points_SP.copy()
            nudged_SP[:, index] += _DIFFERENCE
            slopes.append(
                (_compute_log_loss(nudged_SP, self.n, self.d) - at_SR) @ whiten.T / _DIFFERENCE
            )
        slope_SRP = np.stack(slopes, axis=2)
        residual_SR = (self.cells.log_loss - at_SR) @ whiten.T
        noise_S = (self.scale + squares_S / 2) / self.shape
        gradient_SP = np.einsum("srp,sr->sp", slope_SRP, residual_SR) / noise_S[:, None]
        hessian_SPP = slope_SRP.transpose(0, 2, 1) @ slope_SRP / noise_S[:, None, None]
        pull_S = (_PRIOR_FREEDOM + NUM_COORDINATES) / (
            _PRIOR_FREEDOM + self._compute_distance(points_SP)
        )
        gradient_SP -= pull_S[:, None] * ((points_SP - self.mean) @ self.prior)
        return gradient_SP, hessian_SPP + pull_S[:, None, None] * self.prior

    def draw(
        self, mode: _Mode, num_draws: int, rng: np.random.Generator
    ) -> tuple[Floats, Floats, Floats]:
        """Draw laws about a mode: coordinates (S, P), noise variances (S,), and importance weights
        (S,).
        """
        factor = np.linalg.cholesky(np.linalg.inv(mode.hessian))
        normal_SP = rng.standard_normal((num_draws, NUM_COORDINATES))
        chi_S = rng.chisquare(_PROPOSAL_FREEDOM, num_draws) / _PROPOSAL_FREEDOM
        points_SP = mode.coordinates + normal_SP / np.sqrt(chi_S)[:, None] @ factor.T
        distance_S = (normal_SP**2).sum(axis=1) / chi_S
        log_proposal_S = (
            -(_PROPOSAL_FREEDOM + NUM_COORDINATES) / 2 * np.log1p(distance_S / _PROPOSAL_FREEDOM)
        )
        residual_SR = self.cells.log_loss - _compute_log_loss(points_SP, self.n, self.d)
        squares_S = ((residual_SR @ mode.precision) * residual_SR).sum(axis=1)
        log_weight_S = -self._compute_objective(points_SP, squares_S) - log_proposal_S
        weight_S = np.exp(log_weight_S - log_weight_S.max())
        noise_S = (self.scale + squares_S / 2) / rng.gamma(self.shape, size=num_draws)
        return points_SP, noise_S, weight_S / weight_S.sum()


def _compute_log_loss(points_SP: Floats, n: Floats, d: Floats) -> Floats:
    """Compute log loss (S, R) of laws in the coordinates of `population`, at n and d relative to
    the reference point.
    """
    log_level, logit_e, logit_w, log_a, log_b, log_k = points_SP.T[:, :, None]
    k = np.exp(log_k)
    share = 1.0 / (1.0 + np.exp(-logit_w))
    in_params = np.minimum(-np.exp(np.minimum(log_a - log_k, _MAX_LOG)) * n, _MAX_LOG)
    in_tokens = np.minimum(-np.exp(np.minimum(log_b - log_k, _MAX_LOG)) * d, _MAX_LOG)
    inner = share * np.exp(in_params) + (1.0 - share) * np.exp(in_tokens)
    floor = 1.0 / (1.0 + np.exp(-logit_e))
    log_rest = np.minimum(k * np.log(np.maximum(inner, _TINY)), _MAX_LOG)
    return log_level + np.log(floor + (1.0 - floor) * np.exp(log_rest))


def _stack_coordinates(cells: MergedRuns) -> Floats:
    return np.stack([cells.log_params, cells.log_tokens], axis=1)


def _compute_kernel(first: Floats, second: Floats, length: float) -> Floats:
    """Return the correlation of departures at two sets of places, (T, 2) and (R, 2)."""
    distance = ((first[:, None, :] - second[None, :, :]) ** 2).sum(axis=2)
    return np.exp(-distance / (2 * length**2))


def _compute_covariance(cells: MergedRuns, departure: float, length: float) -> Floats:
    """Return the covariance of the runs' log losses about the law, relative to the noise variance
    (R, R).
    """
    same_trunk = cells.trunk[:, None] == cells.trunk[None, :]
    shared = _SHARED_BY_TRUNK * np.sqrt(np.outer(cells.variance, cells.variance)) * same_trunk
    np.fill_diagonal(shared, cells.variance)
    places = _stack_coordinates(cells)
    return shared + departure * _compute_kernel(places, places, length)


def _resample(weights: Floats, num_draws: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return the indices of `num_draws` draws of equal weight, by systematic resampling."""
    edges = np.cumsum(weights)
    points = (rng.random() + np.arange(num_draws)) / num_draws * edges[-1]
    return np.minimum(np.searchsorted(edges, points), len(weights) - 1)
